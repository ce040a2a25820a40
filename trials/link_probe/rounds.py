"""Pairs of hosts that a probe measures, in rounds whose pairs share no host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trials.link_probe.contract import HostPair


def pairs_of_ring(hosts: Sequence[str], besides: Iterable[HostPair] = ()) -> list[HostPair]:
    """Return the pairs of neighbours in a ring of hosts, each in both directions.

    Both directions let a slow host be told from a slow path: of a slow host, both neighbours know.

    Args:
        hosts: Names of the hosts in the order of the ring.
        besides: Pairs to measure in addition, where both hosts are in the ring.
    """
    ring = [(first, second) for first, second in zip(hosts, [*hosts[1:], *hosts[:1]], strict=True) if first != second]
    known = {*hosts}
    ring += [(first, second) for first, second in besides if first in known and second in known and first != second]
    single = list({frozenset(pair): pair for pair in ring}.values())
    return [*single, *((second, first) for first, second in single)]


def disjoint_rounds(pairs: Iterable[HostPair]) -> list[list[HostPair]]:
    """Divide pairs into rounds in which no host takes part twice; each pair goes into the first round free for it.

    The pairs of a ring need four rounds for an even number of hosts and six for an odd one.
    """
    rounds: list[tuple[set[str], list[HostPair]]] = []
    for pair in pairs:
        for busy, members in rounds:
            if not busy & {*pair}:
                busy |= {*pair}
                members.append(pair)
                break
        else:
            rounds.append(({*pair}, [pair]))
    return [members for _, members in rounds]
