"""Executor that runs trials in the test's own process, one per poll, and runs of studies with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import AbstractBackend, Observation, Status
from tuner.run.loop import run_study
from tuner.run.progress import RunResult
from tuner.study_file.request import StudyRequest


@dataclass
class InProcessExecutor:
    """Executor that measures submitted trials in the order of submission.

    Attributes:
        backend: Backend that measures the trials.
        slots: Largest number of pending trials.
        entered: Number of times the context was entered.
        seen: All measured trials, in order.
        reductions: Proxy job of each trial that ran one.
        cancelled: Cancelled trials, which the next poll returns.
    """

    backend: AbstractBackend
    slots: int = 1
    entered: int = 0
    seen: list[tuple[int, ParallelConfig]] = field(default_factory=list)
    slots_note: str = ""
    waiting: list[tuple[int, ParallelConfig]] = field(default_factory=list)
    reductions: dict[int, Reduction] = field(default_factory=dict)
    cancelled: list[tuple[int, Observation]] = field(default_factory=list)

    def __enter__(self) -> InProcessExecutor:
        self.entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drop the pending trials, as killed workers would."""
        self.waiting = []

    @property
    def num_free_slots(self) -> int:
        """Number of trials that may still be submitted."""
        return self.slots - len(self.waiting)

    @property
    def queued(self) -> tuple[int, ...]:
        """No trial, because each runs at once."""
        return ()

    @property
    def reported(self) -> dict[int, tuple[float, ...]]:
        """Empty reports, because each trial is measured in a single poll."""
        return {}

    def stop(self, trial_number: int, _reason: str, /) -> None:
        """Fail, because the loop must not stop a trial without reports."""
        raise AssertionError(f"stopped trial {trial_number}, which has reported nothing")

    def cancel(self, trial_number: int, reason: str, /) -> None:
        """End a pending trial as cancelled."""
        if trial_number in dict(self.waiting):
            self.waiting = [each for each in self.waiting if each[0] != trial_number]
            cancelled = Observation(status=Status.CANCELLED, reason=reason, origin=self.backend.origin)
            self.cancelled.append((trial_number, cancelled))

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the trials that have not been measured."""
        return tuple(number for number, _ in (*self.waiting, *self.cancelled))

    def take(self, backend: AbstractBackend, /) -> None:
        """Measure later trials on another backend."""
        self.backend = backend

    def submit(self, trial_number: int, config: ParallelConfig, reduction: Reduction | None = None, /) -> None:
        """Queue a trial."""
        assert self.num_free_slots, "submitted more trials than there are slots"
        assert trial_number not in self.pending, "submitted a trial that is pending"
        self.waiting.append((trial_number, config))
        if reduction is not None:
            self.reductions[trial_number] = reduction

    def poll(self, _timeout_s: float, /) -> list[tuple[int, Observation]]:
        """Measure the oldest pending trial, and return its result."""
        if self.cancelled or not self.waiting:
            ended, self.cancelled = self.cancelled, []
            return ended
        number, config = self.waiting.pop(0)
        self.seen.append((number, config))
        return [(number, self.backend_of(number).measure(config, trial_number=number))]

    def backend_of(self, number: int) -> AbstractBackend:
        """Return the backend that measures a trial, for its proxy job if it has one."""
        if number not in self.reductions:
            return self.backend
        return self.backend.reduced(self.reductions[number])


def run_here(
    config: StudyRequest, backend: AbstractBackend | None = None, slots: int = 1, **options: object
) -> tuple[RunResult, InProcessExecutor]:
    """Run a study in this process, on another backend than its own if one is given."""
    executor = InProcessExecutor(backend or config.trials.backend, slots)
    return run_study(config, on_progress=lambda _: None, executor=executor, **options), executor
