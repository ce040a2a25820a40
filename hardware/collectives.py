"""Alpha-beta times of collectives on groups of ranks.

Every function takes `message_bytes`, [g] or a scalar, and `group`, g entries of GroupLinks, and returns seconds, [g].
A group of one takes no time. n is a group's size and B its message:

    all-reduce       B is the whole tensor, which every member holds before and after
    all-gather       B is the gathered tensor, of which every member contributes B / n
    reduce-scatter   B is the whole tensor, of which every member keeps the sum of B / n
    all-to-all       B is the buffer of one member, of which it keeps B / n
    ring exchange    B is the whole tensor; B / n travels around the ring and visits every member
    send/recv        B is one message from one member to the next

Bandwidths: rings and trees run in as many copies as a host has members, each through another member's NIC, so the
host with the fewest members decides what crosses hosts; inside a host each member's own link carries its share.
Latencies are those of `Link`. What a launch costs on top (kernel start, Python) belongs to the runtime, not here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hardware.cluster import FloatArray, GroupLinks


def all_reduce_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of an all-reduce [s], the faster of ring and tree, [g].

    Ring: a reduce-scatter and an all-gather, 2 (n - 1) / n B through every member's link (source: nccl-tests
    doc/PERFORMANCE.md, AllReduce). Tree: up and down, 2 B, in log2 hops on both levels (source: the latency of
    NCCL's src/graph/tuning.cc, where hosts form a tree; a tree inside the host as well is assumed). The tree wins
    for short messages in large groups.
    """
    message_bytes = np.asarray(message_bytes, dtype=np.float64)
    ring_s = 2 * (_ring_latency_s(group) + _ring_share(group) * message_bytes * _ring_s_per_byte(group))
    tree_s = 2 * (_tree_latency_s(group) + message_bytes * _ring_s_per_byte(group))
    return np.where(group.size > 1, np.minimum(ring_s, tree_s), 0.0)


def all_gather_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of a ring all-gather [s], [g]: n - 1 hops, (n - 1) / n B through every member's link.

    Source: nccl-tests doc/PERFORMANCE.md (AllGather); hops as in NCCL's src/graph/tuning.cc.
    """
    message_bytes = np.asarray(message_bytes, dtype=np.float64)
    gather_s: FloatArray = _ring_latency_s(group) + _ring_share(group) * message_bytes * _ring_s_per_byte(group)
    return gather_s


def reduce_scatter_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of a ring reduce-scatter [s], [g]: an all-gather that runs backwards.

    Source: nccl-tests doc/PERFORMANCE.md (ReduceScatter); the additions are hidden behind the transfer (assumed).
    """
    return all_gather_s(message_bytes, group)


def all_to_all_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of an all-to-all [s], [g]: each member sends B / n to each of the others.

    What stays on the host and what leaves it travel at the same time, the latter through the member's own NIC:
    (n - m) / n B for the m members on the least populated host. One latency per peer, as in a pairwise exchange.

    Source: nccl-tests doc/PERFORMANCE.md (AlltoAll) for the volume; Thakur, Rabenseifner and Gropp, "Optimization of
    Collective Communication Operations in MPICH" (2005) for the pairwise exchange.
    """
    message_bytes = np.asarray(message_bytes, dtype=np.float64)
    peers_off_host = group.size - group.members_per_host
    intra_s = message_bytes * (group.max_members_per_host - 1) / group.size / group.intra_bandwidth_bytes_per_s
    inter_s = message_bytes * peers_off_host / group.size / group.inter_bandwidth_bytes_per_s
    latency_s = (group.members_per_host - 1) * group.intra_latency_s + peers_off_host * group.inter_latency_s
    exchange_s: FloatArray = latency_s + np.maximum(intra_s, inter_s)
    return exchange_s


def send_recv_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of one message from one member to the next [s], over the slowest such hop, [g].

    One pair uses one NIC of each side, or the one wire between the two on a full mesh.
    """
    message_bytes = np.asarray(message_bytes, dtype=np.float64)
    intra_s = group.intra_latency_s + message_bytes / group.intra_pair_bandwidth_bytes_per_s
    inter_s = group.inter_latency_s + message_bytes / group.inter_bandwidth_bytes_per_s
    return np.where(group.size > 1, np.maximum(intra_s, inter_s), 0.0)


def ring_exchange_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time in which every member's B / n visits all members of the ring [s], [g]: n - 1 exchanges with a neighbour.

    All members wait for the slowest hop of every exchange. Source: Liu, Zaharia and Abbeel, "Ring Attention with
    Blockwise Transformers for Near-Infinite Context" (2023).
    """
    message_bytes = np.asarray(message_bytes, dtype=np.float64)
    return (group.size - 1) * send_recv_s(message_bytes / group.size, group)


def _ring_share(group: GroupLinks) -> FloatArray:
    """(n - 1) / n, [g]."""
    return (group.size - 1) / group.size


def _ring_s_per_byte(group: GroupLinks) -> FloatArray:
    """Seconds for each byte that passes through every member, over the slower link class, [g]; 0 if it has no link."""
    crossing_bandwidth = group.members_per_host * group.inter_bandwidth_bytes_per_s
    return np.maximum(1 / group.intra_bandwidth_bytes_per_s, 1 / crossing_bandwidth)


def _ring_latency_s(group: GroupLinks) -> FloatArray:
    """The n - 1 hops of a ring, hosts - 1 of them between hosts [s], [g]. Source: NVIDIA/nccl src/graph/tuning.cc."""
    return (group.size - group.hosts) * group.intra_latency_s + (group.hosts - 1) * group.inter_latency_s


def _tree_latency_s(group: GroupLinks) -> FloatArray:
    """From a leaf to the root: log2 hops inside the fullest host, log2 hops between hosts [s], [g]."""
    inside = np.ceil(np.log2(group.max_members_per_host)) * group.intra_latency_s
    return inside + np.ceil(np.log2(group.hosts)) * group.inter_latency_s
