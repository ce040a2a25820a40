"""Executor that runs trials in the test's own process step by step, so that they can be stopped half-way."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.studies.in_process_executor import InProcessExecutor
from trials.backend import Observation, Status


@dataclass
class SteppingExecutor(InProcessExecutor):
    """Executor that adds one measured step to every trial at each poll; a trial ends one poll after its last step.

    Attributes:
        running: Final result and number of completed steps of each running trial, by its number.
        ended: Results that the next poll returns.
    """

    running: dict[int, tuple[Observation, int]] = field(default_factory=dict)
    ended: list[tuple[int, Observation]] = field(default_factory=list)

    @property
    def pending(self) -> tuple[int, ...]:
        """Pending trials; a stopped trial is pending until it has been returned."""
        return (*InProcessExecutor.pending.fget(self), *(number for number, _ in self.ended))

    @property
    def reported(self) -> dict[int, tuple[float, ...]]:
        """Step times that each running trial has reported so far [s], by its number."""
        return {number: found.step_times_s[:done] for number, (found, done) in self.running.items()}

    def cancel(self, trial_number: int, reason: str, /) -> None:
        """End a trial as cancelled."""
        if trial_number in self.running:
            self._end(trial_number, Observation(status=Status.CANCELLED, reason=reason))

    def stop(self, trial_number: int, reason: str, /) -> None:
        """Stop a trial, and keep its reported steps as a pruned observation."""
        found, _ = self.running[trial_number]
        steps_s = self.reported[trial_number]
        pruned = Observation(
            status=Status.PRUNED,
            step_times_s=steps_s,
            expected_steps=len(found.step_times_s),
            reason=reason,
            origin=found.origin,
        )
        self._end(trial_number, pruned)

    def poll(self, _timeout_s: float, /) -> list[tuple[int, Observation]]:
        """Advance every trial by one step, and return the ended ones."""
        for number, config in list(self.waiting):
            if number not in self.running:
                self.seen.append((number, config))
                self.running[number] = (self.backend_of(number).measure(config, trial_number=number), 0)
            found, done = self.running[number]
            if done == len(found.step_times_s):
                self._end(number, found)
            else:
                self.running[number] = (found, done + 1)
        ended, self.ended = self.ended, []
        return ended

    def _end(self, number: int, observation: Observation) -> None:
        del self.running[number]
        self.waiting = [(other, config) for other, config in self.waiting if other != number]
        self.ended.append((number, observation))
