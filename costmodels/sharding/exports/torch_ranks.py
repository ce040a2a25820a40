"""A rank of a planned torch step: its parts of tensors, cut from whole ones or moved from other layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from costmodels.sharding.exports.layout_changes import Axes, contiguous
from costmodels.sharding.exports.torch_changes import change_of, cut_part, group_of, move_part
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout


def placements_of(layout: Layout, reduced_by: str = "sum") -> tuple[Placement, ...]:
    """Return a layout as DTensor's placements, one per axis."""
    known = {REPLICATED: Replicate(), PARTIAL: Partial(reduced_by)}
    return tuple(known[dim] if dim < 0 else Shard(dim) for dim in layout)


def layout_of(placements: Sequence[Placement]) -> Layout:
    """Return placements without partial sums as a layout."""
    return tuple(each.dim if isinstance(each, Shard) else REPLICATED for each in placements)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """This rank.

    Attributes:
        mesh: Mesh with the plan's axes.
        sizes: Number of ranks along each axis.
        place: Coordinates of the rank.
        device: Device of the rank.
        groups: Groups along several axes that were asked for.
    """

    mesh: torch_meshes.DeviceMesh
    sizes: tuple[int, ...]
    place: tuple[int, ...]
    device: torch.device
    groups: dict[Axes, distributed.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def on(cls, mesh: torch_meshes.DeviceMesh) -> Rank:
        """Return this rank of a mesh, on its current device."""
        place = mesh.get_coordinate()
        assert place is not None, "every rank is in the mesh"
        device = torch.device(mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.get_device_module(device.type).current_device())
        return cls(mesh=mesh, sizes=tuple(mesh.shape), place=tuple(place), device=device)

    @property
    def everywhere(self) -> Layout:
        """Layout of what every rank has whole."""
        return (REPLICATED,) * len(self.sizes)

    def part(self, given: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a DTensor, or of a tensor that every rank has."""
        if not isinstance(given, DTensor):
            return self.cut(given.to(self.device), layout)
        lies = layout_of(given.placements)
        if placements_of(lies) != tuple(given.placements) or not _divides(given.shape, lies, self.sizes):
            # placements that no plan has
            return _waited(given.redistribute(placements=placements_of(layout)).to_local())
        return self.move(_waited(given.to_local()), given.shape, lies, layout)

    def move(
        self, part: Tensor, shape: Sequence[int], before: Layout, after: Layout, *, reduced_by: str = "sum"
    ) -> Tensor:
        """Return this rank's part in another layout."""
        old, new = (contiguous(layout, self.sizes) for layout in (before, after))
        change = change_of(old, new, shape, self, reduction=reduced_by)
        return part if change is None else move_part(part, change, self)

    def cut(self, whole: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a tensor that every rank has."""
        return cut_part(whole, contiguous(layout, self.sizes), self)

    def group(self, axes: Axes) -> distributed.ProcessGroup:
        """Return this rank's group along some axes; all of its ranks ask for it, in one order of groups."""
        if len(axes) == 1:
            return self.mesh.get_group(axes[0])
        if axes not in self.groups:
            picked = tuple(slice(None) if axis in axes else self.place[axis] for axis in range(len(self.sizes)))
            self.groups[axes] = group_of(self.mesh.mesh[picked].flatten().tolist())
        return self.groups[axes]

    def share_generator(self) -> None:
        """Give all ranks the state of the first rank's random generator."""
        state = torch.get_rng_state() if self.device.type == "cpu" else _device_state(self.device)
        given = state.to(self.device)
        for group in self.mesh.get_all_groups():
            distributed.broadcast(given, group_src=0, group=group)
        if self.device.type == "cpu":
            torch.set_rng_state(given)
        else:
            torch.get_device_module(self.device.type).set_rng_state(given.cpu(), self.device)


def _divides(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Return whether all parts have one shape."""
    return all(
        size % math.prod(ways for ways, cut in zip(sizes, layout, strict=True) if cut == dim) == 0
        for dim, size in enumerate(shape)
    )


def _device_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device.type).get_rng_state(device)
    return state


def _waited(part: Tensor) -> Tensor:
    """Return a part after the collective that makes it."""
    wait = getattr(part, "wait", None)
    return wait() if wait is not None else part
