"""The integer program of shardings against what its plans cost, and against trying all of them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.blocks.operator import OpKind
from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, GraphBuilder, TensorKind
from costmodels.sharding.plan import NONE, cost_of
from tests.support.graphs.random_graphs import all_plans, choices, graphs, mesh_of, meshes, num_plans, plan_of, plans
from tests.support.graphs.small_graphs import mlp
from tuner.planners.engine.outcome import Known, Limits, Stop
from tuner.planners.sharding.sharding_milp import choices_of, shard_by_milp

MOST_PLANS = 300
ROOM = 1 + 1e-5
"""HiGHS lets a limit be missed by a little."""
NOTHING_S = 1e-9
"""It loses a nanosecond beside collectives of microseconds, where a step has no other work."""


def closed(plan):
    """Allows an operator what it has in a plan, and nothing else."""
    rows = plan.served.tolist()
    return lambda number: [tuple(rows[number])]


@given(plan=plans())
@settings(max_examples=40)
def test_a_solution_costs_and_holds_what_its_plan_does(plan):
    """With every choice taken, what the program minimises is the step time of that plan, and the limit of memory lets
    it pass from its peak on.
    """
    peak_bytes = cost_of(plan).peak_memory_bytes

    fits = shard_by_milp(plan.graph, plan.mesh, allowed=closed(plan), memory_bytes=peak_bytes * ROOM)
    too_large = shard_by_milp(plan.graph, plan.mesh, allowed=closed(plan), memory_bytes=peak_bytes / ROOM**2)

    assert (fits.known, too_large.known) == (Known.OPTIMAL, Known.INFEASIBLE)
    assert fits.best.solution.served.tolist() == plan.served.tolist()
    assert fits.best.cost == cost_of(plan).step_time_s
    assert fits.bound == pytest.approx(fits.best.cost, rel=1e-7, abs=NOTHING_S)


@given(graph=graphs(max_ops=4), mesh=meshes(max_axes=2), share=st.floats(0.0, 1.0))
def test_it_finds_the_best_of_all_plans(graph, mesh, share):
    """The optimum is the least step time over every plan there is, and the bound is no higher; under a limit of memory
    it is the least over the plans whose peak is below it.
    """
    assume(num_plans(graph, mesh) <= MOST_PLANS)
    costs = [cost_of(plan) for plan in all_plans(graph, mesh)]
    peaks = [cost.peak_memory_bytes for cost in costs]
    memory_bytes = (min(peaks) + share * (max(peaks) - min(peaks))) * ROOM
    assume(all(abs(peak - memory_bytes) > 5e-6 * memory_bytes for peak in peaks))
    least_s = min(cost.step_time_s for cost in costs)
    least_that_fits_s = min(cost.step_time_s for cost in costs if cost.peak_memory_bytes <= memory_bytes)

    outcome, limited = shard_by_milp(graph, mesh), shard_by_milp(graph, mesh, memory_bytes=memory_bytes)

    assert outcome.known is Known.OPTIMAL
    assert outcome.best.cost == pytest.approx(least_s, rel=1e-7, abs=NOTHING_S)
    assert outcome.bound <= least_s * (1 + 1e-7) + NOTHING_S
    assert limited.best.cost == pytest.approx(least_that_fits_s, rel=1e-7, abs=NOTHING_S)
    assert cost_of(limited.best.solution).peak_memory_bytes <= memory_bytes * ROOM


@given(graph=graphs(), mesh=meshes())
def test_choices_are_all_that_divides(graph, mesh):
    """Choices are all maps of axes to factors that divide, but that axes of one device serve none."""
    for op in graph.ops:
        expected = [
            row
            for row in choices(op, mesh.sizes)
            if all(size > 1 or factor < 0 for factor, size in zip(row, mesh.sizes, strict=True))
        ]

        assert sorted(choices_of(op, mesh.sizes)) == sorted(expected)


def test_the_best_of_an_mlp_is_megatron_where_batches_are_long():
    """Columns of the first weight and rows of the second, on all devices: two all-reduces of an activation."""
    graph = mlp(batch=1024)

    outcome = shard_by_milp(graph, mesh_of(8))

    cost = cost_of(outcome.best.solution)
    served = dict(zip((op.name for op in graph.ops), outcome.best.solution.served[:, 0].tolist(), strict=True))
    assert outcome.known is Known.OPTIMAL
    assert [graph.ops[each.op].name for each in cost.collectives] == ["0.down", "0.up.data"]
    assert all(graph.ops[number].rule.factors[served[graph.ops[number].name]].name == "ffn" for number in (3, 4, 5))


def test_a_limit_of_memory_makes_the_step_longer():
    """A fifth less memory than the best plan takes is enough for another one, which costs more."""
    graph, mesh = mlp(batch=32768, num_layers=2), mesh_of(8)
    best = shard_by_milp(graph, mesh).best
    memory_bytes = 0.8 * cost_of(best.solution).peak_memory_bytes

    other = shard_by_milp(graph, mesh, memory_bytes=memory_bytes)

    assert other.best.cost > best.cost
    assert cost_of(other.best.solution).peak_memory_bytes <= memory_bytes * ROOM


def test_it_stops_when_the_time_is_spent():
    """Without time nothing is known but that costs are never negative."""
    outcome = shard_by_milp(mlp(), mesh_of(2, 2), limits=Limits(time_s=0.0))

    assert outcome.stop is Stop.TIME
    assert outcome.best is None
    assert outcome.known is Known.UNKNOWN
    assert outcome.bound == 0.0


def test_operators_take_what_they_are_allowed():
    """Where operators may serve no axis, the plan is that of one device."""
    graph, mesh = mlp(), mesh_of(2)
    alone = [(-1,) for _ in graph.ops]

    outcome = shard_by_milp(graph, mesh, allowed=lambda number: alone[number : number + 1])

    assert outcome.best.cost == cost_of(plan_of(graph, mesh, alone)).step_time_s


def readers(pattern, *widths):
    """A source of 16 by 16, what an operator of this pattern makes of it, and who reads that, with results so wide."""
    graph, sizes = GraphBuilder(name="readers"), {"a": 16, "b": 16}
    source = graph.source(INPUT, "x", (16, 16), 1, TensorKind.DATA)
    rule = rule_of(pattern, sizes)
    made = graph.tensor("made", rule.result_shape(0), 1, TensorKind.ACTIVATION)
    graph.op("make", "any", (source,), (made,), rule)
    _, _, result = pattern.partition("-> ")
    for number, width in enumerate(widths):
        read = graph.tensor(f"read.{number}", rule.result_shape(0), width, TensorKind.ACTIVATION)
        graph.op(f"read.{number}", "any", (made,), (read,), rule_of(f"{result} -> {result}", sizes))
    return graph.done()


def test_sums_are_scattered_even_where_adding_them_up_everywhere_is_faster():
    """Where all readers want the same dim cut the sums go there, as in the plan, whatever a tree would take."""
    graph, mesh = readers("a b -> b", 1, 1), mesh_of(16, devices_per_host=1)
    plan = plan_of(graph, mesh, [[0], [0], [0], [0]])
    (scatter,) = cost_of(plan).collectives

    outcome = shard_by_milp(graph, mesh, allowed=closed(plan))

    assert scatter.move.kind is OpKind.REDUCE_SCATTER
    assert scatter.seconds > mesh.seconds(OpKind.ALL_REDUCE, scatter.move.message_bytes, (0,))
    assert outcome.bound == pytest.approx(cost_of(plan).step_time_s)


def test_a_copy_stays_while_others_run():
    """A gathered tensor is in memory at an operator that does not read it, between two that do."""
    graph, mesh = readers("a b -> a b", 1, 100, 1), mesh_of(2)
    plan = plan_of(graph, mesh, [[0], [0], [NONE], [0], [NONE]])
    copy_bytes, peak_bytes = 256, cost_of(plan).peak_memory_bytes

    assert peak_bytes == 128 + 128 + copy_bytes + 100 * 128
    assert shard_by_milp(graph, mesh, allowed=closed(plan), memory_bytes=peak_bytes * ROOM).best is not None
    assert shard_by_milp(graph, mesh, allowed=closed(plan), memory_bytes=peak_bytes / ROOM**2).best is None
