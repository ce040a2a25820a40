"""Follow a cluster through whole days with the policy of `meshtune watch`, and compare it with other ways.

    python -m benchmarks.judges.watched_day [--days 12] [--first-seed 0] [--trials 8] [--restart 120 900] [--json]

The first day is configs/traces/dgx-h100-8-day.csv; the others are random, with about 20 events each, by
seed. The study is configs/studies/llama3-8b-dgx-h100.yaml after some trials. Decisions use the predictions of the
tuner, which the trials have corrected. Steps are counted with the step times of the simulated world that the trials
came from. A change costs the assumed times of `meshtune replan`, work lost with a host included. The ways are:

- watch: the policy, which sees each event when it happens.
- staying: the study's best layout, which waits while hosts are lost, or goes on with less data parallelism if they
  never return.
- always: a change to the layout that is predicted fastest at each event, whatever it costs.
- replan: the plan of `meshtune replan`, which knows the day's events beforehand, but not the world's step times.
- clairvoyant: the best timeline, which knows both; its choices are made at events, as those of `replan`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.here import run_here
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from costmodels.job.parallel_config import ConfigGrid
from hardware.dynamics import HostEvent, Interval, LinkEvent, Trace
from hardware.trace_file import read_trace
from trials.simulated.backend import SimulatedBackend
from tuner.answers.best import best_known
from tuner.replan.cluster_states import Course, Figures, Pricing, Setup, cluster_of, options_over
from tuner.replan.present import Change, Present, change_to
from tuner.replan.replanning import DEFAULTS, Assumptions, PricedCourse, course_of, find_stored, stays
from tuner.replan.timeline import best_timeline, steps_of
from tuner.run.studies import prepared_of
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest
from tuner.watch.policy import Decision, Rules, Standing, Verdict, changed, decide, keep_accounts

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "configs" / "studies" / "llama3-8b-dgx-h100.yaml"
DAY = ROOT / "configs" / "traces" / "dgx-h100-8-day.csv"
DAY_S = 86_400.0
INCIDENTS = 10
"""Number of incidents of a random day; each begins and ends with an event."""

Choose = Callable[[Standing, Present, float], Verdict]
"""Way to decide: it is given what runs, the present state by the tuner's predictions, and the time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the ways on all days, and return the exit status."""
    parser = benchmark_parser("judges.watched_day", __doc__)
    parser.add_argument("--days", type=count_at_least(0), default=12, help="random days (12)")
    parser.add_argument("--first-seed", type=count_at_least(0), default=0, help="seed of the first random day (0)")
    parser.add_argument("--trials", type=count_at_least(0), default=8, help="trials of the study before the days (8)")
    parser.add_argument("--settle", type=float, nargs="+", default=[Rules().settle_s], help="values of --settle [s]")
    parser.add_argument("--horizon", type=float, nargs="+", default=[Rules().horizon_s], help="values of --horizon [s]")
    parser.add_argument(
        "--restart", type=float, nargs="+", default=[120.0, 900.0], help="--switch-restart [s] (120 900)"
    )
    return answer("watched_day", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    rules = [
        Rules(settle_s=settle, horizon_s=horizon, costs=replace(DEFAULTS, restart_s=restart))
        for restart in given.restart
        for settle in given.settle
        for horizon in given.horizon
    ]
    with tempfile.TemporaryDirectory(prefix="meshtune-") as folder:
        config = load_study(
            STUDY, overrides=[f"search.max_trials={max(given.trials, 1)}"], storage=f"sqlite:///{folder}/study.db"
        )
        if given.trials:
            run_here(config)
        pricing = Pricing(prepared_of(config))
        days = {"20 events": read_trace(DAY, pricing.nominal)} | {
            f"seed {seed}": random_day(pricing.nominal.num_hosts, np.random.default_rng(seed))
            for seed in range(given.first_seed, given.first_seed + given.days)
        }
        rows = []
        for name, trace in days.items():
            tell(name)
            rows += [{"day": name, "events": len(trace.events), **one} for one in _compare(pricing, trace, rules)]
    random = [row for row in rows if row["day"] != "20 events"]
    return {
        "tokens_per_step": config.problem.setting.job.tokens_per_step,
        "days": rows,
        "random": _summary(random, rules),
    }


def random_day(num_hosts: int, rng: np.random.Generator) -> Trace:
    """Draw a day: hosts that fail, NICs that slow down or flap, and a network that others load (assumed)."""
    events: list[HostEvent | LinkEvent] = []
    free_s = dict.fromkeys(range(num_hosts), 0.0)
    network_free_s = 0.0
    begins = np.sort(rng.uniform(600.0, DAY_S - 600.0, INCIDENTS))
    for begin_s in begins.tolist():
        kind = rng.choice(["lost", "slow", "flap", "load"], p=[0.3, 0.25, 0.15, 0.3])
        lasts_s = float(np.exp(rng.normal(math.log(2400.0), 1.0)))
        host = int(rng.integers(num_hosts))
        share = float(np.round(rng.uniform(0.1, 0.7), 2))
        if kind == "load" and network_free_s < begin_s:
            network_free_s = begin_s + lasts_s
            events += [LinkEvent(time_s=begin_s, link="inter", share=share)]
            events += [LinkEvent(time_s=network_free_s, link="inter", share=1.0)]
        elif kind != "load" and free_s[host] < begin_s:
            drops = int(rng.integers(2, 5)) if kind == "flap" else 1
            for drop in range(drops):
                from_s = begin_s + drop * 480.0
                free_s[host] = from_s + (float(rng.uniform(30, 300)) if kind == "flap" else lasts_s)
                if kind == "lost":
                    events += [HostEvent(time_s=from_s, host=host, is_lost=True)]
                    events += [HostEvent(time_s=free_s[host], host=host, is_lost=False)]
                else:
                    events += [LinkEvent(time_s=from_s, link=(host,), share=share)]
                    events += [LinkEvent(time_s=free_s[host], link=(host,), share=1.0)]
    return Trace(events=tuple(sorted((one for one in events if one.time_s < DAY_S), key=lambda one: one.time_s)))


def _compare(pricing: Pricing, trace: Trace, rules: Sequence[Rules]) -> list[dict[str, Any]]:
    """Compare the ways on one day."""
    prepared, config = pricing.prepared, pricing.prepared.request
    course = course_of(prepared.problem, trace, DAY_S)
    study = find_stored(config)
    best = best_known(prepared, study)
    assert best is not None, "the study has an answer"
    staying = stays(pricing, course, best.config)
    besides = [setup for setup in dict.fromkeys(staying) if setup is not None]
    options = options_over(pricing, [course], besides, study)
    believed = [
        Present(
            interval=interval,
            figures={options.setups[at]: one for at, one in figures.items()},
            num_trials=options.num_trials,
        )
        for interval, figures in zip(course.intervals, options.figures[0], strict=True)
    ]
    true = [_in_the_world(config, course, present) for present in believed]
    worldly = replace(
        options,
        figures=(
            tuple(
                {at: present.figures[options.setups[at]] for at in figures}
                for present, figures in zip(true, options.figures[0], strict=True)
            ),
        ),
    )
    first = Setup(hosts=pricing.all_hosts, config=best.config)
    rows = []
    for rule in rules:
        planned, known = (PricedCourse(course, figures, 0, rule.costs) for figures in (options, worldly))
        followed = _follow(believed, true, first, rule.costs, lambda *seen, rule=rule: decide(*seen, rule))
        changing = _follow(believed, true, first, rule.costs, lambda *seen, rule=rule: _always(*seen, rule.costs))
        ways = {
            "watch": followed.steps,
            "staying": steps_of(known.choices, known.places(staying)).sum(),
            "always": changing.steps,
            "replan": steps_of(known.choices, best_timeline(planned.choices)).sum(),
            "clairvoyant": steps_of(known.choices, best_timeline(known.choices)).sum(),
        }
        rows.append(
            {
                **_named(rule),
                **{name: round(float(steps), 1) for name, steps in ways.items()},
                "changes": followed.changes,
                "forced": followed.forced,
                "changes_always": changing.changes,
            }
        )
    return rows


def _named(rule: Rules) -> dict[str, float]:
    return {"restart_s": rule.costs.restart_s, "settle_s": rule.settle_s, "horizon_s": rule.horizon_s}


def _in_the_world(config: StudyRequest, course: Course, present: Present) -> Present:
    """Return a state of the cluster with the step times of the simulated world."""
    backend = config.trials.backend
    assert isinstance(backend, SimulatedBackend), "the study is simulated"
    found: dict[Setup, Figures] = {}
    for hosts in {setup.hosts for setup in present.figures}:
        setups = [setup for setup in present.figures if setup.hosts == hosts]
        cluster = cluster_of(config.problem.setting.cluster, course.trace, present.interval.from_s, hosts)
        grid = ConfigGrid.from_configs([setup.config for setup in setups], config.problem.options.opened)
        step_time_s = replace(backend, cluster=cluster).hidden_step(grid).step_time_s
        for setup, seconds in zip(setups, step_time_s.tolist(), strict=True):
            found[setup] = replace(present.figures[setup], step_time_s=seconds)
    return replace(present, figures=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Followed:
    """Day that was followed.

    Attributes:
        steps: Steps made, those that changes cost taken off.
        changes: Number of changes.
        forced: Number of these because a host of the running layout was lost.
    """

    steps: float
    changes: int
    forced: int


def _follow(
    believed: Sequence[Present], true: Sequence[Present], first: Setup, costs: Assumptions, choose: Choose
) -> _Followed:
    """Follow a way to decide through a day, and count its steps in the world."""
    standing = Standing(running=first, since_s=0.0, at_s=0.0, figures=believed[0].figures.get(first))
    steps, changes, forced = 0.0, 0, 0
    for present, real in zip(believed, true, strict=True):
        interval: Interval = present.interval
        now_s = interval.from_s
        while now_s < interval.to_s:
            standing = keep_accounts(standing, present, now_s)
            verdict = choose(standing, present, now_s)
            due_s = interval.to_s
            if verdict.decision == Decision.CHANGE and verdict.best is not None:
                ran_s = now_s - standing.since_s
                paid = _paid(verdict.best, real, standing, ran_s, costs)
                standing = changed(standing, verdict, present, now_s)
                steps -= paid
                changes, forced = changes + 1, forced + verdict.is_forced
            elif verdict.decision == Decision.WAIT:
                standing = changed(standing, verdict, present, now_s)
            elif verdict.decision == Decision.SETTLE and verdict.due_s is not None:
                due_s = min(max(verdict.due_s, now_s + 1.0), interval.to_s)
            if standing.running is not None:
                steps += (due_s - now_s) / real.figures[standing.running].step_time_s
            now_s = due_s
        standing = keep_accounts(standing, present, interval.to_s)
    return _Followed(steps=steps, changes=changes, forced=forced)


def _paid(change: Change, real: Present, standing: Standing, ran_s: float, costs: Assumptions) -> float:
    """Compute the steps that a change costs in the world."""
    return change_to(change.setup, real, standing.running, standing.figures, ran_s=ran_s, costs=costs).cost_steps


def _always(standing: Standing, present: Present, now_s: float, costs: Assumptions) -> Verdict:
    """Change to the layout that is predicted fastest, whatever it costs."""
    figures = present.figures
    fastest = min(figures, key=lambda setup: figures[setup].step_time_s, default=None)
    if fastest is None or fastest == standing.running:
        decision = Decision.WAIT if fastest is None else Decision.STAY
        return Verdict(decision=decision, is_forced=False, best=None, pays=False, due_s=None)
    is_forced = standing.running not in figures
    change = change_to(
        fastest, present, standing.running, standing.figures, ran_s=now_s - standing.since_s, costs=costs
    )
    return Verdict(decision=Decision.CHANGE, is_forced=is_forced, best=change, pays=True, due_s=now_s)


def _summary(rows: Sequence[Mapping[str, Any]], rules: Sequence[Rules]) -> list[dict[str, Any]]:
    """Compute the mean gains of the policy over the random days, for each of its rules."""
    found = []
    for rule in rules if rows else ():
        of = [row for row in rows if _named(rule).items() <= row.items()]
        gains = {
            other: [row["watch"] / row[other] - 1 for row in of]
            for other in ("staying", "always", "replan", "clairvoyant")
        }
        found.append(
            {
                **_named(rule),
                "days": len(of),
                **{f"over_{other}": float(np.mean(values)) for other, values in gains.items()},
                **{f"worst_over_{other}": float(np.min(values)) for other, values in gains.items()},
                "changes": float(np.mean([row["changes"] for row in of])),
                "changes_always": float(np.mean([row["changes_always"] for row in of])),
            }
        )
    return found


def _print(figures: dict[str, Any]) -> None:
    publish(figures["days"], as_json=False)
    print(f"One step has {figures['tokens_per_step']:,} tokens. Mean and worst gain of `watch` over the random days:")
    if figures["random"]:
        publish(figures["random"], as_json=False)


if __name__ == "__main__":
    sys.exit(main())
