"""Decision to end a search: one function of the observations, the posterior and the budgets, and its words.

The driver of a study asks with its budgets, and `ThompsonSampler` asks without any, for `study.optimize`. Three things
settle a search: nothing faster is likely to be left, the trials that follow the proxies are spent, or every candidate
has been tried. A settled search replicates its closest candidates before it ends, unless a budget is spent. A search
in which nothing has ever run, and all fails alike, is ended by the driver of its study (tuner/run/alike_failures.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tuner.search.observations import Observations
from tuner.search.population import Population
from tuner.search.proxy.proxy_plan import ProxyPlan
from tuner.search.replication import next_replication


class StopReason(StrEnum):
    """Reason for the end of a search. The value is the word in JSON, `sentence` the words for people."""

    CONFIDENT = "confident"
    TRIALS = "max_trials"
    FULL_TRIALS = "full_trials"
    MINUTES = "max_minutes"
    DEVICE_HOURS = "budget_device_hours"
    EXHAUSTED = "exhausted"
    FAILS_ALIKE = "fails_alike"
    INTERRUPTED = "interrupted"
    HOSTS = "hosts_changed"

    @classmethod
    def _missing_(cls, value: object) -> StopReason | None:
        """Return the reason that earlier versions stored under another word, or one that only a newer version knows."""
        if value == "max_seconds":
            return cls.MINUTES
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown

    @property
    def sentence(self) -> str:
        """Sentence for reports and terminals."""
        return _SENTENCES.get(self, f"{self.value} (a word of another version of Meshtune)")


_SENTENCES = {
    StopReason.CONFIDENT: "nothing faster is likely to be left",
    StopReason.TRIALS: "the budget of trials is spent",
    StopReason.FULL_TRIALS: "the trials at full size that follow the proxies are spent",
    StopReason.MINUTES: "the budget of time is spent",
    StopReason.DEVICE_HOURS: "the budget of device-hours is spent",
    StopReason.EXHAUSTED: "every candidate has been tried",
    StopReason.FAILS_ALIKE: "the command fails whatever the layout",
    StopReason.INTERRUPTED: "interrupted; the same command continues",
    StopReason.HOSTS: "hosts were lost or came back; it goes on with those that are there",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Budgets of a study and the rest of them; None where there is no such budget.

    Attributes:
        max_trials: Number of trials that may be asked for, in all runs of the study together.
        seconds_left: Wall time that is left [s].
        device_hours_left: Device-hours that are left.
    """

    max_trials: int | None = None
    seconds_left: float | None = None
    device_hours_left: float | None = None


NO_BUDGETS = Budgets()
"""Budgets of a loop that keeps its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StopRule:
    """Options of a search that decide when it ends.

    Attributes:
        num_candidates: Number of candidates of the search.
        confidence: Probability eta that p_star must exceed.
        tolerance: Relative difference of step times that nobody pays trials for.
        repeats: Number of further trials of each close candidate.
        proxies: Plan of the proxy trials; None where every trial runs at full size.
    """

    num_candidates: int
    confidence: float
    tolerance: float
    repeats: int
    proxies: ProxyPlan | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StopDecision:
    """Decision at one moment of a search.

    Attributes:
        reason: Reason to ask for no further trial; None while the search goes on.
        settled: Reason for which nothing new is worth a trial; None while something is.
        replicate: Position of the candidate to measure again before a settled search ends; None where the best is
            clear.
    """

    reason: StopReason | None
    settled: StopReason | None
    replicate: int | None


def decide(
    observations: Observations, population: Population, rule: StopRule, budgets: Budgets = NO_BUDGETS
) -> StopDecision:
    """Return whether a search ends, for which reason, and which candidate it measures again before.

    Args:
        observations: Observations of the study.
        population: Draws from the posterior after them.
        rule: Options of the search.
        budgets: Budgets of the study.
    """
    settled = _find_settled(observations, population, rule)
    replicate = next_replication(observations, rule.tolerance, rule.repeats) if settled and rule.repeats else None
    spent = _find_spent_budget(observations, budgets)
    if settled is StopReason.CONFIDENT and (spent or replicate is None):
        reason: StopReason | None = settled
    elif spent is not None:
        reason = spent
    else:
        reason = settled if replicate is None else None
    return StopDecision(reason=reason, settled=settled, replicate=replicate)


def _find_settled(observations: Observations, population: Population, rule: StopRule) -> StopReason | None:
    """Return the reason for which nothing new is worth a trial; None while something is."""
    if len(observations.measured) and population.p_star > rule.confidence:  # FlexParallel 3.3
        return StopReason.CONFIDENT
    if rule.proxies is not None and rule.proxies.is_spent(observations, population.fastest):
        return StopReason.FULL_TRIALS
    return StopReason.EXHAUSTED if len(observations.closed) >= rule.num_candidates else None


def _find_spent_budget(observations: Observations, budgets: Budgets) -> StopReason | None:
    """Return the first budget of which nothing is left, if there is one."""
    if budgets.max_trials is not None and observations.num_decisions >= budgets.max_trials:
        return StopReason.TRIALS
    if budgets.seconds_left is not None and budgets.seconds_left <= 0:
        return StopReason.MINUTES
    if budgets.device_hours_left is not None and budgets.device_hours_left <= 0:
        return StopReason.DEVICE_HOURS
    return None
