"""Interface between the loop of a study and the executor of its trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import AbstractBackend, Observation


class Executor(Protocol):
    """Executor of trials, as the loop uses it; `trials.on_ray.executor.RayExecutor` is the one that users get."""

    @property
    def slots_note(self) -> str:
        """Sentence on why fewer trials than asked for run at once; empty if there is nothing to say."""

    @property
    def num_free_slots(self) -> int:
        """Number of trials that `submit` takes now."""

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the trials that `poll` has not returned yet."""

    @property
    def reported(self) -> Mapping[int, tuple[float, ...]]:
        """Step times that each running trial has measured so far [s], by its number, as of the last `poll`."""

    @property
    def queued(self) -> tuple[int, ...]:
        """Numbers of the trials that wait for their devices in a queue, as of the last `poll`."""

    def take(self, backend: AbstractBackend, /) -> None:
        """Run later trials on another backend of the study; those that run go on as they are."""

    def submit(self, trial_number: int, config: ParallelConfig, reduction: Reduction | None, /) -> None:
        """Start a trial of the study's job, or of a smaller one, on a free slot and return at once."""

    def stop(self, trial_number: int, reason: str, /) -> None:
        """End a running trial as pruned; `poll` returns it."""

    def cancel(self, trial_number: int, reason: str, /) -> None:
        """End a trial that runs or waits as cancelled; `poll` returns it."""

    def poll(self, timeout_s: float, /) -> list[tuple[int, Observation]]:
        """Return the trials that have ended, waiting up to `timeout_s` for the first end or measured step."""
