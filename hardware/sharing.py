"""Transfers that share links, switches and NICs: the rates that they get, and when they end.

A resource is what has a capacity of its own: one link of a pair, the port of a switch, a NIC. A transfer crosses some
of them, all at its one rate. At every moment the rates on each resource add up to at most its capacity ("Rethinking
Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", equation 7), and they are max-min fair:
none can grow but at the expense of one that is no larger. That is what equal flows on one bottleneck settle at
(Bertsekas and Gallager 1992, Data Networks, section 6.5.2, whose progressive filling this is).

Letters: t transfers, r resources.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def fair_rates(crosses: NDArray[np.bool_], capacity: FloatArray) -> FloatArray:
    """The max-min fair rate of every transfer, in units of the capacities [t].

    Args:
        crosses: Which resources each transfer crosses, one at least [t, r].
        capacity: What each resource carries, none where a link is down [r].
    """
    assert crosses.any(axis=1).all(), "a transfer crosses a link at least"
    assert (capacity >= 0).all(), "a capacity is never negative"
    rates = np.zeros(len(crosses))
    is_open = np.ones(len(crosses), dtype=np.bool_)
    left = capacity.astype(np.float64)
    while is_open.any():
        sharers = crosses[is_open].sum(axis=0)
        share = np.divide(left, sharers, out=np.full(len(left), np.inf), where=sharers > 0)
        fair = share.min()
        bottlenecks = share <= fair * (1 + 1e-12)
        settled = is_open & (crosses & bottlenecks).any(axis=1)
        rates[settled] = fair
        left = np.maximum(left - fair * crosses[settled].sum(axis=0), 0.0)
        is_open &= ~settled
    return rates


def transfer_ends(
    start_s: FloatArray, size_bytes: FloatArray, crosses: NDArray[np.bool_], capacity: FloatArray
) -> FloatArray:
    """When each transfer ends if all share the resources fairly at every moment [t]; inf where a link is down.

    Rates change whenever a transfer begins or ends. Latencies are the caller's: they delay a start or an end, and take
    nothing from a capacity.

    Args:
        start_s: When each begins [t].
        size_bytes: What it carries [t].
        crosses: Which resources it crosses, one at least [t, r].
        capacity: Bytes per second of each resource [r].
    """
    end_s = np.where(size_bytes > 0, np.inf, start_s)
    left = size_bytes.astype(np.float64)
    begins = np.sort(np.unique(start_s))
    now_s = begins[0] if len(begins) else 0.0
    while True:
        runs = (start_s <= now_s) & np.isinf(end_s)
        later = begins[begins > now_s]
        next_s = later[0] if len(later) else np.inf
        if not runs.any():
            if not len(later):
                return end_s
            now_s = next_s
            continue
        rates = fair_rates(crosses[runs], capacity)
        needs_s = np.divide(left[runs], rates, out=np.full(len(rates), np.inf), where=rates > 0)
        until_s = min(now_s + needs_s.min(), next_s)
        if np.isinf(until_s):  # what is left crosses links that are down
            return end_s
        is_done = now_s + needs_s <= until_s
        left[runs] = np.where(is_done, 0.0, left[runs] - rates * (until_s - now_s))
        end_s[np.flatnonzero(runs)[is_done]] = until_s
        now_s = until_s
