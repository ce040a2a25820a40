"""Prober of a network that is only computed, whose shares a test sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trials.link_probe.contract import AbstractProber, HostPair, Measured

RATE_BYTES_PER_S = 1e9


class SimulatedNetwork(AbstractProber):
    """Network in which a host or a path that is not named has all of its rate.

    Attributes:
        share_of_host: Share of each host's NICs.
        share_of_path: Share of the path between two hosts.
        silent: Names of the hosts that do not answer.
        clock_s: Time [s].
        num_probes: Number of probes so far.
        last_pairs: Pairs of the last probe.
    """

    def __init__(self) -> None:
        self.share_of_host: dict[str, float] = {}
        self.share_of_path: dict[frozenset[str], float] = {}
        self.silent: set[str] = set()
        self.clock_s = 0.0
        self.num_probes = 0
        self.last_pairs: list[HostPair] = []

    def measure(self, rounds: Sequence[Sequence[HostPair]], nodes: Mapping[str, str]) -> Measured:
        """Compute the rate of each pair whose hosts answer."""
        self.num_probes += 1
        self.last_pairs = [pair for pairs in rounds for pair in pairs]
        return Measured(
            rates_bytes_per_s={
                pair: RATE_BYTES_PER_S
                * min(self.share_of_host.get(name, 1.0) for name in pair)
                * self.share_of_path.get(frozenset(pair), 1.0)
                for pair in self.last_pairs
                if not self.silent & {*pair}
            },
            troubles=dict.fromkeys(self.silent & nodes.keys(), "gave no answer"),
        )

    def close(self) -> None:
        """Do nothing."""
