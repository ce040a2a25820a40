"""Joint collectives: which are joined, and what each pays of the latency."""

from collections import Counter

import pytest

from costmodels.blocks.operator import OpKind
from costmodels.sharding.dims import rule_of
from costmodels.sharding.fusion import LAUNCH_S
from costmodels.sharding.graph import INPUT, STATE, FusionKind, GraphBuilder, TensorKind
from costmodels.sharding.joining import MOST_BYTES, joint_messages, latency_shares, packing_s
from costmodels.sharding.overlap import timeline_of
from costmodels.sharding.plan import cost_of
from tests.support.graphs.random_graphs import mesh_of, plan_of

SIZES = {"batch": 64, "rows": 64, "columns": 64}


def many_gradients(layers, *, is_fused=True):
    """Plan of a step that updates parameters by gradients of the same batch, which eight devices share."""
    graph = GraphBuilder(name="gradients")
    x = graph.source(INPUT, "x", (64, 64), 4, TensorKind.DATA)
    y = graph.source(INPUT, "y", (64, 64), 4, TensorKind.DATA)
    served = [[0], [0]]
    params = [graph.source(STATE, f"p{layer}", (64, 64), 4, TensorKind.PARAMETER) for layer in range(layers)]
    served += [[-1]] * layers
    for layer, param in enumerate(params):
        gradient = graph.tensor(f"g{layer}", (64, 64), 4, TensorKind.GRADIENT)
        rule = rule_of("batch rows, batch columns -> rows columns", SIZES)
        graph.op(f"product{layer}", "matmul", [x, y], [gradient], rule, flop=1e6, precision="fp32")
        new = graph.tensor(f"n{layer}", (64, 64), 4, TensorKind.PARAMETER)
        rule = rule_of("rows columns, rows columns -> rows columns", SIZES)
        fusion = FusionKind.LOOP if is_fused else FusionKind.NONE
        graph.op(f"update{layer}", "add", [param, gradient], [new], rule, fusion=fusion)
        graph.keep(param, new)
        served += [[0], [-1]]
    return plan_of(graph.done(), mesh_of(8), served)


@pytest.mark.parametrize("layers", [1, 7])
def test_gradients_pay_one_latency_together(layers):
    """Gradients that nothing but their updates follow are one message, packed, in the cost as in the timeline."""
    plan = many_gradients(layers)
    cost = cost_of(plan)
    mesh = plan.mesh
    together_s = mesh.seconds(OpKind.ALL_REDUCE, layers * 64 * 64 * 4, (0,))
    if layers > 1:
        together_s += layers * packing_s(OpKind.ALL_REDUCE, 64 * 64 * 4, mesh)

    assert Counter(each.move.kind for each in cost.collectives) == {OpKind.ALL_REDUCE: layers}
    assert cost.comm_s == pytest.approx(together_s)
    assert timeline_of(plan, cost).moved_s.sum() == pytest.approx(together_s)


def test_without_a_compiler_each_pays_its_own():
    """Nothing joins collectives of a program whose operators run one by one."""
    plan = many_gradients(7, is_fused=False)
    cost = cost_of(plan)
    alone_s = plan.mesh.seconds(OpKind.ALL_REDUCE, 64 * 64 * 4, (0,))

    assert cost.comm_s == pytest.approx(7 * alone_s)
    assert timeline_of(plan, cost).moved_s.sum() == pytest.approx(7 * alone_s)
    assert set(latency_shares(plan.graph)) == {1.0}


def test_messages_are_filled_in_the_order_of_the_program():
    """A message is full before the next begins; what is larger alone, of another key or at another place is apart."""
    half = MOST_BYTES / 2
    keys = ["sum", "sum", "sum", "sum", "gather", "sum", None, None]
    sizes = [half, half, half, 3 * half, half, half, half, half]
    ranks = [3, 2, 1, 0, 0, 0, 0, 0]
    places = [0, 0, 0, 0, 0, 1, 0, 0]

    found = joint_messages(keys, sizes, ranks, places)

    assert sorted(map(sorted, found)) == [[0], [1, 2], [3], [4], [5], [6], [7]]


def test_what_is_moved_along_an_inner_dim_is_turned():
    """XLA moves parts of the first dim; for any other, a kernel turns each part, in the cost as in the timeline."""
    mesh, times = mesh_of(8), []
    for spec in ("rows columns", "columns rows"):
        graph = GraphBuilder(name="gathered")
        source = graph.source(STATE, "w", (64, 64), 4, TensorKind.PARAMETER)
        result = graph.tensor("r", (64, 64), 4, TensorKind.ACTIVATION)
        rule = rule_of("rows columns -> rows columns", SIZES)
        graph.op("read", "exp", [source], [result], rule, fusion=FusionKind.LOOP)
        graph.keep(source, source)
        plan = plan_of(graph.done(), mesh, [[spec.split().index("rows")], [-1]])
        cost = cost_of(plan)
        times.append(cost.comm_s)
        assert timeline_of(plan, cost).moved_s.sum() == pytest.approx(cost.comm_s)

    part_bytes = 64 * 64 * 4 / 8
    assert times[1] - times[0] == pytest.approx(LAUNCH_S + 2 * part_bytes / mesh.memory_bandwidth_bytes_per_s)
