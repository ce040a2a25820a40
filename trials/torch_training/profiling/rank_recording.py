"""What one rank did in one step: its compute, and its calls of the communication library, in order.

The recording is made by recording.py and replayed by virtual_clock.py; nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.operators.layer_operators import OpKind


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
        kind: What it does, of costmodels.operators.layer_operators.COLLECTIVES.
        message_bytes: Its message, as hardware/collectives.py defines that for each kind [bytes].
        group: On which group.
        ends: Of a SEND_RECV the sender and the receiver, one of which is the rank itself; None for others.
        tag: Of a SEND_RECV; messages from one rank to another arrive in the order in which those of one tag leave.
    """

    call: int
    kind: OpKind
    message_bytes: int
    group: RankGroup
    ends: tuple[int, int] | None = None
    tag: int = 0

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
