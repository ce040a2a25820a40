"""Times of collectives on groups of ranks, alone on their links.

Every function takes `message_bytes`, [g] or a scalar, and `group`, g entries of GroupLinks, and returns seconds, [g].
A group of one takes no time. n is a group's size and B its message:

    all-reduce       B is the whole tensor, which every member holds before and after
    all-gather       B is the gathered tensor, of which every member contributes B / n
    reduce-scatter   B is the whole tensor, of which every member keeps the sum of B / n
    all-to-all       B is the buffer of one member, of which it keeps B / n
    ring exchange    B is the whole tensor; B / n travels around the ring and visits every member
    send/recv        B is one message from one member to the next

The time is that of the fastest of a few algorithms and protocols, each a straight line in B. The lines and their
sources stand in `algorithms.py`, the efficiencies of each kind of link in `catalog/links.yaml`. All groups of one entry
run at the same time, each rank with its own share of the host's network: eight groups with one member per host get as
much as one group with eight members per host. The host's cost of a launch (Python, kernel start) belongs to the
runtime, not here. So does the slowdown of a collective that runs beside the kernels of a training step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hardware.arrays import FloatArray, IntArray
from hardware.group_links import GroupLinks


def all_reduce_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of an all-reduce [s], [g]: a ring, a tree of hosts, or a switch that adds up, whichever is fastest.

    A ring sends 2 (n - 1) / n B through every link in 2 (n - 1) hops; a tree sends up to 2 B in log2 hops, and wins
    for short messages in large groups.
    """
    return _fastest_s(message_bytes, group.lines.reduce, group.row)


def all_gather_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of a ring all-gather [s], [g]: n - 1 hops, (n - 1) / n B through every link."""
    return _fastest_s(message_bytes, group.lines.gather, group.row)


def reduce_scatter_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of a ring reduce-scatter [s], [g]: an all-gather that runs backwards.

    The additions are hidden behind the transfer: both take the same time on A100, H100 and B200 within 10% from 16 MB
    on (measured: aiconfigurator's nccl-tests figures).
    """
    return all_gather_s(message_bytes, group)


def all_to_all_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of an all-to-all [s], [g]: each member sends B / n to each of the others.

    The data that stays on the host and the data that leaves it travel at the same time, the latter through the member's
    own share of the network.
    """
    return _fastest_s(message_bytes, group.lines.exchange, group.row)


def send_recv_s(message_bytes: ArrayLike, group: GroupLinks) -> FloatArray:
    """Time of one message from one member to the next [s], over the slowest such hop, [g].

    One pair uses one member's share of the network on each side, or the one wire between the two on a full mesh.
    """
    return _fastest_s(message_bytes, group.lines.hop, group.row)


def _fastest_s(message_bytes: ArrayLike, lines: FloatArray, row: IntArray) -> FloatArray:
    """Evaluate the lines [k, 2, u] at these messages, and return the least time of each [s], [g]."""
    message = np.asarray(message_bytes, dtype=np.float64)
    fastest_s: FloatArray | None = None
    # line by line and in place: an array [k, g] would cost more memory traffic than the minimum itself
    for latency_s, s_per_byte in lines:
        seconds: FloatArray = s_per_byte.take(row) * message
        seconds += latency_s.take(row)
        fastest_s = seconds if fastest_s is None else np.minimum(fastest_s, seconds, out=fastest_s)
    assert fastest_s is not None, "every collective has a line"
    return fastest_s
