"""Choice of the hosts that stay where a job takes fewer than there are: equally many of few domains."""

from __future__ import annotations

from collections.abc import Sequence


def choose_hosts(order: Sequence[int], rank: Sequence[object], domains: Sequence[int], count: int) -> tuple[int, ...]:
    """Choose `count` hosts of an order: the first ones, of which the last may be exchanged for others of their rank.

    Groups of ranks end where domains do only if all domains have as many hosts. Where hosts of one rank are more than
    are wanted, those are chosen that leave equally many in each of as few domains as can be.

    Args:
        order: Hosts, the most useful first; those of one rank stand side by side.
        rank: What makes hosts equally useful, by host.
        domains: Domain of every host.
        count: Number of hosts, at most those of the order.
    """
    if len({*domains}) == len(domains):
        return tuple(order[:count])
    last = rank[order[count - 1]]
    sure = [host for host in order[:count] if rank[host] != last]
    ties: dict[int, list[int]] = {}
    for host in order:
        if rank[host] == last:
            ties.setdefault(domains[host], []).append(host)
    wanted = count - len(sure)
    for parts in (number for number in range(1, len(ties) + 1) if wanted % number == 0):
        of_each = wanted // parts
        large = [hosts for hosts in ties.values() if len(hosts) >= of_each]
        if len(large) >= parts:
            return (*sure, *sorted(host for hosts in large[:parts] for host in hosts[:of_each]))
    return tuple(order[:count])
