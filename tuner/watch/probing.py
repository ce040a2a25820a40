"""Probe of a watch: measures the links between the hosts now and then, and tells what cannot be measured once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trials.link_probe.contract import AbstractProber
from trials.link_probe.rounds import disjoint_rounds, pairs_of_ring
from tuner.watch.hosts import Seat
from tuner.watch.link_shares import Links, Steps, learn, shares_of_hosts

PAIRS_PER_HOST = 8
"""Number of pairs for each host whose rates are kept. A ring has two; others were neighbours while hosts were lost."""

TRANSFERS = 3
"""Number of transfers of each pair in a probe, of which the fastest counts: traffic of the training makes transfers
slower and nothing makes them faster. The training has to meet all of them to be taken for a slow link.
"""


class Probing:
    """Probe of the hosts that a watch sees.

    Args:
        prober: Prober of the batch system.
        every_s: Time between the beginnings of two probes [s].
        links: What an earlier process has measured.
        on_trouble: Function that is told once that a host or pair cannot be measured.
        steps: Rule against noise.
        transfers: Number of transfers of each pair in a probe; None makes TRANSFERS.
        clock: Seconds that never go back.

    Attributes:
        links: What has been measured so far.
    """

    def __init__(
        self,
        prober: AbstractProber,
        *,
        every_s: float,
        links: Links,
        on_trouble: Callable[[str], None],
        steps: Steps | None = None,
        transfers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prober, self._every_s, self._on_trouble, self._clock = prober, every_s, on_trouble, clock
        self._steps, self._transfers = steps or Steps(), transfers or TRANSFERS
        self._due_s = -float("inf")
        self._told: dict[str, str] = {}
        self.links = links

    def look(self, seats: Sequence[Seat], may_measure: bool) -> dict[str | tuple[int, ...], float]:
        """Measure if it is time; return the shares of links that are below 1, as a trace names them."""
        if may_measure and self._clock() >= self._due_s:
            self._due_s = self._clock() + self._every_s
            self._measure([seat for seat in seats if not seat.is_lost], len(seats))
        return shares_of_hosts(self.links, (seat.node for seat in seats))

    def close(self) -> None:
        """End what runs on the hosts."""
        self._prober.close()

    def _measure(self, seats: Sequence[Seat], num_hosts: int) -> None:
        pairs = pairs_of_ring([seat.node for seat in seats], self.links.slow_pairs)
        if not pairs:
            return
        measured = self._prober.measure(
            self._transfers * disjoint_rounds(pairs), {seat.node: seat.identity for seat in seats}
        )
        for what, why in sorted(measured.troubles.items()):
            if what not in self._told:
                self._on_trouble(f"the links of {what} cannot be probed: {why}")
        self._told = dict(measured.troubles)
        self.links = learn(self.links, measured.rates_bytes_per_s, self._steps, most_pairs=PAIRS_PER_HOST * num_hosts)
