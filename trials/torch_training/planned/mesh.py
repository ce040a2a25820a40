"""Place of a rank in the mesh of a plan, and the process groups along its axes.

Ranks have the order of the mesh, whose last axis is the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch.distributed as dist

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.exports.layout_changes import Axes
from costmodels.sharding.exports.torch_changes import group_of
from trials.torch_training.planned.traffic import members


class PlanMesh:
    """Mesh of a plan, seen from this rank.

    Args:
        mesh: Mesh with as many devices as the process group has ranks.
        groups: Axes along which the plan communicates.
    """

    def __init__(self, mesh: DeviceMesh, groups: Iterable[Axes]) -> None:
        assert mesh.num_devices == dist.get_world_size(), "a plan must occupy all ranks"
        self.sizes = mesh.sizes
        rank = dist.get_rank()
        self.place = tuple(int(index) for index in np.unravel_index(rank, mesh.sizes))
        # Only members take part in forming a group, and all of them form theirs in one order.
        self._groups = {axes: group_of(members(mesh, axes, rank)) for axes in sorted(set(groups))}

    def size(self, axes: Axes) -> int:
        """Return the number of ranks in each group along some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """Return this rank's group along some axes."""
        return self._groups[axes]
