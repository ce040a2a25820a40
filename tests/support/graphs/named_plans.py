"""Plans defined by name patterns of operators, which give the factor that a mesh axis shards."""

import numpy as np

from costmodels.sharding import named_plans
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.plan import cost_of, violations
from hardware.cluster_file import find_cluster


def mesh_of(**axes):
    """Build a mesh with these axes, over as many hosts of eight A100 as it needs."""
    sizes = tuple(axes.values())
    hosts = int(np.prod(sizes)) // 8
    return DeviceMesh(names=tuple(axes), sizes=sizes, cluster=find_cluster("dgx-a100", hosts=hosts))


def plan_by_names(graph, mesh, **axes):
    """Return the plan in which every axis shards the factors that `axes` names for it; assert that it can run."""
    plan = named_plans.plan_by_names(graph, mesh, axes)
    assert violations(plan) == ()
    return plan


def collectives(plan):
    """Return the collectives of a plan, sorted, as (kind, tensor, message bytes)."""
    return sorted(
        (str(each.move.kind), plan.graph.tensors[each.tensor].name, each.move.message_bytes)
        for each in cost_of(plan).collectives
    )
