"""Pruner for Optuna that stops a trial after its first measured steps where it is clearly slower than the best.

The rule compares logs, because the spread of step times grows with them. A trial with k measured steps is stopped if

    log(m / m_best)  >  log(1 + margin) + t * s * sqrt(pi / 2 * (1 / k + 1 / n)).

m is the median of its steps, the lower one of two, so that one slow step never stops a trial. m_best is the value of
the best completed trial, n the number of its reported steps. s is the standard deviation of log step times, pooled over
both trials, each around its own mean. A median of k normal values has a variance near pi / 2 * s**2 / k (Cramer 1946,
section 28.5), and t is the quantile of Student's t at 1 - risk for the k + n - 2 degrees of freedom of s: with two
known steps it demands much, with seven little. So a look stops a trial that is as fast as the best with a probability
below `risk`, if nothing but the noise of its steps tells them apart. The margin covers effects that all steps of a
trial share: the first steps after the warm-up are often a little slow, and one configuration runs a few percent faster
on one day than on another.

In anybody's own loop:

    study = optuna.create_study(pruner=ClearlySlowerPruner())

    def objective(trial):
        for step, step_time_s in enumerate(steps_of(trial), start=1):
            trial.report(step_time_s, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return median of the steps
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
from optuna import Study
from optuna.pruners import BasePruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import stdtrit

from costmodels.job.parallel_config import Value
from tuner.search.optuna_inside import storage_of, trial_id_of
from tuner.search.parameters import named_values, params_of
from tuner.search.proxy.proxy_trials import PROXY

MARGIN = 0.1
"""Relative slowness beyond the noise of its steps that a trial must have (assumed: runs of one configuration on one
cluster differ by a few percent, and their first steps are a few percent slow)."""

RISK = 0.01
"""Probability that one look stops a trial which is as fast as the best, if nothing but noise tells them apart."""

MIN_STEPS = 2
"""Number of measured steps before which no trial is stopped."""

MAX_REPORTS = 5
"""Number of steps of a trial that are reported to the study: each is a commit, and the first ones decide."""


class ClearlySlowerPruner(BasePruner):
    """Pruner of trials whose reported step times are clearly slower than those of the best completed trial.

    A trial reports one value per measured step, in seconds; its own value is a step time too, such as their median. The
    first trial of a study is never pruned, because others are compared with it.

    Args:
        margin: Relative slowness beyond the noise that a trial must have.
        risk: Probability that one look prunes a trial that is as fast as the best.
        min_steps: Number of reported steps before which no trial is pruned.
        current: Parameters of the current configuration, whose trial is never pruned either.
    """

    def __init__(
        self,
        *,
        margin: float = MARGIN,
        risk: float = RISK,
        min_steps: int = MIN_STEPS,
        current: Mapping[str, Value] | None = None,
    ) -> None:
        if not margin >= 0:
            raise ValueError(f"`margin` must be at least 0, but got {margin}.")
        if not 0 < risk < 1:
            raise ValueError(f"`risk` must be between 0 and 1, but got {risk}.")
        if min_steps < 1:
            raise ValueError(f"`min_steps` must be at least 1, but got {min_steps}.")
        self._margin = margin
        self._risk = risk
        self._min_steps = min_steps
        self._current = current

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether Optuna should prune a trial; see `Trial.should_prune`."""
        if study.directions != [StudyDirection.MINIMIZE]:
            raise ValueError(f"`study` must minimize one value, the step time, but got {study.directions}.")
        steps_s = reported_steps(trial)
        if not all(step_s > 0 for step_s in steps_s):
            raise ValueError(f"`trial` must report step times above 0, but got {steps_s}.")
        return self.prunes(trial, best_among(study.get_trials(deepcopy=False)))

    def prunes(self, trial: FrozenTrial, best: FrozenTrial | None) -> bool:
        """Return whether a trial's reported steps are clearly slower than the best completed trial, if there is one."""
        steps_s = reported_steps(trial)
        if best is None or best.value is None or self._is_kept(trial) or len(steps_s) < self._min_steps:
            return False
        return is_clearly_slower(steps_s, best.value, reported_steps(best), margin=self._margin, risk=self._risk)

    def _is_kept(self, trial: FrozenTrial) -> bool:
        return trial.number == 0 or (
            self._current is not None and named_values(trial.params, self._current) == params_of(self._current)
        )


def reported_steps(trial: FrozenTrial) -> list[float]:
    """Return the step times that a trial has reported, in their order [s]."""
    return [value for _, value in sorted(trial.intermediate_values.items())]


def best_among(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the completed trial with the smallest value; None before the first."""
    completed = [trial for trial in trials if trial.state == TrialState.COMPLETE and len(trial.values or ()) == 1]
    return min(completed, key=lambda trial: (trial.value, trial.number), default=None)


def is_clearly_slower(
    steps_s: Sequence[float],
    best_s: float,
    best_steps_s: Sequence[float],
    *,
    margin: float = MARGIN,
    risk: float = RISK,
) -> bool:
    """Return whether the rule at the top of this file stops a trial.

    Args:
        steps_s: Measured steps of the trial, at least one [k].
        best_s: Step time of the best trial.
        best_steps_s: Known steps of the best trial [n]; may be empty.
        margin: Relative slowness beyond the noise that the trial must have.
        risk: Probability of a wrong yes by noise alone.
    """
    num_steps, num_best = len(steps_s), max(len(best_steps_s), 1)
    freedom = num_steps + num_best - 2
    if freedom < 1:
        return False  # nothing tells how noisy steps are
    logs = [np.log(steps) for steps in (steps_s, best_steps_s) if len(steps)]
    # pooled standard deviation s of log steps, each trial around its own mean
    spread = np.sqrt(sum(float(np.sum((log - log.mean()) ** 2)) for log in logs) / freedom)
    # t * s * sqrt(pi / 2 * (1 / k + 1 / n))
    noise = stdtrit(freedom, 1 - risk) * spread * np.sqrt(np.pi / 2 * (1 / num_steps + 1 / num_best))
    return bool(np.log(statistics.median_low(steps_s) / best_s) > np.log1p(margin) + noise)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepReports:
    """Reports of the steps of running trials to a study, and the pruner that is asked which of them to stop.

    Attributes:
        study: Study that keeps the reports.
        pruner: Pruner that decides which trials to stop.
        seen: Number of steps and best step time at the last look, by running trial; an equal state is not looked at
            again.
    """

    study: Study
    pruner: ClearlySlowerPruner
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def hopeless(
        self,
        running: Mapping[int, tuple[float, ...]],
        known: Mapping[int, FrozenTrial],
        best: FrozenTrial | None,
        together: Callable[[], AbstractContextManager[None]],
    ) -> dict[int, str]:
        """Return the trials to stop, with the reason, by number.

        Args:
            running: Step times that each running trial has measured so far, by number [s]. Those of a trial that runs
                again, after its driver or its worker died, replace those reported before.
            known: Running trials by number; they hold the reported values afterwards.
            best: Best completed trial; see `best_among`.
            together: Context in which all writes become durable together.
        """
        best_s = best.value if best is not None and best.value is not None else 0.0
        states = {number: (len(steps_s), best_s) for number, steps_s in running.items() if steps_s}
        changed = [number for number, state in states.items() if self.seen.get(number) != state]
        if not changed:
            return {}
        at_full_size = [number for number in changed if PROXY not in known[number].user_attrs]
        with together():  # a proxy's steps are those of a smaller job
            for number in at_full_size:
                self._report(known[number], running[number])
        self.seen.update((number, states[number]) for number in changed)
        reasons = {}
        for number in at_full_size:
            steps_s = running[number]
            trial = copy.copy(known[number])
            trial.intermediate_values = dict(enumerate(steps_s, start=1))
            if self.pruner.prunes(trial, best):
                reasons[number] = (
                    f"clearly slower than the best: {statistics.median(steps_s):.4g} s in the median of its first "
                    f"{len(steps_s)} steps, {statistics.median(steps_s) / best_s:.2f} times the best's {best_s:.4g} s"
                )
        return reasons

    def _report(self, trial: FrozenTrial, steps_s: Sequence[float]) -> None:
        reported, _ = self.seen.get(trial.number, (0, 0.0))
        if len(steps_s) < reported:
            reported = 0  # it runs again
        for step, step_time_s in enumerate(steps_s[:MAX_REPORTS], start=1):
            if step > reported:
                storage_of(self.study).set_trial_intermediate_value(trial_id_of(trial), step, step_time_s)
                trial.intermediate_values[step] = step_time_s
