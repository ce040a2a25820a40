"""Timelines of steps: what hides behind compute, what cannot, and the bounds of every plan's step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from costmodels.sharding.dims import rule_of
from costmodels.sharding.fusion import unfused
from costmodels.sharding.graph import INPUT, GraphBuilder, TensorKind
from costmodels.sharding.overlap import timeline_of
from costmodels.sharding.plan import NONE, cost_of
from tests.support.graphs.random_graphs import mesh_of, plan_of, plans

SIZES = {"rows": 4096, "columns": 4096}


def gathered(*, reads_gathered):
    """Plan of two operators on a cut input: the first needs it whole; the second reads that or the input."""
    graph = GraphBuilder(name="gathered")
    x = graph.source(INPUT, "x", (4096, 4096), 2, TensorKind.DATA)

    def op(name, operand):
        result = graph.tensor(name, (4096, 4096), 2, TensorKind.ACTIVATION)
        rule = rule_of("rows columns -> rows columns", SIZES)
        graph.op(name, name, [operand], [result], rule, flop=4e12, precision="bf16")
        return result

    first = op("cut", x)
    op("whole", first if reads_gathered else x)
    return plan_of(graph.done(), mesh_of(8), [[0], [0], [NONE]])


def test_a_collective_hides_behind_an_operator_that_does_not_need_it():
    """While the input is gathered for one operator, another runs, and the step takes no longer than its compute."""
    plan = gathered(reads_gathered=False)
    cost = cost_of(plan)

    timeline = timeline_of(plan, cost)

    assert cost.comm_s > 0
    assert timeline.step_time_s == pytest.approx(cost.compute_s.sum())
    assert timeline.exposed_s.sum() == pytest.approx(0.0)


def test_a_collective_is_exposed_where_nothing_else_can_run():
    """What is gathered between two operators that depend on each other adds to the step in full."""
    plan = gathered(reads_gathered=True)
    cost = cost_of(plan)

    timeline = timeline_of(plan, cost)

    assert timeline.step_time_s == pytest.approx(cost.step_time_s)
    assert timeline.exposed_s.sum() == pytest.approx(cost.comm_s)


@given(plans())
def test_a_step_lies_between_its_streams_and_their_sum(plan):
    """A step takes at least its compute and at most that and all moves; what exceeds the compute is exposed."""
    cost = cost_of(plan)
    compute_s = float(cost.compute_s.sum())

    timeline = timeline_of(plan, cost)

    moved_s = float(timeline.moved_s.sum())
    assert compute_s <= timeline.step_time_s * (1 + 1e-9)
    assert timeline.step_time_s <= (compute_s + moved_s) * (1 + 1e-9)
    assert timeline.exposed_s.sum() == pytest.approx(timeline.step_time_s - compute_s, abs=1e-12)
    assert np.all(timeline.exposed_s <= timeline.moved_s * (1 + 1e-9) + 1e-15)


@given(plans())
def test_without_a_compiler_each_collective_takes_its_own_time(plan):
    """Where nothing is joined, cost and timeline count every collective in full, and the step takes at least both."""
    graph = unfused(plan.graph)
    plan = replace(plan, graph=graph)
    cost = cost_of(plan)
    alone_s = sum(each.times * each.move.seconds(plan.mesh) for each in cost.collectives)

    timeline = timeline_of(plan, cost)

    assert [timeline.moved_s.sum(), cost.comm_s] == pytest.approx([alone_s, alone_s])
    assert alone_s <= timeline.step_time_s * (1 + 1e-9)
