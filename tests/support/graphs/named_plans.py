"""Plans by name: which factor a mesh axis serves, by patterns of the operators' names."""

import numpy as np

from costmodels.sharding import named_plans
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.plan import cost_of, violations
from hardware.cluster import find_cluster


def mesh_of(**axes):
    """A mesh with these axes over as many hosts of eight A100 as it needs."""
    sizes = tuple(axes.values())
    hosts = int(np.prod(sizes)) // 8
    return DeviceMesh(names=tuple(axes), sizes=sizes, cluster=find_cluster("dgx-a100", hosts=hosts))


def served_by_name(graph, mesh, **axes):
    """The plan in which every axis serves the factors that `axes` names for it, which must be one that can run."""
    plan = named_plans.served_by_name(graph, mesh, axes)
    assert violations(plan) == ()
    return plan


def collectives(plan):
    """What a plan communicates, sorted: (kind, tensor, message bytes)."""
    return sorted(
        (str(each.move.kind), plan.graph.tensors[each.tensor].name, each.move.message_bytes)
        for each in cost_of(plan).collectives
    )
