"""Ends of a run and of its trials: reasons to stop, and trials that end early, by budgets or because they are slow."""

from __future__ import annotations

from dataclasses import dataclass

from trials.backend import Observation, Status
from tuner.run.driver import interrupts_held
from tuner.run.executor import Executor
from tuner.run.ledger import Ledger
from tuner.run.spending import HARD_BUDGETS, Spending
from tuner.run.tasks import Asked
from tuner.search.pruning import StepReports
from tuner.search.stopping import Budgets, StopReason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunBudgets:
    """Budgets of a run, with the other reasons to end it or one of its trials.

    Attributes:
        ledger: Trials of the study.
        spending: Budgets of the study, and what the trials in flight take of them.
        reports: First steps of trials in flight, which end those that are clearly slower; None if none are ended.
    """

    ledger: Ledger
    spending: Spending
    reports: StepReports | None

    def left(self, elapsed_s: float) -> Budgets:
        """Return the rest of all budgets, `elapsed_s` after the start [s]."""
        return self.spending.left(elapsed_s, self.ledger.trials.device_s)

    def reason_to_stop(self, elapsed_s: float) -> StopReason | None:
        """Return the reason to ask for no further trial, or None; confidence waits for the trials in flight."""
        if self.ledger.fails_alike:
            return StopReason.FAILS_ALIKE
        if self.spending.used_up is not None:
            return self.spending.used_up
        return self.ledger.tasks.sampler.decide(self.ledger.trials.observations(), self.left(elapsed_s)).reason

    def allowed(self, todo: list[Asked], reason: StopReason | None) -> list[Asked]:
        """Return the trials that are to run again: none once a budget is spent, which cancels them."""
        if reason is None or reason not in HARD_BUDGETS:
            return todo
        origin = self.ledger.tasks.prepared.request.trials.backend.origin
        with interrupts_held():
            for number, _, _ in todo:
                cancelled = Observation(status=Status.CANCELLED, reason=reason.sentence, origin=origin)
                self.ledger.record(number, cancelled)
        return []

    def end_early(self, running: Executor, elapsed_s: float) -> None:
        """End running trials that are clearly slower than the best, and all of them once a budget is spent."""
        trials, reported = self.ledger.trials, running.reported
        if self.reports is not None and any(reported.values()):
            known = {number: trials[number] for number in reported}
            hopeless = self.reports.hopeless(reported, known, trials.best_trial, self.ledger.claim.together)
            for number, reason in hopeless.items():
                running.stop(number, reason)
        self.spending.look(running, elapsed_s, trials.device_s, self._devices_of)
        if self.spending.used_up is not None:
            for number in running.pending:
                running.cancel(number, self.spending.used_up.sentence)

    def _devices_of(self, number: int) -> int:
        """Return how many devices a trial in flight occupies."""
        return self.ledger.tasks.num_devices(self.ledger.live[number])
