"""Position of a rank in a configuration's mesh, and its process groups.

Ranks have the cost model's order (costmodels/step/placement.py): tp fastest, then up and cp, then dp, then pp. Experts
are distributed over all ranks of a stage, neighbours first, as in Megatron-Core ("tp-ep-dp" with a tensor parallel
degree of the experts' own). Only groups of more than one rank are formed, and only once for the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.step import placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A dimension of the mesh: distance of neighbours in its groups, and number of ranks in a group."""

    stride: int
    size: int

    def index(self, rank: int) -> int:
        """Return the index of a rank in its group."""
        return rank // self.stride % self.size

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's group, in order."""
        first = rank - self.index(rank) * self.stride
        return tuple(first + place * self.stride for place in range(self.size))


def extents(config: ParallelConfig) -> dict[str, Extent]:
    """Return every dimension of a configuration's mesh.

    ZeRO shards weights over `shards` and keeps `copies` of each shard; those of experts have the corresponding names.
    """
    placed = placement.extents(ConfigGrid.from_configs([config]))
    found = {name: Extent(stride=int(stride[0]), size=int(size[0])) for name, (stride, size) in placed.items()}
    found["dp"] = Extent(stride=config.tp * config.up * config.cp, size=config.dp)
    names = {"weights": "shards", "weight_copies": "copies", "expert_weights": "expert_shards"}
    found |= {new: found.pop(old) for old, new in names.items()}
    if config.zero_stage == 0:
        # without ZeRO every rank keeps a whole copy of its weights
        for part in ("", "expert_"):
            shards, copies = found[f"{part}shards"], found[f"{part}copies"]
            found[f"{part}shards"] = Extent(stride=shards.stride, size=1)
            found[f"{part}copies"] = Extent(stride=shards.stride, size=shards.size * copies.size)
    return found


class RankMesh:
    """Mesh of a configuration, seen from this rank.

    Args:
        config: Configuration that occupies all ranks of the process group.
        device: Device on which this rank computes.
    """

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        assert config.num_devices == dist.get_world_size(), "a configuration must occupy all ranks"
        self.config = config
        self.device = device
        self.rank = dist.get_rank()
        self.extents = extents(config)
        self._formed: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def size(self, dimension: str) -> int:
        """Return the number of ranks in each group of a dimension."""
        return self.extents[dimension].size

    def index(self, dimension: str) -> int:
        """Return the index of this rank in its group of a dimension."""
        return self.extents[dimension].index(self.rank)

    def group(self, dimension: str) -> dist.ProcessGroup | None:
        """Return this rank's group of a dimension; None if the rank is alone in it.

        All ranks must ask for the same dimensions in the same order.
        """
        members = self.extents[dimension].members(self.rank)
        return self._group(members) if len(members) > 1 else None

    def ends(self) -> dist.ProcessGroup | None:
        """Return the ranks of the first and last stage that hold one part of a tied table; None for other ranks."""
        pipeline = self.extents["pp"]
        members = pipeline.members(self.rank)
        if pipeline.size == 1 or self.rank not in (members[0], members[-1]):
            return None
        return self._group((members[0], members[-1]))

    def device_mesh(self, *dimensions: str) -> DeviceMesh:
        """Return the ranks of some nested dimensions, the slowest first, as a torch DeviceMesh."""
        # Build the grid from the fastest dimension outwards; each step adds the offsets of the next dimension's
        # members.
        ranks = np.array([self.rank])
        for dimension in reversed(dimensions):
            inner = ranks
            offsets = np.array(self.extents[dimension].members(self.rank)) - self.rank
            ranks = offsets.reshape(-1, *(1,) * inner.ndim) + inner
        ranks = ranks.reshape([self.size(dimension) for dimension in dimensions])
        groups = [self._group(self.extents[dimension].members(self.rank)) for dimension in dimensions]
        return DeviceMesh.from_group(
            groups[0] if len(groups) == 1 else groups,
            self.device.type,
            mesh=None if len(groups) == 1 else torch.from_numpy(ranks),
            mesh_dim_names=dimensions,
        )

    def _group(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of these ranks, formed once and by its members only."""
        if members not in self._formed:
            world = dist.group.WORLD
            assert world is not None, "the process group must exist before the mesh"
            # Only members take part in forming the group, so no rank has to wait for unrelated ones.
            is_world = len(members) == world.size()
            self._formed[members] = world if is_world else dist.new_group(list(members), use_local_synchronization=True)
        return self._formed[members]
