"""Contract of the ranks of a trial: processes that are started on the trial's hosts, one per device or per host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from trials.ranks.messages import Exit, Told


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """Preparation of the server from which ranks are forked.

    Attributes:
        modules: Names of modules that the server imports once, so that no rank has to.
        environment: Environment variables that the server sets in addition to its own.
    """

    modules: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


class RanksLostError(RuntimeError):
    """Loss of the process that keeps the ranks, and with it of all ranks. It says nothing about the trial."""


class AbstractRanks(ABC):
    """Ranks of one trial after the other.

    Lifecycle: `start` starts the servers that stay warm between trials. `launch` starts the ranks of one trial,
    `events` returns their messages and exits, and `kill` ends those that still run. `close` ends everything.
    """

    @abstractmethod
    def start(self) -> AbstractRanks:
        """Start the servers that stay warm, and return self.

        Raises:
            RanksLostError: A server did not start.
        """

    @property
    @abstractmethod
    def running(self) -> frozenset[int]:
        """Ranks whose end `events` has not reported yet."""

    @abstractmethod
    def launch(self, function: str, *arguments: Any, num_ranks: int, memory_limit_bytes: int | None = None) -> None:
        """Start one process per rank, each of which runs `function(place, *arguments)`.

        Args:
            function: Function that the processes import, as `module:function`.
            arguments: Arguments of the function after its `Place`.
            num_ranks: Number of ranks, which fill host after host.
            memory_limit_bytes: Largest amount of data that one rank may add to its memory at the start [bytes]; None
                sets no limit.
        """

    @abstractmethod
    def events(self, timeout_s: float) -> list[Told | Exit]:
        """Return the events since the last call, waiting up to `timeout_s` for the first one.

        Raises:
            RanksLostError: The ranks are lost.
        """

    @abstractmethod
    def printed(self) -> str:
        """Return the end of what the ranks of the last launch have printed."""

    @abstractmethod
    def kill(self) -> list[Exit]:
        """Kill all ranks at once, also hanging and stopped ones, and return their exits."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks and servers."""
