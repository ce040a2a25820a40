"""A mesh of devices by named axes, and what a collective along some of them takes.

Ranks are counted with the last axis fastest, and stand on the cluster in its order, from its first device on. Where the
cluster has more devices, as for a stage of a pipeline, others do the same there at the same time. A group along several
axes is one group: its ranks are all that differ in these axes alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from costmodels.operators.layer_operators import OpKind
from hardware.cluster import Cluster, find_cluster
from hardware.io.errors import ConfigError

Lines = tuple[tuple[float, float], ...]
"""What a collective takes: the least of so many seconds, plus so many for each byte."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceMesh:
    """A grid of devices.

    Attributes:
        names: Its axes, the slowest first.
        sizes: Devices along each.
        cluster: Where they stand; it has as many devices or a multiple.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    cluster: Cluster
    _lines: dict[tuple[OpKind, tuple[int, ...]], Lines] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.sizes), "every axis has a size"
        assert len(set(self.names)) == len(self.names), f"axes have names of their own, but got {self.names}"
        assert self.cluster.num_devices % self.num_devices == 0, (
            f"{self.in_words} are {self.num_devices} devices, but {self.cluster.name} has {self.cluster.num_devices}"
        )

    @property
    def num_devices(self) -> int:
        """All of them."""
        return math.prod(self.sizes)

    @property
    def in_words(self) -> str:
        """Its axes and their sizes, as `data=2,model=4`."""
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def size_along(self, axes: tuple[int, ...]) -> int:
        """Devices of a group along some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def seconds(self, kind: OpKind, message_bytes: float, axes: tuple[int, ...]) -> float:
        """What a collective takes, of a message as hardware/collectives.py defines that for its kind [s]."""
        if message_bytes <= 0 or self.size_along(axes) == 1:
            return 0.0
        return min(base_s + s_per_byte * message_bytes for base_s, s_per_byte in self.lines(kind, axes))

    def lines(self, kind: OpKind, axes: tuple[int, ...]) -> Lines:
        """The same as straight lines in the message."""
        key = (kind, tuple(sorted(axes)))
        if key not in self._lines:
            groups = self._groups(key[1])
            links = self.cluster.links_among([groups], np.arange(self.cluster.num_devices))
            own = {OpKind.ALL_REDUCE: links.lines.reduce, OpKind.ALL_TO_ALL: links.lines.exchange}
            lines = own.get(kind, links.lines.gather)[:, :, links.row[0]]
            self._lines[key] = tuple((float(base_s), float(s_per_byte)) for base_s, s_per_byte in lines)
        return self._lines[key]

    def _groups(self, axes: tuple[int, ...]) -> np.ndarray:
        """The ranks of each group along these axes [groups, size]."""
        others = [axis for axis in range(len(self.sizes)) if axis not in axes]
        return self._ranks.transpose(*others, *axes).reshape(-1, self.size_along(axes))

    @cached_property
    def _ranks(self) -> np.ndarray:
        return np.arange(self.num_devices).reshape(self.sizes)


def mesh_of(text: str, cluster: Cluster, *, option: str = "--mesh") -> DeviceMesh:
    """The mesh that `data=2,model=4` names, on a cluster.

    Raises:
        ConfigError: it reads otherwise, or the cluster can't form it.
    """
    axes = axes_of(text, option=option, most=cluster.num_devices)
    return mesh_on(axes, cluster, option=option)


def axes_of(text: str, *, option: str, most: int | None = None) -> dict[str, int]:
    """The axes that `data=2,model=4` names, and their sizes, of which none may be above `most`.

    Raises:
        ConfigError: it reads otherwise.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, count = (piece.strip() for piece in part.partition("="))
        is_number = count.isascii() and count.isdigit() and len(count) <= 9
        is_size = is_number and int(count) >= 1 and (most is None or int(count) <= most)
        if not (name.isidentifier() and equals and is_size):
            raise ConfigError(
                f"must be axes with sizes {'of at least 1' if most is None else f'from 1 to {most}'}",
                key=option,
                value=text,
                nearest="for example data=2,model=4",
            )
        if name in found:
            raise ConfigError("names an axis twice", key=option, value=text, nearest="for example data=2,model=4")
        found[name] = int(count)
    return found


def mesh_on(axes: Mapping[str, int], cluster: Cluster, *, option: str) -> DeviceMesh:
    """A mesh of these axes, the slowest first, on a cluster.

    Raises:
        ConfigError: the cluster can't form it.
    """
    num_devices = math.prod(axes.values())
    if cluster.num_devices % num_devices:
        divisors = [one for one in range(1, cluster.num_devices + 1) if cluster.num_devices % one == 0]
        nearest = min(divisors, key=lambda one: abs(one - num_devices))
        raise ConfigError(
            f"is {num_devices} devices, which do not divide the {cluster.num_devices} of {cluster.name}",
            key=option,
            value=",".join(f"{name}={size}" for name, size in axes.items()),
            nearest=f"axes whose product is {nearest}, or another number of hosts",
        )
    return DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=cluster)


def mesh_from(
    mesh: DeviceMesh | Mapping[str, int] | str, cluster: Cluster | str, *, option: str = "mesh"
) -> DeviceMesh:
    """A mesh as a caller gives it.

    Args:
        mesh: A mesh, which stands as it is; or its axes, the slowest first, also as `data=2,model=4`.
        cluster: Where axes stand: a cluster, or a name of the catalog for as few of its hosts as the mesh can fill.
        option: What messages call it.

    Raises:
        ConfigError: the mesh reads otherwise, the cluster is unknown or can't form it.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    axes = axes_of(mesh, option=option) if isinstance(mesh, str) else dict(mesh)
    for name, size in axes.items():
        if not isinstance(name, str) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                "must have named axes of at least one device",
                key=option,
                value={name: size},
                nearest="for example {'data': 2, 'model': 4}",
            )
    if isinstance(cluster, str):
        num_devices, host = math.prod(axes.values()), find_cluster(cluster)
        cluster = find_cluster(cluster, num_devices // math.gcd(num_devices, host.num_devices))
    return mesh_on(axes, cluster, option=option)
