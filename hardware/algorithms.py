"""Rings, trees and exchanges as straight lines: a time in seconds, and a further time for each byte of the message.

The library chooses algorithm and protocol by the size of the message, and takes the fastest: the time of a collective
is the least of a few lines. A line depends on the group alone, so it is computed once for every kind of group, and a
message costs a multiplication and a minimum.

Letters: u kinds of groups, k lines; n members, h domains (a host, or hosts joined by fast
links), m members in the domain with the fewest, M with the most.

Sources: NVIDIA/nccl src/graph/tuning.cc (base latency, hops, protocols, trees over hosts with a chain inside each),
nccl-tests doc/PERFORMANCE.md (volumes), NVIDIA/nccl issue 812 (on two hosts a tree sends the tensor once where a ring
sends it nearly twice) and 1455 (in-switch reduction from five devices on).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hardware.arrays import FloatArray, IntArray
from hardware.link import WIDE_MEMBERS, LinkCost

PEERS_AT_ONCE = 8
"""Messages of an all-to-all that a member keeps in flight (NCCL_MAX_DEV_WORK_P2P_PER_BATCH); on EFA 8 to 14 fit."""


SIZES = ("size", "domains", "members_per_domain", "max_members_per_domain", "switches")
LINKS = ("intra", "pair", "inter", "hop")
"""Names of the sizes and of the links of `GroupKinds`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupKinds:
    """Sizes and links of each kind of group; each array is [u], one entry per distinct (stride, size).

    All groups of one entry run at the same time and a synchronous job waits for the slowest, so every field is the
    worst over them. Where unlike hosts or unaligned groups make different groups worst in different fields, the
    entry as a whole is worse than any one of them.

    Attributes:
        size: Number n of ranks in a group.
        domains: Largest number h of domains that a group spans.
        members_per_domain: Smallest number m of members that a group has in one of its domains.
        max_members_per_domain: Largest number M of members that a group has in one of its domains.
        switches: Largest number of leaf switches that a group spans.
        intra: Link of a member to the other members in its domain.
        pair: Link of a member to just one other member in its domain; on a full mesh that is one wire.
        inter: Share of the network that a member has to itself: a group with m members in a domain has m shares there.
        hop: Share of the network for messages from each member to the next, where members whose next one is on their
            own domain leave their share of a common adapter to the others.
    """

    size: IntArray
    domains: IntArray
    members_per_domain: IntArray
    max_members_per_domain: IntArray
    switches: IntArray
    intra: LinkCost[FloatArray]
    pair: LinkCost[FloatArray]
    inter: LinkCost[FloatArray]
    hop: LinkCost[FloatArray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostLines:
    """Times of the collectives as lines [k, 2, u]: seconds, and seconds per byte.

    Attributes:
        gather: Lines of all-gather and reduce-scatter.
        reduce: Lines of all-reduce.
        exchange: Lines of all-to-all.
        hop: Lines of one message from one member to the next.
    """

    gather: FloatArray
    reduce: FloatArray
    exchange: FloatArray
    hop: FloatArray


def join_kinds(first: GroupKinds, second: GroupKinds) -> GroupKinds:
    """Append the kinds of groups of `second` to those of `first`."""
    kinds: dict[str, Any] = {name: np.append(getattr(first, name), getattr(second, name)) for name in SIZES}
    kinds |= {name: LinkCost(*map(np.append, getattr(first, name), getattr(second, name))) for name in LINKS}
    return GroupKinds(**kinds)


def join_lines(first: CostLines, second: CostLines) -> CostLines:
    """Append the lines of `second` to those of `first`."""
    names = [field.name for field in fields(CostLines)]
    return CostLines(**{name: np.concatenate([getattr(first, name), getattr(second, name)], axis=2) for name in names})


def cost_lines(groups: GroupKinds) -> CostLines:
    """Compute the lines of every kind of group; a group of one takes no time."""
    alone = groups.size == 1
    protocols = _protocols(groups)
    # one line per protocol and algorithm: every collective later takes its least line
    gather = [_ring(groups, protocol, passes=1) for protocol in protocols]
    reduce = [_ring(groups, protocol, passes=2) for protocol in protocols]
    reduce += _trees(groups, protocols, reduce)
    exchange = [_all_to_all(groups, protocol) for protocol in protocols]
    hop = _hops(groups)
    return CostLines(
        gather=np.where(alone, 0.0, gather),
        reduce=np.where(alone, 0.0, reduce),
        exchange=np.where(alone, 0.0, exchange),
        hop=np.where(alone, 0.0, hop),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Protocol:
    """One protocol on the links of every kind of group: times and times per byte, each [u]."""

    base_s: FloatArray
    intra_hop_s: FloatArray
    inter_hop_s: FloatArray
    intra_s_per_byte: FloatArray
    inter_s_per_byte: FloatArray
    tree_s_per_byte: FloatArray


def _protocols(groups: GroupKinds) -> tuple[_Protocol, _Protocol]:
    """Return the short and the long protocol; the slower of the two link classes sets the base time."""
    intra, inter = groups.intra, groups.inter
    # links know the rate of a tree by the long protocol; by the short one a tree is no faster
    short = _Protocol(
        base_s=np.maximum(intra.short_base_s, inter.short_base_s),
        intra_hop_s=intra.short_hop_s,
        inter_hop_s=inter.short_hop_s,
        intra_s_per_byte=intra.short_s_per_byte,
        inter_s_per_byte=inter.short_s_per_byte,
        tree_s_per_byte=np.maximum(inter.short_s_per_byte, inter.tree_s_per_byte),
    )
    long = _Protocol(
        base_s=np.maximum(intra.long_base_s, inter.long_base_s),
        intra_hop_s=intra.long_hop_s,
        inter_hop_s=inter.long_hop_s,
        intra_s_per_byte=intra.long_s_per_byte,
        inter_s_per_byte=inter.long_s_per_byte,
        tree_s_per_byte=inter.tree_s_per_byte,
    )
    return short, long


def _ring(groups: GroupKinds, protocol: _Protocol, *, passes: int) -> FloatArray:
    """Compute the line of a ring, once around (all-gather) or twice (all-reduce) [2, u].

    It takes n - 1 hops, h - 1 of them between domains, and sends (n - 1) / n of the tensor through every link. A ring
    runs in as many copies as the domain with the fewest members has members, each through another member's share of the
    network. Beside that a member moves its own part once, which a slower network hides.
    """
    n = groups.size
    hops_s = (n - groups.domains) * protocol.intra_hop_s + _rounds_between_domains(groups) * protocol.inter_hop_s
    # the slower of both is the bottleneck: all copies of the ring inside the domain, or their shares of the network
    share = passes * (n - 1) / n
    inside_s_per_byte = share * protocol.intra_s_per_byte + groups.intra.copy_s_per_byte / n
    crossing_s_per_byte = share * protocol.inter_s_per_byte / groups.members_per_domain
    return np.array([protocol.base_s + passes * hops_s, np.maximum(inside_s_per_byte, crossing_s_per_byte)])


def _rounds_between_domains(groups: GroupKinds) -> FloatArray:
    """Return the number of successive hops between domains: h - 1 in a ring, log2 h where powers of two may halve.

    Both send (h - 1) / h of the tensor (Thakur, Rabenseifner and Gropp 2005, recursive halving and doubling).
    """
    is_power = (groups.domains & (groups.domains - 1)) == 0
    doubles = is_power & (groups.inter.ring_only == 0)
    return np.where(doubles, np.log2(groups.domains), groups.domains - 1.0)


def _trees(groups: GroupKinds, protocols: tuple[_Protocol, _Protocol], rings: list[FloatArray]) -> list[FloatArray]:
    """Compute the line of a tree of domains for each protocol [2, u]; in one domain that of the switch, or of the ring.

    The tensor goes up and down a chain inside the domain and the levels of a binary tree of domains, so that it crosses
    every link twice. With two domains it crosses the network once in each direction, and a switch that adds up needs it
    only once inside the domain.
    """
    in_one = groups.domains == 1
    levels = np.ceil(np.log2(groups.domains))
    volume = np.where(groups.domains == 2, 1.0, 2.0)
    # a switch adds up only for groups that fill enough of the domain (nccl issue 1455)
    switched = (groups.members_per_domain >= WIDE_MEMBERS) & np.isfinite(groups.intra.reduce_s_per_byte)
    reduce_s_per_byte = np.where(switched, groups.intra.reduce_s_per_byte, np.inf)
    lines = []
    # only the long protocol can use the switch's own reduction
    for protocol, ring, is_long in zip(protocols, rings, (False, True), strict=True):
        hops_s = (groups.max_members_per_domain - 1) * protocol.intra_hop_s + levels * protocol.inter_hop_s
        crossing = np.where(groups.domains > 2, protocol.tree_s_per_byte, protocol.inter_s_per_byte)
        network_s_per_byte = volume * crossing / groups.members_per_domain
        chain_s_per_byte = 2 * protocol.intra_s_per_byte
        base_s = protocol.base_s
        if is_long:
            chain_s_per_byte = np.minimum(chain_s_per_byte, reduce_s_per_byte)
            base_s = np.where(switched, np.maximum(base_s, groups.intra.reduce_base_s), base_s)
        tree = np.array([base_s + 2 * hops_s, np.maximum(chain_s_per_byte, network_s_per_byte)])
        switch = np.array([groups.intra.reduce_base_s, reduce_s_per_byte])
        alone = np.where(switched, switch, ring) if is_long else ring
        lines.append(np.where(in_one, alone, tree))
    return lines


def _all_to_all(groups: GroupKinds, protocol: _Protocol) -> FloatArray:
    """Compute the line of an all-to-all, in which each member sends B / n to each of the others, some at a time [2, u].

    The data inside the domain and the data that leaves it travel at the same time. The latter is (n - m) / n of the
    buffer for members of the domain with the fewest, and goes through the member's own share of the network.
    """
    n, peers_outside = groups.size, groups.size - groups.members_per_domain
    inside_s_per_byte = (
        (groups.max_members_per_domain - 1) * protocol.intra_s_per_byte + groups.intra.copy_s_per_byte
    ) / n
    outside_s_per_byte = peers_outside / n * protocol.inter_s_per_byte
    # messages leave in waves of PEERS_AT_ONCE, each with the latency of its hops
    waves_s = (groups.members_per_domain - 1) * protocol.intra_hop_s + peers_outside * protocol.inter_hop_s
    first_s = np.maximum(protocol.intra_hop_s, protocol.inter_hop_s)
    return np.array(
        [protocol.base_s + first_s + waves_s / PEERS_AT_ONCE, np.maximum(inside_s_per_byte, outside_s_per_byte)]
    )


def _hops(groups: GroupKinds) -> list[FloatArray]:
    """Compute the lines of one message over the slowest link between neighbours of a group, by each protocol [2, u].

    Both have the base time of the short protocol, because there is no pipeline to fill (measured: vidur's send_recv on
    A100 and H100).
    """
    pair, network = groups.pair, groups.hop
    base_s = np.maximum(pair.short_base_s, network.short_base_s)
    # neighbours may be in one domain or in two: the slower way sets the time of all
    short_hop_s = base_s + np.maximum(pair.short_hop_s, network.short_hop_s)
    long_hop_s = base_s + np.maximum(pair.long_hop_s, network.long_hop_s)
    return [
        np.array([short_hop_s, np.maximum(pair.short_s_per_byte, network.short_s_per_byte)]),
        np.array([long_hop_s, np.maximum(pair.hop_s_per_byte, network.hop_s_per_byte)]),
    ]
