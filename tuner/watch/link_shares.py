"""Shares of links that follow from measured rates of pairs of hosts, held against noise.

A rate is compared with the reference of its pair: the highest rate that `Steps.repeats` successive probes have reached.
One lucky measurement is therefore no reference. The share of a pair is its rate over the reference; one that is less
than `Steps.step` below it counts as 1.

Shares of pairs become shares of hosts and of paths, as in a trace (`hardware.dynamics`). A host sends as fast as the
fastest pair in which it sends, and receives as fast as the fastest in which it receives. Its NICs have the smaller of
both shares. With one pair alone nobody can tell the host from the path, and the path is taken. The share of a path is
what the slower of its two hosts does not explain.

A link's share changes when that many successive probes found it to differ from the present one by more than the step,
all in the same direction. It becomes the mildest of the shares that they found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hardware.trace_file import LEAST_SHARE
from trials.link_probe.contract import HostPair

NamedLink = tuple[str, ...]
"""Name of a node, for its NICs, or the names of two in ascending order, for the path between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Rule against noise.

    Attributes:
        step: Relative difference of two shares that counts: the smaller is more than this below the larger.
        repeats: Number of successive probes that have to agree.
    """

    step: float = 0.25
    repeats: int = 2

    def differ(self, one: float, other: float) -> bool:
        """Return whether two shares differ."""
        return min(one, other) < (1 - self.step) * max(one, other)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRates:
    """Rates of a pair of nodes.

    Attributes:
        sender: Name of the node that sends.
        receiver: Name of the node that receives.
        reference_bytes_per_s: Highest rate that successive probes have reached [bytes/s]; 0 until there were enough.
        recent_bytes_per_s: Rates of the latest probes, fewer than have to agree [bytes/s].
    """

    sender: str
    receiver: str
    reference_bytes_per_s: float = 0.0
    recent_bytes_per_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkShare:
    """Share of a link.

    Attributes:
        link: Names of the link's node, or of its two nodes.
        share: Present share of what the link had at its best.
        found: Shares that the latest probes found instead, fewer than have to agree.
    """

    link: NamedLink
    share: float = 1.0
    found: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """All that a watch has measured of links.

    Attributes:
        pairs: Rates of pairs, those that were measured last at the end.
        shares: Shares of links; one that is not named has 1.
    """

    pairs: tuple[PairRates, ...] = ()
    shares: tuple[LinkShare, ...] = ()

    @property
    def slow_pairs(self) -> list[HostPair]:
        """Pairs whose path is slow: they are measured until it is not, whoever their neighbours are."""
        return [(one.link[0], one.link[1]) for one in self.shares if len(one.link) == 2 and one.share < 1]


def learn(links: Links, rates_bytes_per_s: Mapping[HostPair, float], steps: Steps, *, most_pairs: int) -> Links:
    """Return what is known after one more probe.

    Args:
        links: What was known before.
        rates_bytes_per_s: Rate of each pair that was measured, above 0 [bytes/s].
        steps: Rule against noise.
        most_pairs: Number of pairs that are remembered: those that were measured last.
    """
    known = {(one.sender, one.receiver): one for one in links.pairs}
    pair_shares = {}
    for pair, rate in rates_bytes_per_s.items():
        rates = _learn_pair(known.pop(pair, PairRates(sender=pair[0], receiver=pair[1])), rate, steps)
        known[pair] = rates  # at the end
        if rates.reference_bytes_per_s > 0:
            share = max(rate / rates.reference_bytes_per_s, LEAST_SHARE)
            pair_shares[pair] = share if steps.differ(min(share, 1.0), 1.0) else 1.0
    before = {one.link: one for one in links.shares}
    found = link_shares(pair_shares, {link: one.share for link, one in before.items()}, steps)
    after = before | {
        link: judge(before.get(link, LinkShare(link=link)), share, steps) for link, share in found.items()
    }
    pairs = tuple(known.values())[-most_pairs:]
    names = {name for one in pairs for name in (one.sender, one.receiver)}
    return Links(
        pairs=pairs,
        shares=tuple(one for one in after.values() if (one.share < 1 or one.found) and names >= {*one.link}),
    )


def _learn_pair(rates: PairRates, rate_bytes_per_s: float, steps: Steps) -> PairRates:
    recent = (*rates.recent_bytes_per_s, rate_bytes_per_s)[-steps.repeats :]
    reached = min(recent) if len(recent) == steps.repeats else 0.0
    return replace(
        rates,
        reference_bytes_per_s=max(rates.reference_bytes_per_s, reached),
        recent_bytes_per_s=recent[1:] if len(recent) == steps.repeats else recent,
    )


def link_shares(
    pair_shares: Mapping[HostPair, float], present: Mapping[NamedLink, float], steps: Steps
) -> dict[NamedLink, float]:
    """Return the shares of hosts and paths that explain the shares of pairs.

    Args:
        pair_shares: Share of each pair that was measured.
        present: Present shares of links; one that is not named has 1.
        steps: Rule against noise.
    """
    found: dict[NamedLink, float] = {}
    for host in sorted({name for pair in pair_shares for name in pair}):
        ways = ({pair[1 - end]: pair_shares[pair] for pair in pair_shares if pair[end] == host} for end in (0, 1))
        told = [(max(way.values()), len(way)) for way in ways if way]
        share = min(one for one, _ in told)
        # one peer alone can show that a host is faster than was thought, but not that it is slower
        is_shown = len(told) == 2 and all(count >= 2 for _, count in told)
        found[host,] = share if is_shown else max(share, present.get((host,), 1.0))
    for pair in sorted({(min(pair), max(pair)) for pair in pair_shares}):
        both = [pair_shares[way] for way in (pair, pair[::-1]) if way in pair_shares]
        share = min(min(both) / min(found[host,] for host in pair), 1.0)
        found[pair] = share if steps.differ(share, 1.0) else 1.0
    return {link: min(share, 1.0) for link, share in found.items()}


def judge(link: LinkShare, share: float, steps: Steps) -> LinkShare:
    """Return a link after one more probe has found a share of it."""
    if not steps.differ(share, link.share):
        return replace(link, found=())
    kept = [one for one in link.found if (one < link.share) == (share < link.share)]
    found = (*kept, share)
    if len(found) < steps.repeats:
        return replace(link, found=found)
    return replace(link, share=max(found) if share < link.share else min(found), found=())


def shares_of_hosts(links: Links, names: Iterable[str]) -> dict[str | tuple[int, ...], float]:
    """Return the shares below 1 of the links that a trace names, for hosts that are these nodes, in this order."""
    number = {name: host for host, name in enumerate(names) if name}
    return {
        tuple(sorted(number[name] for name in one.link)): one.share
        for one in links.shares
        if one.share < 1 and all(name in number for name in one.link)
    }
