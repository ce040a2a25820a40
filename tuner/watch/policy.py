"""Decision to change the layout of a running job, without knowledge of what the cluster does next.

A layout that cannot run on is replaced at once. Every other change has to repay its cost within `horizon_s`, and one
of two things has to be true, so that a cluster that flaps does not keep the job restarting:

- The cluster has stood in its present state for `settle_s`.
- The running layout has lost as many steps against the other one as the change costs. The account of lost steps of
  each layout grows while that layout is faster than the running one, shrinks while it is slower, and is never below 0.

The second rule is that of ski rental: who buys when the rents paid equal the price never pays more than twice the
least possible (Karlin, Manasse, Rudolph and Sleator, "Competitive Snoopy Caching", 1988; for sequences of states
Borodin, Linial and Saks, "An Optimal On-line Algorithm for Metrical Task System", 1992). The first rule acts earlier
where the state is likely to last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tuner.replan.cluster_states import Figures, Setup
from tuner.replan.present import Change, Present, change_to
from tuner.replan.replanning import Assumptions

MOST_ACCOUNTS = 64
"""Largest number of layouts with an account of lost steps: the largest accounts are kept."""


class Decision(StrEnum):
    """Answer to a state of the cluster."""

    STAY = "stay"
    SETTLE = "settle"
    CHANGE = "change"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Rules of a decision; each value is an option of `meshtune watch`.

    Attributes:
        settle_s: Time for which a state has to stand before a change [s].
        horizon_s: Time within which a change has to repay its cost [s].
        costs: Assumed costs of a change.
    """

    settle_s: float = 60.0
    horizon_s: float = 3600.0
    costs: Assumptions = field(default_factory=Assumptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Setup that runs, with the steps that it has lost so far.

    Attributes:
        running: Setup that runs; None while the job waits.
        since_s: Time since which it runs or waits [s].
        at_s: Time until which the accounts are kept [s].
        held_until_s: Time before which no change is made that is not forced, after a change was refused [s].
        figures: Latest figures of the running setup; None while the job waits, or if it was never priced.
        lost_steps: Steps that the running setup has lost against each other one, at least 0.
    """

    running: Setup | None
    since_s: float
    at_s: float
    held_until_s: float = 0.0
    figures: Figures | None = None
    lost_steps: Mapping[Setup, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Decision at one time.

    Attributes:
        decision: What to do.
        is_forced: Whether the running setup cannot run on.
        best: Change to the best other setup; None if the running one is the fastest, or if nothing can run.
        pays: Whether the change repays its cost within the horizon; true if it is forced.
        due_s: Time at which the change will be made if nothing happens until then [s]; None without such a time.
    """

    decision: Decision
    is_forced: bool
    best: Change | None
    pays: bool
    due_s: float | None


def keep_accounts(standing: Standing, present: Present, until_s: float) -> Standing:
    """Bring the accounts of lost steps up to a time, until which the cluster stays in its present state."""
    runs = present.figures.get(standing.running) if standing.running is not None else None
    if runs is None:
        return replace(standing, at_s=max(until_s, standing.at_s))
    passed_s = max(until_s - standing.at_s, 0.0)
    lost = {}
    for setup, one in present.figures.items():
        account = standing.lost_steps.get(setup, 0.0) + passed_s * (1 / one.step_time_s - 1 / runs.step_time_s)
        if account > 0 and setup != standing.running:
            lost[setup] = account
    kept = sorted(lost, key=lambda setup: -lost[setup])[:MOST_ACCOUNTS]
    return replace(
        standing, at_s=max(until_s, standing.at_s), figures=runs, lost_steps={setup: lost[setup] for setup in kept}
    )


def decide(standing: Standing, present: Present, now_s: float, rules: Rules, *, is_broken: bool = False) -> Verdict:
    """Decide what to do in the present state of the cluster.

    Args:
        standing: What runs, with its accounts kept until now.
        present: Present state of the cluster.
        now_s: Time [s].
        rules: Rules of the decision.
        is_broken: Whether a host of the running setup was lost since it began, although all are there now: its
            processes are gone, and the same setup may begin again.
    """
    figures = present.figures
    if not figures:
        return Verdict(
            decision=Decision.WAIT, is_forced=standing.running is not None, best=None, pays=False, due_s=None
        )
    runs = figures.get(standing.running) if standing.running is not None and not is_broken else None
    changes = [
        change_to(
            setup,
            present,
            standing.running,
            standing.figures,
            ran_s=max(now_s - standing.since_s, 0.0),
            is_broken=is_broken,
            costs=rules.costs,
        )
        for setup in figures
        if setup != standing.running or is_broken
    ]
    # as `unforeseen_timeline`: the most steps within the horizon, if nothing happens until then
    best = max(changes, key=lambda one: rules.horizon_s / figures[one.setup].step_time_s - one.cost_steps, default=None)
    if runs is None:
        return Verdict(decision=Decision.CHANGE, is_forced=True, best=best, pays=True, due_s=now_s)
    if best is None or all(one.step_time_s >= runs.step_time_s for one in figures.values()):
        return Verdict(decision=Decision.STAY, is_forced=False, best=None, pays=False, due_s=None)
    if best.pays_after_s > rules.horizon_s:
        return Verdict(decision=Decision.STAY, is_forced=False, best=best, pays=False, due_s=None)
    due_s = max(_due_s(standing, present, best, now_s, rules), standing.held_until_s)
    return Verdict(
        decision=Decision.CHANGE if due_s <= now_s else Decision.SETTLE,
        is_forced=False,
        best=best,
        pays=True,
        due_s=max(due_s, now_s),
    )


def _due_s(standing: Standing, present: Present, change: Change, now_s: float, rules: Rules) -> float:
    """Compute the time at which one of the two rules allows a change, if the state lasts [s]."""
    settled_s = present.interval.from_s + rules.settle_s
    missing = change.cost_steps - standing.lost_steps.get(change.setup, 0.0)
    return min(settled_s, now_s + missing / change.gain_steps_per_s)


def changed(standing: Standing, verdict: Verdict, present: Present, now_s: float) -> Standing:
    """Return what stands after a verdict was followed."""
    if verdict.decision == Decision.WAIT:
        return standing if standing.running is None else Standing(running=None, since_s=now_s, at_s=now_s)
    if verdict.decision != Decision.CHANGE or verdict.best is None:
        return standing
    setup = verdict.best.setup
    return Standing(running=setup, since_s=now_s, at_s=now_s, figures=present.figures[setup])


def next_look_s(verdict: Verdict) -> float:
    """Return the time at which the decision changes by itself [s]; inf if it does not."""
    return verdict.due_s if verdict.decision == Decision.SETTLE and verdict.due_s is not None else math.inf
