"""Recording of one rank in one step: its compute and its calls of the communication library, in order.

recording.py makes the recording and virtual_clock.py replays it. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.blocks.operator import OpKind


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """A group of ranks that communicate.

    Attributes:
        name: Name of the group, equal on all its ranks; two groups of the same ranks have different names.
        ranks: Numbers of its members in the trial.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """Compute of the rank between two calls.

    Attributes:
        cpu_s: CPU time of the rank's main thread [s].
    """

    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """Start of a call by the rank.

    Attributes:
        call: Number of the call in this step of this rank, from 0.
        kind: Kind of the call, one of costmodels.operators.layer_operators.COLLECTIVES.
        message_bytes: Size of its message, as hardware/collectives.py defines it for each kind [bytes].
        group: Group on which the call runs.
        ends: Sender and receiver of a SEND_RECV, one of which is the rank itself; None for other kinds.
        tag: Tag of a SEND_RECV; messages of one tag between two ranks arrive in the order of sending.
    """

    call: int
    kind: OpKind
    message_bytes: int
    group: RankGroup
    ends: tuple[int, int] | None = None
    tag: int = 0

    def __post_init__(self) -> None:
        assert (self.ends is None) == (self.kind != OpKind.SEND_RECV), (
            "a SEND_RECV needs two ends, and only a SEND_RECV has them"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Waited:
    """Wait of the rank for the result of a call.

    Attributes:
        call: Number of the call.
    """

    call: int


Event = Computed | Issued | Waited


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecording:
    """One step of one rank.

    Attributes:
        rank: Number of the rank.
        events: Events in order; compute stands before, between and after calls and waits, even if it took no time.
    """

    rank: int
    events: tuple[Event, ...]

    @property
    def busy_s(self) -> float:
        """Total compute time of the rank [s of CPU]."""
        return sum(event.cpu_s for event in self.events if isinstance(event, Computed))
