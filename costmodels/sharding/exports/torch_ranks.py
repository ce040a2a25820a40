"""A rank of a planned torch step: its parts of tensors, cut from whole ones or moved from other layouts by DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from costmodels.sharding.exports.torch_calls import local_shape, part_of
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
    """

    mesh: torch_meshes.DeviceMesh
    sizes: tuple[int, ...]
    place: tuple[int, ...]
    device: torch.device

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
        return _waited(given.redistribute(placements=placements_of(layout)).to_local())

    def move(
        self, part: Tensor, shape: Sequence[int], before: Layout, after: Layout, *, reduced_by: str = "sum"
    ) -> Tensor:
        """Return this rank's part in another layout, by DTensor's collectives."""
        if before == after:
            return part
        is_bool = part.dtype == torch.bool  # processes exchange no booleans
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        given = DTensor.from_local(
            (part.to(torch.uint8) if is_bool else part).contiguous(),
            self.mesh,
            placements_of(before, reduced_by),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        found = _waited(given.redistribute(placements=placements_of(after)).to_local())
        return found.to(torch.bool) if is_bool else found

    def cut(self, whole: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a tensor that every rank has."""
        shape = local_shape(tuple(whole.shape), layout, self.sizes)
        for dim, size in enumerate(shape):
            if size != whole.shape[dim]:
                whole = whole.narrow(dim, part_of(layout, dim, self.sizes, self.place) * size, size)
        return whole

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


def _device_state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device.type).get_rng_state(device)
    return state


def _waited(part: Tensor) -> Tensor:
    """Return a part after the collective that makes it."""
    wait = getattr(part, "wait", None)
    return wait() if wait is not None else part
