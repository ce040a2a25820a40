"""The default planner is never worse than a plan by hand."""

from dataclasses import replace

import pytest

from benchmarks import zoo
from costmodels.sharding.device_mesh import mesh_from
from costmodels.sharding.frontends.jax.graph import graph_of
from costmodels.sharding.frontends.jax.program import trace_function
from costmodels.sharding.plan import cost_of
from tuner.planners.planning import MOST_SEEDS, WHOLE_AXES, plan_graph
from tuner.planners.toast.by_hand import plans_by_hand


@pytest.mark.parametrize("name", ["gemma_small", "moe_small", "graph_network_small", "decode_small"])
@pytest.mark.parametrize("axes", ["data=8", "data=2,model=4"])
def test_default_planner_is_never_worse_than_a_plan_by_hand(name, axes):
    """Whatever D-Rec finds, the result costs at most what the cheapest data parallel, FSDP or Megatron plan does."""
    function, arguments, donated = getattr(zoo, name)()
    graph = graph_of(trace_function(function, *arguments, donated=donated))
    mesh = mesh_from(axes, "dgx-a100")
    by_hand = plans_by_hand(graph, mesh, memory_bytes=2**36, most=MOST_SEEDS)

    found = plan_graph(graph, mesh, WHOLE_AXES)

    assert len(by_hand) == MOST_SEEDS
    assert found.cost.step_time_s <= min(cost_of(plan).step_time_s for plan in by_hand) * (1 + 1e-12)


def test_effort_is_counted_work():
    """TOAST after the descent never makes a plan worse, and the same effort finds the same plan again."""
    function, arguments, donated = zoo.decode_small()
    graph = graph_of(trace_function(function, *arguments, donated=donated))
    mesh = mesh_from("data=2,model=4", "dgx-a100")

    without = plan_graph(graph, mesh, replace(WHOLE_AXES, effort=0))
    found, again = (plan_graph(graph, mesh, replace(WHOLE_AXES, effort=50)) for _ in range(2))

    assert found.cost.step_time_s <= without.cost.step_time_s
    assert (found.plan.served == again.plan.served).all()
    assert found.steps
    assert not without.steps
