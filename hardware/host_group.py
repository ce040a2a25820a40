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
        intra_links: Parallel links of one device to the others of its domain.
        nic_links: Parallel links of one device to other domains: its own share of the host's network.
        hosts_per_domain: Most neighbouring hosts that `intra_links` join, such as the 18 hosts of an NVL72 rack; 1
            where they end at the host.
    """

    name: str
    device: Device
    hosts: int
    devices_per_host: int
    intra_links: tuple[Link, ...]
    nic_links: tuple[Link, ...]
    hosts_per_domain: int = 1

    def __post_init__(self) -> None:
        assert self.hosts >= 1, f"a group has hosts, but got {self.hosts}"
        assert self.devices_per_host >= 1, f"a host has devices, but got {self.devices_per_host}"
        assert self.intra_links, "the devices of a host are linked"
        assert self.nic_links, "a device reaches other hosts"
        assert self.hosts_per_domain >= 1, f"a domain has hosts, but got {self.hosts_per_domain}"

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Number of hosts of each domain: as few domains as hold all hosts, or up to twice as many of equal size.

        64 hosts are four domains of 16 rather than 18, 18, 18 and 10, so that groups of ranks end where domains do.
        NVIDIA's launchers do the same (NVIDIA-NeMo/Megatron-Bridge scripts/performance/utils/executors.py, `segment`).
        """
        fewest = -(-self.hosts // self.hosts_per_domain)
        equal = (count for count in range(fewest, 2 * fewest + 1) if self.hosts % count == 0)
        count = next(equal, fewest)
        each, more = divmod(self.hosts, count)
        return (each + 1,) * more + (each,) * (count - more)


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
