"""Inputs and constants lie in the layout in which all their readers want them."""

import numpy as np

from costmodels.sharding.device_mesh import mesh_from
from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import CONSTANT, INPUT, GraphBuilder, TensorKind
from costmodels.sharding.laid_sources import lay_sources
from costmodels.sharding.plan import NONE, Plan, cost_of

SIZES = {"row": 8, "column": 4}


def plan_with(*factors):
    """Plan on four devices: two operators read an input and a constant, and the axis serves these factors of them."""
    build = GraphBuilder(name="two readers")
    read = [
        build.source(primitive, primitive, (8, 4), 4.0, kind)
        for primitive, kind in ((INPUT, TensorKind.DATA), (CONSTANT, TensorKind.CONSTANT))
    ]
    for number in range(2):
        made = build.tensor(f"sum{number}", (8, 4), 4.0, TensorKind.ACTIVATION)
        build.op(f"add{number}", "add", read, [made], rule_of("row column, row column -> row column", SIZES))
    rows = [[NONE], [NONE], *([factor] for factor in factors)]
    return Plan(graph=build.done(), mesh=mesh_from("a=4", "dgx-a100"), served=np.array(rows))


def test_sources_are_cut_as_all_readers_want():
    """An input and a constant that both readers cut by rows are cut by rows; memory falls, and time is the same."""
    before = plan_with(0, 0)
    after = lay_sources(before)

    assert after.served[:2].tolist() == [[0], [0]]
    assert cost_of(after).step_time_s == cost_of(before).step_time_s
    assert cost_of(after).peak_memory_bytes < cost_of(before).peak_memory_bytes


def test_sources_stay_whole_where_readers_differ():
    """Readers that cut different dims, or of which one needs all, leave the sources whole."""
    assert lay_sources(plan_with(0, 1)).served[:2].tolist() == [[NONE], [NONE]]
    assert lay_sources(plan_with(0, NONE)).served[:2].tolist() == [[NONE], [NONE]]


def test_kept_sources_stay():
    """A source that is kept, as a pinned one, is not changed."""
    plan = plan_with(0, 0)
    number = next(number for number, op in enumerate(plan.graph.ops) if op.primitive == INPUT)

    assert lay_sources(plan, kept=[number]).served[:2].tolist() == [[NONE], [0]]
