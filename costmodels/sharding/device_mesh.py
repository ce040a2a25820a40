"""Device mesh with named axes, and the cost of a collective along some of its axes.

Ranks are counted with the last axis fastest. They are placed on the cluster in its own order, starting with its first
device. If the cluster has more devices than the mesh, as for one stage of a pipeline, the other devices run the same
collectives at the same time. A group along several axes is one group: it holds all ranks that differ in these axes
only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from costmodels.blocks.operator import OpKind
from hardware.cluster import Cluster
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError

Lines = tuple[tuple[float, float], ...]
"""Cost of a collective as lines (seconds, seconds per byte); the cheapest line counts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceMesh:
    """Grid of devices with named axes.

    Attributes:
        names: Names of the axes, the slowest first.
        sizes: Number of devices along each axis.
        cluster: Cluster that holds the devices; it has as many devices as the mesh, or a multiple.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    cluster: Cluster
    _lines: dict[tuple[OpKind, tuple[int, ...]], Lines] = field(default_factory=dict)
    _shared: dict[Hashable, dict[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.sizes), "every axis needs a size"
        assert len(set(self.names)) == len(self.names), f"axis names must be unique, but got {self.names}"
        assert self.cluster.num_devices % self.num_devices == 0, (
            f"{self.in_words} are {self.num_devices} devices, but {self.cluster.name} has {self.cluster.num_devices}"
        )

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole mesh."""
        return math.prod(self.sizes)

    @property
    def in_words(self) -> str:
        """Axes and their sizes as text, for example `data=2,model=4`."""
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @cached_property
    def has_processors(self) -> bool:
        """Whether some devices are cores of a host's processor."""
        return any(device.is_processor for device in self.cluster.devices)

    @cached_property
    def memory_bandwidth_bytes_per_s(self) -> float:
        """Memory bandwidth of the slowest device [bytes/s]."""
        return min(device.memory_bandwidth_bytes_per_s for device in self.cluster.devices)

    def size_along(self, axes: tuple[int, ...]) -> int:
        """Return the number of devices of a group along some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def seconds(self, kind: OpKind, message_bytes: float, axes: tuple[int, ...], latency_share: float = 1.0) -> float:
        """Return the time of one collective, or of its part of a joint one that pays a share of the latency [s].

        Source of `message_bytes`: hardware/collectives.py defines the message of each kind.
        """
        if message_bytes <= 0 or self.size_along(axes) == 1:
            return 0.0
        return min(latency_share * base_s + s_per_byte * message_bytes for base_s, s_per_byte in self.lines(kind, axes))

    def lines(self, kind: OpKind, axes: tuple[int, ...]) -> Lines:
        """Return the time of one collective as lines in the size of its message."""
        key = (kind, tuple(sorted(axes)))
        if key not in self._lines:
            groups = self._groups(key[1])
            links = self.cluster.links_among([groups], np.arange(self.cluster.num_devices))
            # The links of the cluster give three families of lines. All-gather and reduce-scatter share the family
            # `gather`.
            own = {OpKind.ALL_REDUCE: links.lines.reduce, OpKind.ALL_TO_ALL: links.lines.exchange}
            lines = own.get(kind, links.lines.gather)[:, :, links.row[0]]
            self._lines[key] = tuple((float(base_s), float(s_per_byte)) for base_s, s_per_byte in lines)
        return self._lines[key]

    def shared(self, key: Hashable) -> dict[Any, Any]:
        """Return the cache of a key: a dict for values that follow from this mesh and the key."""
        return self._shared.setdefault(key, {})

    def _groups(self, axes: tuple[int, ...]) -> np.ndarray:
        """Return the ranks of each group along these axes [groups, size]."""
        others = [axis for axis in range(len(self.sizes)) if axis not in axes]
        # Move the group's axes to the end, so that each row holds one group.
        return self._ranks.transpose(*others, *axes).reshape(-1, self.size_along(axes))

    @cached_property
    def _ranks(self) -> np.ndarray:
        return np.arange(self.num_devices).reshape(self.sizes)


def mesh_of(text: str, cluster: Cluster, *, option: str = "--mesh") -> DeviceMesh:
    """Parse a mesh such as `data=2,model=4` and place it on a cluster.

    Raises:
        ConfigError: The text has another form, or the cluster cannot hold the mesh.
    """
    axes = axes_of(text, option=option, most=cluster.num_devices)
    return mesh_on(axes, cluster, option=option)


def axes_of(text: str, *, option: str, most: int | None = None) -> dict[str, int]:
    """Parse the axes of a mesh such as `data=2,model=4` into sizes by name; no size may exceed `most`.

    Raises:
        ConfigError: The text has another form.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, count = (piece.strip() for piece in part.partition("="))
        # `isdigit` also accepts characters such as "²" that `int` refuses.
        is_number = count.isascii() and count.isdigit() and len(count) <= 9
        is_size = is_number and int(count) >= 1 and (most is None or int(count) <= most)
        if not (name.isidentifier() and equals and is_size):
            rule = f"must be axes with sizes {'of at least 1' if most is None else f'from 1 to {most}'}"
            raise ConfigError(rule, key=option, value=text, nearest="for example data=2,model=4")
        if name in found:
            raise ConfigError("names an axis twice", key=option, value=text, nearest="for example data=2,model=4")
        found[name] = int(count)
    return found


def mesh_on(axes: Mapping[str, int], cluster: Cluster, *, option: str) -> DeviceMesh:
    """Return a mesh of these axes, the slowest first, on a cluster.

    Raises:
        ConfigError: The cluster cannot hold the mesh.
    """
    num_devices = math.prod(axes.values())
    if cluster.num_devices % num_devices:
        # Suggest the valid size nearest to the given one.
        divisors = [one for one in range(1, cluster.num_devices + 1) if cluster.num_devices % one == 0]
        nearest = min(divisors, key=lambda one: abs(one - num_devices))
        raise ConfigError(
            f"is {num_devices} devices, which do not divide the {cluster.num_devices} of {cluster.name}",
            key=option,
            value=",".join(f"{name}={size}" for name, size in axes.items()),
            nearest=f"axes whose product is {nearest}, or another number of hosts",
        )
    return DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=cluster)


def mesh_from(mesh: DeviceMesh | Mapping[str, int] | str, cluster: Cluster | str) -> DeviceMesh:
    """Return the mesh for any form in which a caller may give it.

    Args:
        mesh: A finished mesh, or its axes with the slowest first, as a mapping or as text such as `data=2,model=4`.
        cluster: Cluster to place axes on: an object, or a catalog name for as few of its hosts as the mesh can fill.

    Raises:
        ConfigError: The mesh has another form, the cluster is unknown, or the cluster cannot hold the mesh.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    axes = axes_of(mesh, option="mesh") if isinstance(mesh, str) else dict(mesh)
    for name, size in axes.items():
        if not isinstance(name, str) or not isinstance(size, int) or size < 1:
            rule, nearest = "must have named axes of at least one device", "for example {'data': 2, 'model': 4}"
            raise ConfigError(rule, key="mesh", value={name: size}, nearest=nearest)
    if isinstance(cluster, str):
        # The smallest number of hosts whose devices are a multiple of the mesh's.
        num_devices, host = math.prod(axes.values()), find_cluster(cluster)
        cluster = find_cluster(cluster, num_devices // math.gcd(num_devices, host.num_devices))
    return mesh_on(axes, cluster, option="mesh")
