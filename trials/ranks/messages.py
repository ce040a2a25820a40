"""Messages between a trial, the server of its ranks, and the ranks; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Request for a port at which the first rank of the next trial will listen; answered by `Reserved`.

    Attributes:
        host: Address of this host to listen at.
    """

    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Answer with a port that is held for the next trial."""

    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Request for one process per rank.

    Attributes:
        function: Function that each rank calls as `function(place, *arguments)`, written `module:function`.
        arguments: Arguments of the function after its place.
        ranks: Numbers of the ranks on this host, out of all `world_size`.
        world_size: Number of ranks on all hosts together.
        host: Name or address of the host of rank 0.
        port: Port at which rank 0 listens, as reserved on its host.
        memory_limit_bytes: Largest amount of data that one rank may add to its memory at the start [bytes], enforced
            by RLIMIT_DATA; None sets no limit.
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
    """Request to kill all ranks on this host; each of them is reported by its `Exit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """Value that one rank has sent."""

    rank: int
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """End of one rank.

    Attributes:
        rank: Number of the rank.
        code: Exit status, or the negative number of the signal that killed the rank.
        peak_bytes: Peak of the rank's resident memory [bytes].
        cpu_s: CPU time of all threads over the rank's whole life [s].
    """

    rank: int
    code: int
    peak_bytes: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place of a rank in its trial.

    Attributes:
        rank: Number of the rank in the trial.
        local_rank: Number of the rank on its host.
        world_size: Number of ranks of the trial.
        host: Host at which rank 0 listens.
        port: Port at which rank 0 listens.
        listening: File descriptor of that listening socket; None except for rank 0.
        tell: Function that sends a value to the process that runs the trial.
    """

    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    listening: int | None
    tell: Callable[[Any], None]
