"""What one rank did in one step: its compute, and its calls of the communication library, in order.

The recording is made by recording.py and replayed by virtual_clock.py; nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.operators import OpKind


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """A group of ranks that communicate.

    Attributes:
        name: What the ranks call it, all of them the same; two groups of the same ranks have two names.
        ranks: Its members, by their numbers in the trial.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The rank computed between two calls.

    Attributes:
        cpu_s: CPU time of its main thread [s].
    """

    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """The rank issued a call.

    Attributes:
        call: Number of the call in this step of this rank, from 0.
        kind: What it does, of costmodels.operators.COLLECTIVES.
        message_bytes: Its message, as hardware/collectives.py defines that for each kind [bytes].
        group: On which group.
        ends: Of a SEND_RECV the sender and the receiver, one of which is the rank itself; None for others.
        tag: Of a SEND_RECV; messages from one rank to another arrive in the order in which those of one tag leave.
        after: An earlier call of the rank that must have ended before this one begins, besides those on its group.
    """

    call: int
    kind: OpKind
    message_bytes: int
    group: RankGroup
    ends: tuple[int, int] | None = None
    tag: int = 0
    after: int | None = None

    def __post_init__(self) -> None:
        assert (self.ends is None) == (self.kind != OpKind.SEND_RECV), "one message has two ends, others have a group"


@dataclass(frozen=True, kw_only=True, slots=True)
class Waited:
    """The rank needed what a call brings, and waited until it was there.

    Attributes:
        call: Number of the call.
    """

    call: int


Event = Computed | Issued | Waited


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecording:
    """One step of one rank.

    Attributes:
        rank: Its number.
        events: In order; compute stands before, between and after the calls and waits, even where it took no time.
    """

    rank: int
    events: tuple[Event, ...]

    @property
    def busy_s(self) -> float:
        """What it computed in all [s of CPU]."""
        return sum(event.cpu_s for event in self.events if isinstance(event, Computed))


def median_recording(steps: Sequence[RankRecording]) -> RankRecording:
    """One step that stands for several of one rank: between any two calls the median of what they computed.

    Other work on a busy machine slows down now this stretch of a step and now that one (caches, memory, clock rate);
    the median of each is closer to a quiet machine than the median step is.

    Raises:
        ValueError: the steps made other calls.
    """
    assert steps, "somebody recorded a step"
    first = steps[0]
    assert all(step.rank == first.rank for step in steps), "the steps are those of one rank"
    calls = _without_times(first)
    for number, step in enumerate(steps):
        if _without_times(step) != calls:
            raise ValueError(
                f"rank {first.rank} made other calls in step {number} than in step 0; "
                f"the first that differs is {_first_difference(calls, _without_times(step))}. Record steady steps only"
            )
    return RankRecording(
        rank=first.rank,
        events=tuple(
            Computed(cpu_s=statistics.median(_cpu_s(step.events[at]) for step in steps))
            if isinstance(event, Computed)
            else event
            for at, event in enumerate(first.events)
        ),
    )


def _without_times(step: RankRecording) -> list[Issued | Waited | None]:
    """What it did; None where it computed."""
    return [None if isinstance(event, Computed) else event for event in step.events]


def _cpu_s(event: Event) -> float:
    assert isinstance(event, Computed), "the steps agree in where they computed"
    return event.cpu_s


def _first_difference(calls: Sequence[Issued | Waited | None], others: Sequence[Issued | Waited | None]) -> str:
    for call, other in zip(calls, others, strict=False):
        if call != other:
            return f"{other}, not {call}"
    return f"the end after {min(len(calls), len(others))} events, not {max(len(calls), len(others))}"
