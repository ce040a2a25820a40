"""Reporter of a run: what it tells terminals of its progress, and what the study keeps of its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime

from optuna.trial import FrozenTrial

from hardware.time_units import HOUR_S
from tuner.answers.comparison import comparison_of
from tuner.run.budgets import RunBudgets
from tuner.run.executor import Executor
from tuner.run.next_trial import NextTrial
from tuner.run.opening import Opening, Why, reason_for
from tuner.run.progress import InFlight, Progress
from tuner.run.tasks import Asked
from tuner.search.parameters import values_of
from tuner.search.population import P_STAR
from tuner.search.proxy.extrapolation import extrapolated_of
from tuner.search.pruning import reported_steps
from tuner.search.stopping import StopReason
from tuner.search.waiting import SLOTS, Slots
from tuner.storage.record import TrialRecord


class Reporter:
    """Reporter of a run.

    Args:
        budgets: Budgets of the run, with the trials of the study.
        on_progress: Function that is told the progress.
    """

    def __init__(self, budgets: RunBudgets, on_progress: Callable[[Progress], None]) -> None:
        self._budgets, self._ledger = budgets, budgets.ledger
        self._on_progress = on_progress
        self._slots = Slots()
        self._opened: int | None = None

    def look_at_slots(self, running: Executor, reason: StopReason | None) -> None:
        """Note how many slots there are, and why some are idle: for `reason`, or because the sampler waits."""
        idle = running.num_free_slots
        why = ""
        if idle and running.pending:
            waits = self._ledger.tasks.sampler.waits
            why = reason.sentence if reason else waits(self._ledger.trials.observations()) or ""
        now = Slots(count=idle + len(running.pending), why=why)
        if now != self._slots:
            self._slots = now
            self._ledger.keep({SLOTS: asdict(now)})

    def opening(self, todo: Sequence[Asked]) -> Opening:
        """Return the trial that comes first: the first one of `todo`, or else the sampler's choice."""
        ledger, sampler = self._ledger, self._ledger.tasks.sampler
        choices, observations = sampler.choices, ledger.trials.observations()
        if todo:
            task = ledger.live[todo[0][0]]
            assert task.position is not None, "only trials with a candidate run again"
            position, why, proxy = task.position, Why.LEFT_OVER, task.proxy
        else:
            position = sampler.choose(observations)
            why = reason_for(position, choices.values(position), sampler, observations, ledger.reference)
            proxy = sampler.proxy_for(observations, position)
        self._opened = position
        predicted_s = ledger.tasks.predicted_s(position)
        return Opening(values=choices.values(position), why=why, predicted_s=predicted_s, is_proxy=proxy is not None)

    def next_trial(self, number: int) -> NextTrial | None:
        """Return a trial that was just asked for, and why; None for the first one, of which `opening` tells."""
        ledger, sampler = self._ledger, self._ledger.tasks.sampler
        task, opened = ledger.live[number], self._opened
        self._opened = None
        if task.position is None or task.position == opened:
            return None
        return NextTrial(
            number=number,
            values=sampler.choices.values(task.position),
            is_proxy=task.proxy is not None,
            prospect=sampler.prospect(ledger.trials.observations(), task.position),
        )

    def _in_flight(self, trial: FrozenTrial, *, is_queued: bool) -> InFlight:
        """Return a trial that has not ended, with what is known of it."""
        task = self._ledger.live.get(trial.number)
        position = None if task is None else task.position
        since = trial.datetime_start
        return InFlight(
            number=trial.number,
            values=values_of(trial),
            predicted_s=None if position is None else self._ledger.tasks.predicted_s(position),
            since_s=0.0 if since is None else max((datetime.now() - since).total_seconds(), 0.0),
            steps_s=tuple(reported_steps(trial)),
            is_queued=is_queued,
        )

    def tell(
        self,
        elapsed_s: float,
        *,
        note: str = "",
        opening: Opening | None = None,
        chosen: NextTrial | None = None,
        ended: tuple[TrialRecord, ...] = (),
        queued: tuple[int, ...] = (),
    ) -> None:
        """Tell the progress of the run, `elapsed_s` after its start [s], with what has not been told yet."""
        trials, attributes, left = self._ledger.trials, self._ledger.study.user_attrs, self._budgets.left(elapsed_s)
        reference = self._ledger.reference
        in_flight = [trial for trial in trials.running if trials.has_candidate(trial)]
        running = [trial for trial in in_flight if trial.number not in queued]
        compared = None
        if ended:
            alike = trials.records_to_compare(None if reference is None else reference.values)
            compared = comparison_of(reference, alike)
        self._on_progress(
            Progress(
                done=trials.num_counted,
                running=len(running),
                queued=len(in_flight) - len(running),
                slots=self._slots,
                budget=self._ledger.tasks.prepared.request.search.max_trials,
                best=trials.best,
                ended=ended,
                compared=compared,
                layouts=tuple(values_of(trial) for trial in running),
                in_flight=tuple(self._in_flight(trial, is_queued=trial.number in queued) for trial in in_flight),
                opening=opening,
                chosen=chosen,
                extrapolated=extrapolated_of(attributes),
                p_star=float(attributes.get(P_STAR, 0.0)),
                seconds_left=left.seconds_left,
                device_hours_left=left.device_hours_left,
                device_hours=trials.device_s / HOUR_S,
                by_status=dict(trials.by_status),
                note=note,
            )
        )
