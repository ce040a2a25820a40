"""The contract of what starts a trial's processes, one per device, on the hosts that the trial was given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from trials.ranks.messages import Exit, Told


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """What the server has ready from which ranks are forked.

    Attributes:
        modules: What it has imported, so that no rank has to.
        environment: Variables that it sets over those that it finds.
    """

    modules: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


class RanksLostError(RuntimeError):
    """What keeps the ranks has died or cannot be reached, and with it all of them. It says nothing about the trial."""


class AbstractRanks(ABC):
    """The ranks of one trial after the other.

    Lifecycle: `start` starts what is kept warm between trials; `launch` starts the ranks of one trial, `events` tells
    what they say and how they end, `kill` ends those that still run; `close` ends everything.
    """

    @abstractmethod
    def start(self) -> AbstractRanks:
        """Starts what is kept warm, and returns itself.

        Raises:
            RanksLostError: it did not start.
        """

    @property
    @abstractmethod
    def running(self) -> frozenset[int]:
        """The ranks whose end `events` has not told yet."""

    @abstractmethod
    def launch(
        self,
        function: str,
        *arguments: Any,
        num_ranks: int,
        memory_limit_bytes: int | None = None,
    ) -> None:
        """Starts one process per rank, each of which runs `function(place, *arguments)`.

        Args:
            function: `module:function`, which the processes import.
            arguments: What it is given besides its `Place`.
            num_ranks: How many there are; they fill host after host.
            memory_limit_bytes: Most data that one rank may add to what it starts with; None sets no limit.
        """

    @abstractmethod
    def events(self, timeout_s: float) -> list[Told | Exit]:
        """What has happened, waiting up to `timeout_s` for the first of it.

        Raises:
            RanksLostError: there are none any more.
        """

    @abstractmethod
    def printed(self) -> str:
        """What the ranks of the last launch have printed, the end of it."""

    @abstractmethod
    def kill(self) -> list[Exit]:
        """Ends all ranks at once, also hanging and stopped ones; how they ended."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything."""
