"""Contract of probers: they let hosts send bytes to each other, and return how fast the bytes arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HostPair = tuple[str, str]
"""Names of the host that sends and of the one that receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Result of one probe of a cluster.

    Attributes:
        rates_bytes_per_s: Highest rate at which bytes arrived in a round, of each pair that was measured [bytes/s].
        troubles: Reason for each host that does not answer, and for each pair whose receiver cannot be reached, by the
            name of the host or `sender -> receiver`.
    """

    rates_bytes_per_s: Mapping[HostPair, float]
    troubles: Mapping[str, str]


class AbstractProber(ABC):
    """Prober of the hosts of one cluster."""

    @abstractmethod
    def measure(self, rounds: Sequence[Sequence[HostPair]], nodes: Mapping[str, str]) -> Measured:
        """Measure pairs of hosts, one round after the other; the pairs of a round send at the same time.

        It raises nothing for a host that fails: what cannot be measured is a trouble of the result.

        Args:
            rounds: Pairs of each round, which have no host in common. A pair may be in several rounds.
            nodes: Identity of each host, as the batch system knows it, by the host's name.
        """

    @abstractmethod
    def close(self) -> None:
        """End what runs on the hosts."""


def name_pair(pair: HostPair) -> str:
    """Write a pair as the key of its trouble."""
    return f"{pair[0]} -> {pair[1]}"
