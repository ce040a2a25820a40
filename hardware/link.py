"""Links between devices: their bandwidth, the share of it that collectives reach, and several links in parallel.

A collective library has two protocols to send over a link. The short one flags every few bytes, which arrive at once
and waste bandwidth (LL and LL128 in NCCL). The long one synchronises on large chunks, which takes a while and then runs
at nearly the full rate (Simple). Each has a time per collective, per hop and per byte, which depends on the kind of
link and stands in `catalog/links.yaml`.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import Field

from hardware.arrays import FloatArray
from hardware.io.config_file import SourcedNumber, StrictModel, read_mapping, validate_mapping

_CATALOG = Path(__file__).parent / "catalog" / "links.yaml"
WIDE_MEMBERS = 5
"""Number of members from which a group leaves its socket and lets the switch add up (nccl issue 1455)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkKind:
    """Efficiencies and latencies of collectives on links of one kind.

    Attributes:
        efficiency: Share of the nominal bandwidth that long messages reach.
        short_efficiency: Share of the nominal bandwidth that the protocol of short messages reaches.
        base_s: Time of one collective beside its hops and bytes, short protocol [s].
        long_base_s: Time of one collective beside its hops and bytes, long protocol [s].
        long_hops: Latency of one hop of the long protocol over `Link.latency_s`.
        hop_efficiency: Share of the nominal bandwidth that one long message between two devices reaches.
        copy_share: Time in which a member copies its own part, over the time in which it would send it.
        tree_efficiency: Share of `efficiency` that a tree over more than two hosts reaches.
        wide_efficiency: Replacement for `efficiency` on a host with WIDE_MEMBERS members or more; None changes nothing.
        reduce_efficiency: Share of the bandwidth at which the switch itself adds up a tensor; None where no switch
            does.
        reduce_base_s: Time of an all-reduce inside the switch beside its bytes [s].
        doubling: Whether collectives halve and double between hosts where their number is a power of two.
    """

    efficiency: float
    short_efficiency: float
    base_s: float
    long_base_s: float
    long_hops: float
    hop_efficiency: float
    copy_share: float
    tree_efficiency: float
    wide_efficiency: float | None
    reduce_efficiency: float | None
    reduce_base_s: float
    doubling: bool


_Figure = TypeVar("_Figure", float, FloatArray)


class LinkCost(NamedTuple, Generic[_Figure]):
    """Cost of a link to a collective of one group, or arrays [u] of the costs to u kinds of groups.

    A larger number is a worse link in every field; all are zero where a group crosses no such link.

    Attributes:
        short_base_s: Time beside hops and bytes, short protocol [s].
        long_base_s: Time beside hops and bytes, long protocol [s].
        short_hop_s: Time of one hop, short protocol [s].
        long_hop_s: Time of one hop, long protocol [s].
        short_s_per_byte: Time per byte, short protocol [s/bytes].
        long_s_per_byte: Time per byte, long protocol [s/bytes].
        hop_s_per_byte: Time per byte of one message between two devices, long protocol [s/bytes].
        tree_s_per_byte: Time per byte in a tree over more than two hosts, long protocol [s/bytes].
        copy_s_per_byte: Time per byte of the copy of a member's own part [s/bytes].
        reduce_base_s: Time of an all-reduce inside the switch beside its bytes [s].
        reduce_s_per_byte: Time per byte of an all-reduce inside the switch [s/bytes]; inf where no switch adds up.
        ring_only: Flag: 1 where a collective visits host after host, 0 where it may halve and double.
    """

    short_base_s: _Figure
    long_base_s: _Figure
    short_hop_s: _Figure
    long_hop_s: _Figure
    short_s_per_byte: _Figure
    long_s_per_byte: _Figure
    hop_s_per_byte: _Figure
    tree_s_per_byte: _Figure
    copy_s_per_byte: _Figure
    reduce_base_s: _Figure
    reduce_s_per_byte: _Figure
    ring_only: _Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One link by which a device reaches its peers.

    Several links between one pair are a tuple of Links. Links with the same `exclusive_group` can't carry one transfer
    together (NVLink or PCIe, never both); all others can.

    Attributes:
        kind: Kind of link, for example "nvlink4" or "infiniband"; the efficiency of collectives follows from it.
        bandwidth_bytes_per_s: Bandwidth of one device, sending and at the same time receiving [bytes/s].
        latency_s: Time of one hop that carries next to no data [s].
        exclusive_group: Name of the set of links of which one transfer can use only one; None joins all others.
        mesh_peers: Number of peers of a full mesh over which the bandwidth is divided by wire, so that a group of m
            devices uses (m - 1) / mesh_peers of it. None means a switch: any group gets all of it.
        efficiency: Share of the bandwidth that the long messages of collectives reach; None takes the kind's.
        sharers: Devices of one host whose shares make up one adapter: a device that sends while the others are silent
            gets `sharers` times the bandwidth. 1 is an adapter of its own.
    """

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    exclusive_group: str | None = None
    mesh_peers: int | None = None
    efficiency: float | None = None
    sharers: int = 1

    def __post_init__(self) -> None:
        assert self.bandwidth_bytes_per_s > 0, f"a link carries data, but got {self.bandwidth_bytes_per_s} bytes/s"
        assert self.latency_s >= 0, f"a latency is never negative, but got {self.latency_s} s"
        assert self.mesh_peers is None or self.mesh_peers >= 1, f"a mesh has peers, but got {self.mesh_peers}"
        assert self.efficiency is None or self.efficiency > 0, f"a link carries data, but got {self.efficiency}"
        assert self.sharers >= 1, f"an adapter has a device, but got {self.sharers}"

    def among(self, members: int) -> Link:
        """Return the part of this link that each of a group of `members` devices uses, without `mesh_peers`."""
        assert members >= 2, f"a link joins at least two devices, but got {members}"
        share = 1.0 if self.mesh_peers is None else min(1.0, (members - 1) / self.mesh_peers)
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * share, mesh_peers=None)

    def reached(self, members: int) -> float:
        """Return the share of the bandwidth that long messages reach among `members` devices of a host."""
        kind = link_kind(self.kind)
        usual = (kind.wide_efficiency if members >= WIDE_MEMBERS else None) or kind.efficiency
        return usual if self.efficiency is None else self.efficiency * usual / kind.efficiency

    def cost(self, members: int = 2) -> LinkCost[float]:
        """Return the cost of this link to a collective with `members` members on a host."""
        kind = link_kind(self.kind)
        reached = self.reached(members)
        # a link with an efficiency of its own scales all efficiencies of its kind alike
        scale = reached / kind.efficiency
        long_s_per_byte = 1 / (self.bandwidth_bytes_per_s * reached)
        return LinkCost(
            short_base_s=kind.base_s,
            long_base_s=kind.long_base_s,
            short_hop_s=self.latency_s,
            long_hop_s=self.latency_s * kind.long_hops,
            short_s_per_byte=1 / (self.bandwidth_bytes_per_s * kind.short_efficiency * scale),
            long_s_per_byte=long_s_per_byte,
            hop_s_per_byte=1 / (self.bandwidth_bytes_per_s * kind.hop_efficiency * scale),
            tree_s_per_byte=long_s_per_byte / kind.tree_efficiency,
            copy_s_per_byte=long_s_per_byte * kind.copy_share,
            reduce_base_s=kind.reduce_base_s,
            reduce_s_per_byte=1 / (self.bandwidth_bytes_per_s * kind.reduce_efficiency * scale)
            if kind.reduce_efficiency
            else float("inf"),
            ring_only=float(not kind.doubling),
        )


def combine_links(links: tuple[Link, ...], *, members: int = 2) -> Link:
    """Combine parallel `links` into the one Link that each of a group of `members` devices gets of them at best.

    The widest link of every exclusive group and all links without a group work together. Their bandwidths add up, and
    so do the shares of them that long messages reach. The latency and the rest of the kind are those of the widest
    link, which a message too short to be split would take alone (assumed). The combined link has as many `sharers` as
    the least shared of the links.

    Source: the multi-edge links of "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic
    Parallelization", section 3.1: concurrent or conflicting resources between one pair of devices.
    """
    assert links, "devices that exchange data have at least one link"
    working, _ = _working_and_excluded(links, members)
    bandwidth = sum(link.bandwidth_bytes_per_s for link in working)
    reached = sum(link.bandwidth_bytes_per_s * _long_efficiency(link) for link in working) / bandwidth
    return Link(
        kind="+".join(link.kind for link in working),
        bandwidth_bytes_per_s=bandwidth,
        latency_s=working[0].latency_s,
        efficiency=working[0].efficiency if len(working) == 1 else reached,
        sharers=min(link.sharers for link in working),
    )


def detour(links: tuple[Link, ...]) -> Link | None:
    """Combine the links that another transfer may use while one is on the `combine_links` links; None without any.

    Links exclude each other only within one transfer (the source of `combine_links`): two transfers may use one each.
    """
    _, excluded = _working_and_excluded(links, 2)
    return combine_links(tuple(excluded), members=2) if excluded else None


def _working_and_excluded(links: tuple[Link, ...], members: int) -> tuple[list[Link], list[Link]]:
    """Return the links that one transfer uses together, the widest first, and the excluded links."""
    widest_first = sorted(
        (link.among(members) for link in links), key=lambda link: (-link.bandwidth_bytes_per_s, link.latency_s)
    )
    working: list[Link] = []
    excluded: list[Link] = []
    for link in widest_first:
        is_free = link.exclusive_group is None or all(link.exclusive_group != used.exclusive_group for used in working)
        (working if is_free else excluded).append(link)
    return working, excluded


def _long_efficiency(link: Link) -> float:
    return link_kind(link.kind).efficiency if link.efficiency is None else link.efficiency


class _KindEntry(StrictModel):
    aliases: list[str] = Field(default_factory=list)
    efficiency: SourcedNumber
    short_efficiency: SourcedNumber
    base_us: SourcedNumber
    long_base_us: SourcedNumber
    long_hops: SourcedNumber
    hop_efficiency: SourcedNumber | None = None
    copy_share: SourcedNumber | None = None
    tree_efficiency: SourcedNumber | None = None
    wide_efficiency: SourcedNumber | None = None
    reduce_efficiency: SourcedNumber | None = None
    reduce_base_us: SourcedNumber | None = None
    doubling: SourcedNumber | None = None

    def kind(self) -> LinkKind:
        return LinkKind(
            efficiency=self.efficiency.value,
            short_efficiency=self.short_efficiency.value,
            base_s=self.base_us.value * 1e-6,
            long_base_s=self.long_base_us.value * 1e-6,
            long_hops=self.long_hops.value,
            hop_efficiency=(self.hop_efficiency or self.efficiency).value,
            copy_share=self.copy_share.value if self.copy_share else 0.0,
            tree_efficiency=self.tree_efficiency.value if self.tree_efficiency else 1.0,
            wide_efficiency=self.wide_efficiency.value if self.wide_efficiency else None,
            reduce_efficiency=self.reduce_efficiency.value if self.reduce_efficiency else None,
            reduce_base_s=self.reduce_base_us.value * 1e-6 if self.reduce_base_us else 0.0,
            doubling=self.doubling is not None,
        )


class _Catalog(StrictModel):
    sources: dict[str, str]
    kinds: dict[str, _KindEntry]


OTHER = "other"


def link_kind(name: str) -> LinkKind:
    """Return the catalog's entry for this kind of link, by name or alias; of parallel links, the first and widest one.

    Case, spaces, dashes and underscores don't matter. A kind that the catalog lacks is `other`: a study may name its
    links as it likes, and states their bandwidth itself.
    """
    kinds = _kinds()
    return kinds.get(spelling_key(name.split("+", maxsplit=1)[0]), kinds[OTHER])


def link_spellings() -> tuple[str, ...]:
    """Return the names and aliases of the catalog's kinds of links, in its order."""
    return tuple(text for name, entry in _catalog().kinds.items() for text in (name, *entry.aliases))


def is_misspelt_kind(name: str) -> bool:
    """Return whether a kind of link is not in the catalog, but spelled almost like one that is.

    Numbers are left aside: a generation that the catalog lacks (`nvlink7`) is no mistake.
    """
    key = spelling_key(name)
    letters = re.sub(r"\d", "", key)
    known = {re.sub(r"\d", "", one) for one in _kinds()}
    return key not in _kinds() and letters not in known and bool(difflib.get_close_matches(letters, known, 1, 0.85))


@functools.cache
def _catalog() -> _Catalog:
    catalog = validate_mapping(_Catalog, read_mapping(_CATALOG), file=str(_CATALOG))
    for name, entry in catalog.kinds.items():
        for field in type(entry).model_fields:
            number = getattr(entry, field)
            unknown = isinstance(number, SourcedNumber) and number.source not in catalog.sources
            assert not unknown, f"{name}.{field} names a source that the catalog doesn't have"
    return catalog


@functools.cache
def _kinds() -> dict[str, LinkKind]:
    kinds: dict[str, LinkKind] = {}
    for name, entry in _catalog().kinds.items():
        for spelling in {spelling_key(name), *map(spelling_key, entry.aliases)}:
            assert spelling not in kinds, f"two kinds of link share the spelling {spelling}"
            kinds[spelling] = entry.kind()
    return kinds


def spelling_key(name: str) -> str:
    """Normalise a name: drop case, spaces, dashes and underscores, in which its spellings differ."""
    return re.sub(r"[\s_-]", "", name).lower()
