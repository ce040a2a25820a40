"""Groups of equal hosts, and pairs of hosts with a slow path between them."""

from __future__ import annotations

from dataclasses import dataclass

from hardware.device import Device
from hardware.link import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class HostGroup:
    """Group of equal hosts.

    Attributes:
        name: Name of the group in reports.
        device: Device in every slot of every host.
        hosts: Number of equal hosts.
        devices_per_host: Devices of each host that the job may use.
        intra_links: Parallel links of one device to the others of its host.
        nic_links: Parallel links of one device to other hosts: its own share of the host's network.
    """

    name: str
    device: Device
    hosts: int
    devices_per_host: int
    intra_links: tuple[Link, ...]
    nic_links: tuple[Link, ...]

    def __post_init__(self) -> None:
        assert self.hosts >= 1, f"a group has hosts, but got {self.hosts}"
        assert self.devices_per_host >= 1, f"a host has devices, but got {self.devices_per_host}"
        assert self.intra_links, "the devices of a host are linked"
        assert self.nic_links, "a device reaches other hosts"

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return self.hosts * self.devices_per_host


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowPair:
    """Pair of hosts between which a path is slower than the NICs of both.

    Attributes:
        first_host: Number of the one host, in rank order.
        second_host: Number of the other host, which is the larger.
        share: Share of the bandwidth of their NICs that is left between the two hosts.
    """

    first_host: int
    second_host: int
    share: float

    def __post_init__(self) -> None:
        assert 0 <= self.first_host < self.second_host, f"a pair ascends: {self.first_host}, {self.second_host}"
        assert 0 < self.share <= 1, f"a share is above 0 and at most 1, but got {self.share}"
