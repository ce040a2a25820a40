"""Run the trials of a study in this process, for backends that answer at once."""

from __future__ import annotations

from contextlib import nullcontext

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import AbstractBackend, Observation
from tuner.run.loop import run_study
from tuner.run.progress import RunResult
from tuner.study_file.request import StudyRequest


class _Here:
    """Executor with one slot, which measures a trial when it is polled."""

    slots_note = ""
    queued: tuple[int, ...] = ()

    def __init__(self, backend: AbstractBackend) -> None:
        self._backend = backend
        self._waiting: list[tuple[int, ParallelConfig, Reduction | None]] = []

    @property
    def num_free_slots(self) -> int:
        """One slot, unless a trial waits."""
        return 1 - len(self._waiting)

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the trials that wait."""
        return tuple(number for number, _, _ in self._waiting)

    @property
    def reported(self) -> dict[int, tuple[float, ...]]:
        """No steps: a trial is measured at once."""
        return {}

    def submit(self, trial_number: int, config: ParallelConfig, reduction: Reduction | None, /) -> None:
        """Let a trial wait."""
        self._waiting.append((trial_number, config, reduction))

    def stop(self, trial_number: int, reason: str, /) -> None:
        """Do nothing: no trial is under way between two polls."""

    def poll(self, timeout_s: float, /) -> list[tuple[int, Observation]]:  # noqa: ARG002 # the contract's
        """Measure the trial that waits."""
        waiting, self._waiting = self._waiting, []
        return [
            (number, self._of(reduction).measure(config, trial_number=number)) for number, config, reduction in waiting
        ]

    def _of(self, reduction: Reduction | None) -> AbstractBackend:
        return self._backend if reduction is None else self._backend.reduced(reduction)


def run_here(config: StudyRequest) -> RunResult:
    """Run a study's trials one after the other in this process."""
    return run_study(config, executor=nullcontext(_Here(config.trials.backend)))
