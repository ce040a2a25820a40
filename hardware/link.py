"""A link between devices, and what several parallel links between one pair can carry together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One way by which a device reaches its peers.

    Several links between one pair are a tuple of Links. Those with the same `exclusive_group` can't carry one
    transfer together (NVLink or PCIe, never both); all others can.

    Attributes:
        kind: What it is, for example "nvlink4" or "infiniband".
        bandwidth_bytes_per_s: What one device can send, and at the same time receive [bytes/s].
        latency_s: Time of one hop that carries no data [s].
        exclusive_group: Name of the set of links of which one transfer can use only one; None joins all others.
        mesh_peers: On a full mesh, the number of peers that the bandwidth is divided over by wire, so that a group
            of m devices uses (m - 1) / mesh_peers of it. None means a switch: any group gets all of it.
    """

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    exclusive_group: str | None = None
    mesh_peers: int | None = None

    def __post_init__(self) -> None:
        assert self.bandwidth_bytes_per_s > 0, f"a link carries data, but got {self.bandwidth_bytes_per_s} bytes/s"
        assert self.latency_s >= 0, f"a latency is never negative, but got {self.latency_s} s"
        assert self.mesh_peers is None or self.mesh_peers >= 1, f"a mesh has peers, but got {self.mesh_peers}"

    def among(self, members: int) -> Link:
        """This link as each of a group of `members` devices on one fabric sees it: without `mesh_peers`."""
        assert members >= 2, f"a link joins at least two devices, but got {members}"
        share = 1.0 if self.mesh_peers is None else min(1.0, (members - 1) / self.mesh_peers)
        return Link(
            kind=self.kind,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * share,
            latency_s=self.latency_s,
            exclusive_group=self.exclusive_group,
        )


def combined(links: tuple[Link, ...], *, members: int = 2) -> Link:
    """The best that parallel `links` give each of a group of `members` devices, as one Link.

    The widest link of every exclusive group works, and all links without a group work, together: their bandwidths
    add up. The latency is that of the widest one, which a message too short to be split would take alone (assumed).

    Source: the multi-edge links of "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic
    Parallelization", section 3.1: concurrent or conflicting resources between one pair of devices.
    """
    assert links, "devices that exchange data have at least one link"
    widest_first = sorted(
        (link.among(members) for link in links), key=lambda link: (-link.bandwidth_bytes_per_s, link.latency_s)
    )
    working: list[Link] = []
    for link in widest_first:
        if link.exclusive_group is None or all(link.exclusive_group != used.exclusive_group for used in working):
            working.append(link)
    return Link(
        kind="+".join(link.kind for link in working),
        bandwidth_bytes_per_s=sum(link.bandwidth_bytes_per_s for link in working),
        latency_s=working[0].latency_s,
    )
