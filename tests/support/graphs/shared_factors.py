"""Plans defined by name patterns, in which several axes may shard one factor."""

from fnmatch import fnmatch

import numpy as np

from costmodels.sharding.plan import NONE, Plan, violations
from tests.support.graphs.named_plans import mesh_of
from tests.support.graphs.small_graphs import mlp


def served_together(graph, mesh, **axes):
    """Return a plan as `named_plans.plan_by_names` does, but let several axes shard the same factor."""
    served = np.full((len(graph.ops), len(mesh.sizes)), NONE)
    for number, op in enumerate(graph.ops):
        free = {op.rule.factors[factor].name: factor for factor in op.rule.cuttable}
        for axis, name in enumerate(mesh.names):
            factors = next((found for pattern, found in axes[name] if fnmatch(op.name, pattern)), ())
            served[number, axis] = next((free[factor] for factor in factors if factor in free), NONE)
    plan = Plan(graph=graph, mesh=mesh, served=served)
    assert violations(plan) == ()
    return plan


def contested_plan():
    """Return a plan with a weight that one reader wants along the first axis first and another along the second."""
    return served_together(
        mlp(batch=64, hidden=64, ffn=256),
        mesh_of(data=2, model=4),
        data=[("0.w1", ("ffn",)), ("0.up", ("ffn",)), ("*", ())],
        model=[("0.w1", ("ffn",)), ("0.up.data", ("ffn",)), ("*", ())],
    )
