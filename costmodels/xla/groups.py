"""Parse the device groups of XLA's collectives in each of XLA's notations, and map them to axes of the mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""Numbers of the devices, group by group."""

Axes = tuple[str, ...]
"""Names of axes of a mesh, in the mesh's order."""

ODD_GROUPS: Axes = ("?",)
"""Placeholder for the axes of groups that correspond to no axes of the mesh."""

LISTED = re.compile(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}")
IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
BY_AXES = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)


def groups_of(line: str) -> Groups:
    """Parse the groups of a collective: a list, an iota, or axes of a mesh or parts of these.

    Raises:
        ValueError: The groups are written in another way.
    """
    listed = LISTED.search(line)
    if listed:
        return _braces(listed[1])
    iota = IOTA.search(line)
    if iota:
        return _rows(_devices(iota[3], iota[4]), int(iota[2]))
    by_axes = BY_AXES.search(line)
    if by_axes:
        return _of_axes(by_axes[1], by_axes[2], by_axes[3], by_axes[4], line)
    raise _unreadable(line)


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> Axes:
    """Return the axes along which the devices of a group differ, or ODD_GROUPS if no axes make these groups."""
    shape = tuple(mesh.values())
    differ = {
        axis
        for group in groups
        for axis, places in enumerate(np.unravel_index(np.array(group), shape))
        if len(set(places.tolist())) > 1
    }
    # Groups along whole axes contain every combination of places on these axes.
    count = math.prod(shape[axis] for axis in differ)
    if any(len(group) != count for group in groups):
        return ODD_GROUPS
    return tuple(name for axis, name in enumerate(mesh) if axis in differ)


def _of_axes(axes: str, dims: str | None, order: str | None, chosen: str, line: str) -> Groups:
    """Build groups along axes of a mesh that the line declares, or along parts of them.

    The part `'a':(2)4` of axis a has size 4 and 2 parts before it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = [(name, before, size) for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)]
    if not parts or any(name not in sizes for name, _, _ in parts):
        raise _unreadable(line)
    devices = _devices(dims or str(math.prod(sizes.values())), order)
    shape: list[int] = []
    taken: list[int] = []
    for name, whole in sizes.items():
        cuts = sorted((int(before or 1), int(size or whole)) for other, before, size in parts if other == name)
        at = 1
        for before, size in cuts:
            if before % at or whole % (before * size):
                raise _unreadable(line)
            shape += [before // at, size]
            taken.append(len(shape) - 1)
            at = before * size
        shape.append(whole // at)
    # Every axis is now split into the cut parts and the rest; the cut parts go last so that each row is one group.
    others = [axis for axis in range(len(shape)) if axis not in taken]
    ordered: Any = devices.reshape(shape).transpose(others + taken)
    group = math.prod(shape[axis] for axis in taken)
    return _rows(ordered, group)


def _devices(dims: str, order: str | None) -> Any:
    shape = _numbers(dims)
    # XLA's iota: numbers in row-major order, optionally transposed before they are cut into groups.
    found = np.arange(math.prod(shape)).reshape(shape)
    return (found if order is None else found.transpose(_numbers(order))).reshape(-1)


def _rows(devices: Any, size: int) -> Groups:
    return tuple(map(tuple, devices.reshape(-1, size).tolist()))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _braces(text: str) -> Groups:
    return tuple(tuple(_numbers(part)) for part in re.findall(r"\{([\d,]+)\}", text))


def _unreadable(line: str) -> ValueError:
    return ValueError(f"can't read the groups of {line.strip()[:200]}")
