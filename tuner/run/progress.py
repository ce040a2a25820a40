"""Progress of a run, for terminals, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodels.job.parallel_config import Value
from tuner.answers.comparison import Comparison
from tuner.answers.reference import Reference
from tuner.forecast.prepared import Prepared
from tuner.run.next_trial import NextTrial
from tuner.run.opening import Opening
from tuner.search.gain import KnownGain
from tuner.search.proxy.extrapolation import Extrapolated
from tuner.search.stopping import StopReason
from tuner.search.waiting import Slots
from tuner.storage.record import TrialRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """Trial that has not ended.

    Attributes:
        number: Number of the trial.
        values: Value of each dimension of its candidate.
        predicted_s: Step time that the cost model predicts for the candidate [s]; None if it is no candidate any more.
        since_s: Time since it was asked for [s].
        steps_s: Times of its steps so far, as far as it reports them [s].
        is_queued: Whether it waits for its devices in a queue.
    """

    number: int
    values: Mapping[str, Value]
    predicted_s: float | None
    since_s: float
    steps_s: tuple[float, ...] = ()
    is_queued: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run, for terminals.

    Attributes:
        done: Number of trials that have ended and count against the budget, those of earlier runs included.
        running: Number of trials in flight, except for those in a queue.
        queued: Number of trials that wait for their devices in a queue.
        slots: Trial slots, and why some are idle.
        budget: Number of trials allowed.
        best: Record of the fastest trial so far.
        ended: Records of the trials that have ended since the progress before, in the order of their ends.
        compared: Configuration that these are told relative to; None where nothing has ended.
        layouts: Candidates of the trials that are running.
        in_flight: Trials that have not ended, in the order of their numbers.
        opening: First trial of the run; only the first progress has it.
        chosen: Trial that has just been asked for, and why; None where none has, or `opening` told of it.
        extrapolated: Answer that proxies suggest.
        p_star: Latest p_star.
        seconds_left: Rest of the budget of time [s]; None without one.
        device_hours_left: Rest of the budget of device-hours; None without one.
        device_hours: Device-hours of all trials that have ended.
        by_status: Number of the trials that have ended, by their status.
        note: Sentence to print once, or empty.
    """

    done: int
    running: int
    queued: int = 0
    slots: Slots = field(default_factory=Slots)
    budget: int
    best: TrialRecord | None = None
    ended: tuple[TrialRecord, ...] = ()
    compared: Comparison | None = None
    layouts: tuple[dict[str, Value], ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    opening: Opening | None = None
    chosen: NextTrial | None = None
    extrapolated: Extrapolated | None = None
    p_star: float = 0.0
    seconds_left: float | None = None
    device_hours_left: float | None = None
    device_hours: float = 0.0
    by_status: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def idle_in_words(self) -> str:
        """Sentence on the idle slots; empty if there are none, or nobody knows why."""
        return self.slots.in_words(self.running + self.queued)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunResult:
    """Result of a run.

    Attributes:
        records: Records of every trial of the study.
        best: Record of the fastest completed trial; None if there is none.
        extrapolated: Answer that proxies suggest, where no trial has completed at full size.
        stop_reason: Reason for the end of the search.
        fails_alike: Numbers of the last trials, if these failed alike and ended the search.
        p_star: Last p_star.
        num_candidates: Number of candidates in the searched space.
        reference: Configuration to compare the best with; None where there is none.
        gain: Gain over that by the posterior, as far as it is known.
        warnings: Sentences that a user should know.
        hosts: Hosts that are there, where the run ended because they have changed; else none.
        prepared: Study with all plans that were made; None if it has none that the caller lacks.
    """

    stop_reason: StopReason
    warnings: tuple[str, ...]
    records: list[TrialRecord] = field(default_factory=list)
    best: TrialRecord | None = None
    extrapolated: Extrapolated | None = None
    fails_alike: tuple[int, ...] = ()
    p_star: float = 0.0
    num_candidates: int = 0
    reference: Reference | None = None
    gain: KnownGain | None = None
    hosts: tuple[int, ...] = ()
    prepared: Prepared | None = None
