"""Plans defined by name patterns, in which several axes may shard one factor."""

from fnmatch import fnmatch

import numpy as np

from costmodels.sharding.plan import NONE, Plan, violations


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
