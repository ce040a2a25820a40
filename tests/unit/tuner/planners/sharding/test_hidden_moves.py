"""Plans for devices that overlap: never worse than those they begin with, and near the best of all."""

from hypothesis import assume, given, settings

from costmodels.sharding.overlap import timeline_of
from costmodels.sharding.plan import cost_of, violations
from tests.support.graphs.random_graphs import all_plans, graphs, meshes, num_plans, plans
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.hidden_moves import hide_moves
from tuner.planners.sharding.sharding_terms import ShardingTerms


def step_s(plan):
    """Time of a step with overlap [s]."""
    return timeline_of(plan, cost_of(plan)).step_time_s


@given(plans())
@settings(max_examples=40)
def test_a_plan_never_gets_worse(plan):
    """The plan that comes out is valid and at least as fast with overlap as the one that went in."""
    found, cost = hide_moves([plan], ShardingTerms(plan.graph, plan.mesh))

    assert not violations(found)
    assert cost.step_time_s == cost_of(found).step_time_s
    assert step_s(found) <= step_s(plan)


def test_most_plans_are_the_best_of_all():
    """On small graphs, nine plans of ten are as fast with overlap as the best of all that there are."""
    seen = []

    @given(graphs(max_ops=3), meshes(max_axes=2))
    @settings(max_examples=60, derandomize=True)
    def compare(graph, mesh):
        assume(1 < num_plans(graph, mesh) <= 400)
        tried = list(all_plans(graph, mesh))
        terms = ShardingTerms(graph, mesh)
        found, _ = hide_moves([descend(tried[0], terms).plan], terms)
        best_s = min(map(step_s, tried))
        seen.append(step_s(found) <= best_s * 1.001 + 1e-15)

    compare()
    assert len(seen) >= 20
    assert sum(seen) >= 0.9 * len(seen)
