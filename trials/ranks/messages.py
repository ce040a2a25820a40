"""What a trial, the server of its ranks and the ranks tell each other; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Asks for a port at which the first rank of the next trial will listen; answered by `Reserved`.

    Attributes:
        host: The address of this host to listen at.
    """

    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """A port that is held for the next trial."""

    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Asks for one process per rank.

    Attributes:
        function: What each runs, as `function(place, *arguments)`: `module:function`.
        arguments: What it is given besides its place.
        ranks: Which ranks, of all `world_size`.
        world_size: Ranks on all hosts together.
        host: Name or address of the host of rank 0.
        port: Where rank 0 listens; the one that its host reserved.
        memory_limit_bytes: Most data that one rank may add to what it starts with (RLIMIT_DATA); None sets no limit.
    """

    function: str
    arguments: tuple[Any, ...] = ()
    ranks: tuple[int, ...]
    world_size: int
    host: str
    port: int
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Asks for the death of all ranks on this host; each is told by its `Exit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What one rank has sent."""

    rank: int
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How one rank ended.

    Attributes:
        rank: Which.
        code: Its exit status, or the negative number of the signal that killed it.
        peak_bytes: Most memory that it had resident.
        cpu_s: CPU time of its whole life, all threads.
    """

    rank: int
    code: int
    peak_bytes: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What a rank is told about itself.

    Attributes:
        rank: Its number.
        local_rank: Its number on its host.
        world_size: Ranks of the trial.
        host: Where rank 0 listens.
        port: Where rank 0 listens.
        listening: The descriptor of that listening socket; None except for rank 0.
        tell: Sends a value to whoever runs the trial.
    """

    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    listening: int | None
    tell: Callable[[Any], None]
