"""Answer of a watch to one state of the cluster: the decision, the best layout, its flags, and what a change costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from hardware.dynamics import HostEvent, LinkEvent
from hardware.rounding import predicted
from tuner.export import exporter_for
from tuner.export.knob_export import with_knobs
from tuner.forecast.prepared import Prepared
from tuner.replan.cluster_states import Setup
from tuner.replan.network import name_hosts
from tuner.replan.present import Change, Present, Watched
from tuner.subject.problem import Problem
from tuner.terminal.console import config_in_words
from tuner.watch.hosts import Look
from tuner.watch.policy import Decision, Standing, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer to one state of the cluster.

    Attributes:
        payload: JSON object of the answer.
        lines: The answer in words, a sentence or a block of flags each.
        short: Text that is equal for answers that say the same.
    """

    payload: dict[str, Any]
    lines: tuple[str, ...]
    short: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """State of a cluster and of its job, to which an answer is given.

    Attributes:
        look: Look at the cluster.
        present: State of the cluster with the prices of its layouts.
        standing: Setup that runs, with its accounts.
        verdict: Decision about a change.
        events: Events since the answer before.
        wall_s: Wall clock [s].
        in_training: State of the training whose checkpoint a change goes on from, as its backend tells it; None if the
            study knows of none.
    """

    look: Look
    present: Present
    standing: Standing
    verdict: Verdict
    events: Sequence[HostEvent | LinkEvent]
    wall_s: float
    in_training: Mapping[str, Any] | None = None


def answer_of(prepared: Prepared, watched: Watched, seen: Seen) -> Answer:
    """Write the answer to a state of the cluster."""
    present, verdict, running = seen.present, seen.verdict, seen.standing.running
    change = verdict.best
    best = change.setup if change is not None else running
    flags = None if best is None else _flags(prepared.problem, watched, best)
    payload = {
        "study_name": prepared.request.name,
        "time_s": seen.look.now_s,
        "utc": datetime.fromtimestamp(seen.wall_s, UTC).isoformat(timespec="seconds"),
        "events": [str(event) for event in seen.events],
        "since_s": present.interval.from_s,
        "available": [seen.look.names[host] for host in present.hosts],
        "decision": verdict.decision.value,
        "forced": verdict.is_forced,
        "running": _setup_json(prepared.problem, seen, running),
        "best": _setup_json(prepared.problem, seen, best),
        "flags": flags,
        "speedup": _speedup(seen),
        "switch_s": change.switch_s if change else None,
        "lost_work_s": change.lost_work_s if change else None,
        "pays": verdict.pays,
        "pays_after_s": change.pays_after_s if change and math.isfinite(change.pays_after_s) else None,
        "due_s": verdict.due_s,
        "reason": _reason(seen),
        "in_training": seen.in_training,
        "trials": present.num_trials,
    }
    short = "; ".join(
        (
            verdict.decision.value,
            _in_words(prepared.problem, running),
            _in_words(prepared.problem, best),
            name_hosts(present.hosts),
        )
    )
    return Answer(payload=payload, lines=tuple(_lines(prepared.problem, seen, payload)), short=short)


def _in_words(problem: Problem, setup: Setup | None) -> str:
    return "none" if setup is None else f"{config_in_words(problem, setup.config)} on {name_hosts(setup.hosts)}"


def _flags(problem: Problem, watched: Watched, setup: Setup) -> dict[str, Any]:
    """Write a setup as the flags of the study's framework, on a cluster of the setup's hosts alone."""
    export_config, _ = exporter_for(problem.setting.runtime)
    export = export_config(replace(problem.setting, cluster=watched.base(setup.hosts)), setup.config)
    done = with_knobs(export, problem.knobs, setup.config)
    return {"target": done.target, "text": done.text, "notes": list(done.notes)}


def _setup_json(problem: Problem, seen: Seen, setup: Setup | None) -> dict[str, Any] | None:
    if setup is None:
        return None
    figures = seen.present.figures.get(setup)
    return {
        "config": setup.config.values(problem.dimensions),
        "hosts": list(setup.hosts),
        "names": [seen.look.names[host] for host in setup.hosts],
        "step_time_s": None if figures is None else figures.step_time_s,
        "since_s": seen.standing.since_s if setup == seen.standing.running else None,
    }


def _speedup(seen: Seen) -> float | None:
    """Return the ratio of the running setup's step time to the best one's; None if one of them is unknown."""
    running, change = seen.standing.running, seen.verdict.best
    runs = seen.present.figures.get(running) if running is not None else None
    if runs is None:
        return None
    return 1.0 if change is None else runs.step_time_s / seen.present.figures[change.setup].step_time_s


def _reason(seen: Seen) -> str:
    """Explain the decision."""
    verdict, standing = seen.verdict, seen.standing
    if verdict.decision == Decision.WAIT:
        return "no configuration can run on the hosts that are left"
    change = verdict.best
    if change is None:
        return "the running layout is the fastest"
    cost_s = change.switch_s + change.lost_work_s
    if verdict.is_forced:
        if standing.running is None:
            return f"nothing runs, and the fastest on {len(seen.present.hosts)} hosts can begin"
        gone = {*standing.running.hosts} - {*seen.present.hosts}
        what = f"{name_hosts(gone)} of the running layout is lost" if gone else "a host of the running layout was lost"
        return f"{what}; the change takes {cost_s:.0f} s, of which {change.lost_work_s:.0f} s repeat lost work"
    return _why(seen, change, cost_s)


def _why(seen: Seen, change: Change, cost_s: float) -> str:
    """Explain why a change that can wait is made, waits, or is not made."""
    verdict, standing, now_s = seen.verdict, seen.standing, seen.look.now_s
    assert standing.running is not None, "nothing that runs is forced to begin"
    figures = seen.present.figures
    step_s, runs_s = figures[change.setup].step_time_s, figures[standing.running].step_time_s
    than = f"{predicted(step_s)} s per step instead of {predicted(runs_s)} s"
    if verdict.decision == Decision.STAY:
        return f"{than} would repay {cost_s:.0f} s of change only after {change.pays_after_s:,.0f} s"
    repaid = f"{than} repays {cost_s:.0f} s of change after {change.pays_after_s:,.0f} s"
    if verdict.decision == Decision.SETTLE:
        assert verdict.due_s is not None, "a change that settles is due"
        return f"{repaid}; it is due in {verdict.due_s - now_s:,.0f} s, if the cluster stays as it is"
    stood_s = now_s - seen.present.interval.from_s
    lost = standing.lost_steps.get(change.setup, 0.0)
    return f"{repaid}; the cluster has stood for {stood_s:,.0f} s, and {lost:,.1f} steps were lost by staying"


def _lines(problem: Problem, seen: Seen, payload: dict[str, Any]) -> list[str]:
    verdict = seen.verdict
    happened = ", ".join(payload["events"]) or f"{len(seen.present.hosts)} hosts"
    says = {
        Decision.STAY: "stay",
        Decision.SETTLE: "stay for now",
        Decision.CHANGE: "change" if seen.standing.running is not None else "begin",
        Decision.WAIT: "wait",
    }[verdict.decision]
    lines = [f"{payload['time_s']:.0f} s: {happened}: {says}; {payload['reason']}."]
    if verdict.best is not None:
        best = payload["best"]
        lines.append(f"  {_in_words(problem, verdict.best.setup)}, {predicted(best['step_time_s'])} s per step")
    if verdict.decision == Decision.CHANGE:
        lines += [f"    {line}" for line in payload["flags"]["text"].rstrip("\n").splitlines()]
        lines += [f"  note: {note}" for note in payload["flags"]["notes"]]
        lines += [f"  {seen.in_training['in_words']}."] if seen.in_training else []
    return lines
