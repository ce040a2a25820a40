"""Transfers that share links, switches and NICs: the rates that they get at one moment.

A resource is what has a capacity of its own: one link of a device, the NIC of a host, the uplink of a switch. A
transfer crosses some of them, all at its one rate. At every moment what crosses a resource adds up to at most its
capacity ("Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", equation 7), and
the rates are max-min fair: none can grow but at the expense of one that is no larger. That is what equal flows on one
bottleneck settle at (Bertsekas and Gallager 1992, Data Networks, section 6.5.2, whose progressive filling this is).

A rate is relative: 1 is what the transfer reaches alone. Of transfers that are unlike, each is slowed down alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Uses = tuple[tuple[int, float], ...]
"""The resources that a transfer crosses, each once, and what it takes of their capacities at its full rate; one that
stands for several alike takes as much as all of them."""

_ROUNDING = 1 + 1e-12


def fair_rates(uses: Sequence[Uses], limits: Sequence[float], capacity: Mapping[int, float]) -> list[float]:
    """The max-min fair rate of every transfer; 0 where a link that it crosses is down.

    Args:
        uses: What each transfer crosses.
        limits: The most that each may have; 1 where nothing but the links hold it back.
        capacity: Of every resource.
    """
    wanted: dict[int, float] = {}
    for crossed, limit in zip(uses, limits, strict=True):
        for resource, amount in crossed:
            wanted[resource] = wanted.get(resource, 0.0) + amount * limit
    scarce = {resource for resource, amount in wanted.items() if amount > capacity[resource] * _ROUNDING}
    if not scarce:
        return list(limits)
    rates = list(limits)
    left = {resource: capacity[resource] for resource in scarce}
    crossing = [tuple(use for use in crossed if use[0] in scarce) for crossed in uses]
    is_open = {transfer for transfer, crossed in enumerate(crossing) if crossed}
    while is_open:
        amounts = dict.fromkeys(scarce, 0.0)
        for transfer in is_open:
            for resource, amount in crossing[transfer]:
                amounts[resource] += amount
        shares = {resource: left[resource] / amount for resource, amount in amounts.items() if amount > 0}
        fair = min(*shares.values(), *(limits[transfer] for transfer in is_open)) * _ROUNDING
        full = {resource for resource, share in shares.items() if share <= fair}
        settled = [
            transfer
            for transfer in is_open
            if limits[transfer] <= fair or any(resource in full for resource, _ in crossing[transfer])
        ]
        for transfer in settled:
            rates[transfer] = min(fair / _ROUNDING, limits[transfer])
            for resource, amount in crossing[transfer]:
                left[resource] = max(left[resource] - rates[transfer] * amount, 0.0)
        is_open.difference_update(settled)
    return rates
