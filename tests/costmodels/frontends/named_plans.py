"""Plans by name: which factor a mesh axis serves, by patterns of the operators' names."""

from fnmatch import fnmatch

import numpy as np

from costmodels.device_mesh import DeviceMesh
from costmodels.plan import NONE, Plan, cost_of, violations
from hardware.cluster import find_cluster


def mesh_of(**axes):
    """A mesh with these axes over as many hosts of eight A100 as it needs."""
    sizes = tuple(axes.values())
    hosts = int(np.prod(sizes)) // 8
    return DeviceMesh(names=tuple(axes), sizes=sizes, cluster=find_cluster("dgx-a100", hosts=hosts))


def served_by_name(graph, mesh, **axes):
    """The plan in which every axis serves the factors that `axes` names for it.

    Each axis has a list of (pattern of operators' names, names of factors). The first pattern that fits is taken, and
    of it the first factor that the operator has, can cut, and that an axis before it doesn't serve yet.
    """
    served = np.full((len(graph.ops), len(mesh.sizes)), NONE)
    for number, op in enumerate(graph.ops):
        free = {op.rule.factors[factor].name: factor for factor in op.rule.cuttable}
        for axis, name in enumerate(mesh.names):
            factors = next((found for pattern, found in axes[name] if fnmatch(op.name, pattern)), ())
            served[number, axis] = next((free.pop(factor) for factor in factors if factor in free), NONE)
    plan = Plan(graph=graph, mesh=mesh, served=served)
    assert violations(plan) == ()
    return plan


def collectives(plan):
    """What a plan communicates, sorted: (kind, tensor, message bytes)."""
    return sorted(
        (str(each.move.kind), plan.graph.tensors[each.tensor].name, each.move.message_bytes)
        for each in cost_of(plan).collectives
    )
