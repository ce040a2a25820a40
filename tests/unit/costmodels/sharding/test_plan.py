"""What a step costs with a plan: well-known plans of a small MLP to the byte, and memory by counting what is alive."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from costmodels.blocks.operator import OpKind
from costmodels.sharding.dims import rule_of
from costmodels.sharding.fusion import unfused
from costmodels.sharding.graph import CONSTANT, INPUT, STATE, GraphBuilder, TensorKind
from costmodels.sharding.layouts import PARTIAL, REPLICATED, local_share
from costmodels.sharding.plan import NONE, Plan, cost_of, reduce_partial_sums, violations
from tests.support.graphs.random_graphs import graphs, mesh_of, meshes, plan_of, plans
from tests.support.graphs.small_graphs import mlp
from tuner.planners.sharding.recursive import refine_mesh

BATCH, HIDDEN, FFN = 512, 64, 256
GRAPH = mlp(batch=BATCH, hidden=HIDDEN, ffn=FFN)
WEIGHT_BYTES, HIDDEN_BYTES, FFN_BYTES = 2 * HIDDEN * FFN, 2 * BATCH * HIDDEN, 2 * BATCH * FFN
R, P = REPLICATED, PARTIAL


def factor_named(op, *names):
    """The first factor of an operator that has one of these names; NONE where none has."""
    found = [number for name in names for number, factor in enumerate(op.rule.factors) if factor.name == name]
    return found[0] if found else NONE


def served_by(mesh, graph=GRAPH, *, compute, state):
    """A plan: factors of the operators on activations, and of those on weights alone, by name for each axis."""
    rows = []
    for op in graph.ops:
        is_state = op.name.startswith("0.w")
        rows.append([factor_named(op, *names) for names in (state if is_state else compute)])
    return plan_of(graph, mesh, rows)


def sent(plan):
    """What a plan sends: the tensor, the collective, its axes and its bytes."""
    return [
        (plan.graph.tensors[each.tensor].name, each.move.kind, each.move.axes, each.move.message_bytes)
        for each in cost_of(plan).collectives
    ]


@pytest.mark.parametrize(("compute", "state"), [([("batch",)], [()]), ([("ffn",)], [("ffn",)])])
def test_products_take_an_eighth_on_eight_devices(compute, state):
    """Whichever factor eight devices serve, long products take an eighth of their arithmetic."""
    graph = mlp(batch=8 * BATCH, hidden=4 * 1024, ffn=16 * 1024)
    plan = served_by(mesh_of(8), graph, compute=compute, state=state)
    (device,) = plan.mesh.cluster.devices
    products = [number for number, op in enumerate(graph.ops) if op.precision]
    expected_s = graph.ops[products[0]].flop / 8 / device.peak_flop_per_s("bf16")

    assert cost_of(plan).compute_s[products] == pytest.approx(expected_s)


def test_short_operators_take_their_traffic():
    """An operator without arithmetic takes the bytes that its device reads and writes, over the memory's bandwidth."""
    plan = served_by(mesh_of(8), compute=[("batch",)], state=[()])
    (device,) = plan.mesh.cluster.devices
    seconds = dict(zip((op.name for op in GRAPH.ops), cost_of(plan).compute_s.tolist(), strict=True))

    assert seconds["0.activation"] == pytest.approx(2 * FFN_BYTES / 8 / device.memory_bandwidth_bytes_per_s)
    assert seconds["0.w1.update"] == pytest.approx(7 * WEIGHT_BYTES / device.memory_bandwidth_bytes_per_s)
    assert seconds["x"] == seconds["0.w1"] == 0.0


def test_data_parallelism_holds_the_weights_whole():
    """The peak is at the second weight's gradient: all states, that gradient, and parts of five activations."""
    plan = served_by(mesh_of(8), compute=[("batch",)], state=[()])
    states = 2 * 3 * WEIGHT_BYTES  # a moment takes twice the bytes of its weight
    activations = (3 * FFN_BYTES + 2 * HIDDEN_BYTES) / 8  # z, z.g, y; x, loss.g

    assert cost_of(plan).peak_memory_bytes == states + WEIGHT_BYTES + activations


def brute_force_peak_bytes(plan):
    """The most over all operators, each asked for every tensor whether that is there; nothing is fused."""
    graph, sizes = plan.graph, plan.mesh.sizes
    begin = {op.results[0] for op in graph.ops if op.begins}
    kept = {op.operands[0] for op in graph.ops if op.primitive == STATE and op.operands} - begin
    peak = 0.0
    for now in range(len(graph.ops)):
        total = 0.0
        for tensor, array in enumerate(graph.tensors):
            maker, slot = graph.maker[tensor]
            readers = [use.op for use in graph.uses[tensor] if graph.ops[use.op].primitive != STATE]
            lies = array.num_bytes * local_share(plan.layout(tensor), sizes)
            stays = graph.ops[maker].primitive in (STATE, INPUT)
            if stays or (tensor not in kept and maker <= now <= max([maker, *readers])):
                total += lies
            if maker == now:
                total += array.num_bytes * local_share(plan.written(maker, slot), sizes) - lies
            total += sum(
                array.num_bytes * local_share(layout, sizes)
                for layout, readers, is_kept in copies_by_hand(plan, tensor)
                if now in readers or (is_kept and min(readers) <= now <= max(readers))
            )
        peak = max(peak, total)
    return peak


def copies_by_hand(plan, tensor):
    """Every other layout in which a pass reads a tensor: it, who reads it, and whether it is kept for them."""
    graph = plan.graph
    maker = graph.ops[graph.maker[tensor][0]]
    found = {}
    for use in graph.uses[tensor]:
        wanted = plan.wanted(use.op, use.operand)
        is_second = maker.primitive == STATE and graph.first_backward is not None and use.op >= graph.first_backward
        if wanted != plan.layout(tensor) and graph.ops[use.op].primitive != STATE:
            found.setdefault((wanted, is_second), []).append(use.op)
    for (layout, _), readers in found.items():
        changes = zip(plan.layout(tensor), layout, strict=True)
        is_slice = all(old in (new, R) for old, new in changes)
        yield layout, readers, not is_slice and maker.primitive != CONSTANT


@given(plan=plans())
@settings(max_examples=150)
def test_a_step_is_compute_and_communication_and_its_peak_is_counted(plan):
    """The time is the sum of both, none of them negative; the peak is the most that any operator finds alive."""
    cost = cost_of(plan)

    sent_s = [each.seconds * each.times for each in cost.collectives]
    assert cost.step_time_s == pytest.approx(cost.compute_s.sum() + sum(sent_s))
    assert min(0, *cost.compute_s, *sent_s) == 0
    plain = replace(plan, graph=unfused(plan.graph))
    assert cost_of(plain).peak_memory_bytes == pytest.approx(brute_force_peak_bytes(plain))


def chain(*patterns):
    """A source of 8 by 6, and an operator of each pattern on what the one before wrote."""
    graph = GraphBuilder(name="chain")
    latest = graph.source(INPUT, "x", (8, 6), 1, TensorKind.DATA, ("a", "b"))
    for number, pattern in enumerate(patterns):
        rule = rule_of(pattern, {"a": 8, "b": 6})
        result = graph.tensor(f"t{number}", rule.result_shape(0), 1, TensorKind.ACTIVATION)
        graph.op(f"op{number}", "any", (latest,), (result,), rule)
        latest = result
    return graph.done()


def readers(count, *, primitive=INPUT, times=()):
    """A source, and so many operators that read it."""
    graph = GraphBuilder(name="readers")
    source = graph.source(primitive, "x", (8, 6), 1, TensorKind.DATA, ("a", "b"))
    for number in range(count):
        result = graph.tensor(f"t{number}", (8, 6), 1, TensorKind.ACTIVATION)
        rule = rule_of("a b -> a b", {"a": 8, "b": 6})
        graph.op(f"op{number}", "any", (source,), (result,), rule, times=times[number] if times else 1)
    return graph.done()


def test_partial_sums_take_memory_until_they_are_scattered():
    """Where an operator sums up, it holds the sums of all parts of the result, though it keeps its own part alone."""
    graph = chain("a b -> b", "b -> b")
    plan = plan_of(graph, mesh_of(2), [[0], [0], [0]])

    assert sent(plan) == [("t0", OpKind.REDUCE_SCATTER, (0,), 6.0)]
    assert cost_of(plan).peak_memory_bytes == 24 + 6


def test_a_state_that_another_one_keeps_takes_memory():
    """Where one state becomes what another one is, both are there all step long."""
    graph = GraphBuilder(name="states")
    first = graph.source(STATE, "first", (8,), 1, TensorKind.PARAMETER)
    second = graph.source(STATE, "second", (8,), 1, TensorKind.PARAMETER)
    graph.keep(first, second)
    plan = plan_of(graph.done(), mesh_of(2), [[NONE], [NONE]])

    assert cost_of(plan).peak_memory_bytes == 16


def test_a_tensor_is_moved_once_for_all_who_want_it_alike():
    """Two readers that want a tensor whole share one gather, a third one slices it, and nobody sends a constant."""
    plan = plan_of(readers(3), mesh_of(2), [[0], [NONE], [NONE], [0]])
    of_constant = plan_of(readers(2, primitive=CONSTANT), mesh_of(2), [[0], [NONE], [1]])

    assert sent(plan) == [("x", OpKind.ALL_GATHER, (0,), 48.0)]
    assert sent(of_constant) == []


def test_a_move_runs_as_often_as_the_first_who_needs_it():
    """A gather is paid for every execution of the first operator that reads what it makes."""
    cost = cost_of(plan_of(readers(2, times=(3, 5)), mesh_of(2), [[0], [NONE], [NONE]]))
    (each,) = cost.collectives

    assert each.times == 3
    assert cost.comm_s == 3 * each.seconds


@pytest.mark.parametrize(
    ("written", "targets", "expected"),
    [
        ((P,), [(0,)], (0,)),
        ((P,), [(0,), (0,)], (0,)),
        ((P,), [(0,), (1,)], (R,)),
        ((P,), [(0,), (R,)], (R,)),
        ((P,), [(R,)], (R,)),
        ((P,), [], (R,)),
        ((P, P), [(0, 1), (0, R)], (0, R)),
        ((0, P), [(R, 1)], (0, 1)),
        ((R,), [(0,)], (R,)),
    ],
)
def test_partial_sums_settle_where_all_want_them(written, targets, expected):
    """Along each axis they are scattered to the dim that all want, and added up everywhere if not all want the same."""
    assert reduce_partial_sums(written, targets, (8, 6), (2,) * len(written)) == expected


@pytest.mark.parametrize(
    ("written", "targets", "expected"),
    [
        # 6 elements among 6 devices and 2: no axis can cut what the other one has cut already
        ((0, P), [(R, 0)], (0, R)),
        ((P, 0), [(0, R)], (R, 0)),
        ((P, P), [(0, R), (R, 0)], (R, R)),
        ((0, P), [(R, 1)], (0, 1)),
    ],
)
def test_partial_sums_settle_in_equal_parts(written, targets, expected):
    """An axis whose sums all want along a dim that it can't cut evenly beside another axis adds them up everywhere."""
    assert reduce_partial_sums(written, targets, (6, 6), (6, 2)) == expected


def test_the_first_axes_scatter_their_sums():
    """Of three axes that cut 12 rows into too many parts together, those that come first in the mesh cut them."""
    targets = [(0, 0, 0)]

    assert reduce_partial_sums((P, P, P), targets, (12,), (3, 2, 4)) == (0, 0, R)
    assert reduce_partial_sums((0, P, P), targets, (12,), (4, 2, 3)) == (0, R, 0)


@given(plan=plans())
@settings(max_examples=200)
def test_every_tensor_lies_in_equal_parts(plan):
    """Whatever a plan serves, no tensor lies, and no copy does, in parts that its dims don't divide into."""
    for tensor, array in enumerate(plan.graph.tensors):
        for layout in (plan.layout(tensor), *(copy.layout for copy in plan.copies(tensor))):
            for dim, size in enumerate(array.shape):
                cuts = [ways for cut, ways in zip(layout, plan.mesh.sizes, strict=True) if cut == dim]
                assert size % math.prod(cuts) == 0


def test_sums_of_six_among_twelve_are_added_up():
    """Six rows on six devices by two: sums along the two are an all-reduce of what a device holds, no scatter."""
    graph = GraphBuilder(name="six")
    source = graph.source(INPUT, "x", (6, 4), 4, TensorKind.DATA, ("a", "c"))
    rules = (rule_of("a c -> a", {"a": 6, "c": 4}), rule_of("a -> a", {"a": 6}))
    sums = graph.tensor("sums", (6,), 4, TensorKind.ACTIVATION)
    read = graph.tensor("read", (6,), 4, TensorKind.ACTIVATION)
    graph.op("sum", "any", (source,), (sums,), rules[0])
    graph.op("read", "any", (sums,), (read,), rules[1])
    plan = plan_of(graph.done(), mesh_of(6, 2), [[0, 1], [0, 1], [NONE, 0]])

    assert not violations(plan)
    assert plan.layout(sums) == (0, R)
    assert [each[1:] for each in sent(plan) if each[0] == "sums"] == [
        (OpKind.ALL_REDUCE, (1,), 4.0),
        (OpKind.ALL_GATHER, (0,), 12.0),
    ]


def test_dims_name_their_axes():
    """A dim is cut by the axes that serve its factor, major to minor."""
    plan = plan_of(readers(1), mesh_of(2, 2), [[0, 0], [0, 1]])

    assert plan.dims_of(0) == (("data", "model"), ())
    assert plan.dims_of(1) == (("data",), ("model",))


def test_violations_are_told():
    """A plan that serves what is not there, what can't be cut, what is needed whole or does not divide is told so."""
    graph = readers(1)
    missing = plan_of(graph, mesh_of(2), [[7], [NONE]])
    uneven = plan_of(graph, mesh_of(4), [[1], [NONE]])
    builder = GraphBuilder(name="blocked")
    source = builder.source(INPUT, "x", (8,), 1, TensorKind.DATA)
    result = builder.tensor("y", (8,), 1, TensorKind.ACTIVATION)
    builder.op("sort", "sort", (source,), (result,), rule_of("a -> a", {"a": 8}, blocked=("a",)))
    blocked = plan_of(builder.done(), mesh_of(2), [[0], [0]])

    assert violations(missing) == ("x: axis data serves factor 7, which it does not have",)
    assert violations(uneven) == ("x: b of 6 can't be cut into 4",)
    assert violations(blocked) == ("sort: factor a can't be cut (blocked)",)
    with pytest.raises(AssertionError, match="`served` is"):
        Plan(graph=GRAPH, mesh=mesh_of(2), served=np.zeros((1, 1), dtype=np.int64))


@given(graph=graphs(), mesh=meshes())
def test_who_serves_nothing_sends_nothing(graph, mesh):
    """With every operator whole on every device nothing is sent, and all take the time of one device."""
    plan = plan_of(graph, mesh, [[NONE] * len(mesh.sizes) for _ in graph.ops])

    assert cost_of(plan).collectives == ()
    assert violations(plan) == ()


@given(plan=plans())
def test_parts_of_axes_cost_what_axes_cost(plan):
    """Serving a factor with an axis costs what serving it with all of the axis's prime parts costs."""
    mesh, levels = refine_mesh(plan.mesh)
    parts = [level.of for level in levels]
    same = plan_of(plan.graph, mesh, plan.served[:, parts])
    serves_single = any(size == 1 and (plan.served[:, axis] != NONE).any() for axis, size in enumerate(plan.mesh.sizes))

    cost, cost_of_parts = cost_of(plan), cost_of(same)

    assert cost_of_parts.compute_s == pytest.approx(cost.compute_s)
    if not serves_single:
        assert cost_of_parts.comm_s == pytest.approx(cost.comm_s)
        assert cost_of_parts.peak_memory_bytes == pytest.approx(cost.peak_memory_bytes)
