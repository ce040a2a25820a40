"""Rates of transfers that share links, switches and NICs at one moment.

A resource has a capacity of its own: one link of a device, the NIC of a host, the uplink of a switch. A transfer
crosses some resources, all at its one rate. At every moment the rates on a resource add up to at most its capacity
("Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", equation 7). Rates are
max-min fair: no rate can grow except at the expense of one that is no larger. Equal flows on one bottleneck settle at
such rates. The algorithm is progressive filling (Bertsekas and Gallager 1992, Data Networks, section 6.5.2).

A rate is relative: 1 is the speed that the transfer reaches alone. Unlike transfers on one bottleneck are slowed down
by the same factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Uses = tuple[tuple[int, float], ...]
"""Resources that a transfer crosses, each once, with the capacity that it takes at its full rate; a transfer that
stands for several equal ones takes as much as all of them."""

_ROUNDING = 1 + 1e-12


def fair_rates(uses: Sequence[Uses], limits: Sequence[float], capacity: Mapping[int, float]) -> list[float]:
    """Return the max-min fair rate of every transfer; 0 where a link that it crosses is down.

    Args:
        uses: Resources that each transfer crosses.
        limits: Largest rate that each transfer may have; 1 where only the links hold it back.
        capacity: Capacity of every resource.
    """
    wanted: dict[int, float] = {}
    for crossed, limit in zip(uses, limits, strict=True):
        for resource, amount in crossed:
            wanted[resource] = wanted.get(resource, 0.0) + amount * limit
    # resources that even full rates do not fill hold nobody back
    scarce = {resource for resource, amount in wanted.items() if amount > capacity[resource] * _ROUNDING}
    if not scarce:
        return list(limits)
    rates = list(limits)
    left = {resource: capacity[resource] for resource in scarce}
    crossing = [tuple(use for use in crossed if use[0] in scarce) for crossed in uses]
    is_open = {transfer for transfer, crossed in enumerate(crossing) if crossed}
    # progressive filling: raise all open rates alike until a resource is full or a limit is met, and close those
    while is_open:
        amounts = dict.fromkeys(scarce, 0.0)
        for transfer in is_open:
            for resource, amount in crossing[transfer]:
                amounts[resource] += amount
        shares = {resource: left[resource] / amount for resource, amount in amounts.items() if amount > 0}
        # the common rate rises until the first resource is full or the first limit is met
        fair = min(*shares.values(), *(limits[transfer] for transfer in is_open)) * _ROUNDING
        full = {resource for resource, share in shares.items() if share <= fair}
        # transfers that this stops keep their rate, and free nothing for the others
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
