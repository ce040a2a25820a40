"""Command `meshtune replan`: plan configuration changes for a cluster that changes over time."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hardware.io.errors import ConfigError, did_you_mean
from hardware.rounding import predicted
from tuner.cli.options import FOUND_NOTHING, AsJson, Overrides, Storage, StudyFile, load, number, with_plans
from tuner.storage.stored_studies import StoredStudies
from tuner.terminal.console import NOTHING_WORKS, in_words, print_json, printable
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # these load numpy and Optuna
    from hardware.dynamics import Trace
    from tuner.forecast.prepared import Prepared
    from tuner.replan.replanning import Assumptions, Plan
    from tuner.subject.problem import Problem

Restart = Annotated[
    str, Option("--switch-restart", metavar="SECONDS", help="Time to stop and restart all processes (assumed).")
]
StorageBandwidth = Annotated[
    str, Option("--switch-gb-per-s", metavar="GB/S", help="Bandwidth of one host to the checkpoint storage (assumed).")
]
CheckpointEvery = Annotated[
    str,
    Option(
        "--switch-checkpoint-every",
        metavar="SECONDS",
        help="Time between checkpoints; a failure loses half of it on average (assumed).",
    ),
]

LONGEST_TABLE = 40
"""Largest number of rows of a timeline shown in full; longer timelines show only rows with a change."""


def replan(
    study: StudyFile,
    trace: Annotated[
        list[Path] | None, Option(metavar="TRACE", help="CSV trace of cluster changes, used instead of cluster.trace.")
    ] = None,
    until: Annotated[
        str | None, Option(metavar="SECONDS", help="End of the plan; by default an hour after the last event.")
    ] = None,
    robust: Annotated[
        str | None,
        Option(
            metavar="mean|p90", help="Find the one configuration that is best over all traces when it is never changed."
        ),
    ] = None,
    unforeseen: Annotated[
        bool, Option("--unforeseen", help="Plan each interval without knowledge of later events.")
    ] = False,
    restart: Restart = "120",
    bandwidth: StorageBandwidth = "5",
    checkpoint: CheckpointEvery = "1800",
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Plan when to run which configuration on a cluster that changes over time, and compute the gain.

    Step times are predicted by the cost model, corrected by the study's measured trials.
    """
    until_s = None if until is None else number("--until", until, above_zero=True)
    costs = costs_of_change(restart, bandwidth, checkpoint)
    files = trace or []
    if robust is None and len(files) > 1:
        raise ConfigError(
            "is given more than once, which only --robust supports",
            key="--trace",
            value=", ".join(map(str, files)),
            nearest="--robust mean, or one trace",
        )
    if robust is not None and unforeseen:
        raise ConfigError(
            "cannot be combined with --robust, which plans no changes", key="--unforeseen", nearest="use one of the two"
        )
    request = load(study, overrides, storage)
    prepared = with_plans(request, StoredStudies(request.storage))

    from tuner.replan.network import trace_of
    from tuner.replan.replanning import STATISTICS, Assumptions, plan_json, replan_trace

    if robust is not None and robust not in STATISTICS:
        raise ConfigError("is no statistic", key="--robust", value=robust, nearest=did_you_mean(robust, STATISTICS))
    traces = [trace_of(request, file, option="--trace") for file in (*files, *([] if files else [None]))]
    assumptions = Assumptions(**costs)
    if robust is not None:
        names = [str(file) for file in files] or ["cluster.trace"]
        _print_robust(prepared, traces, names, robust, until_s, assumptions, as_json)
        return
    plan = replan_trace(
        prepared,
        traces[0],
        until_s=until_s,
        assumptions=assumptions,
        foresees=not unforeseen,
        on_progress=_print_progress,
    )
    if as_json:
        print_json(plan_json(prepared.problem, plan))
    elif plan.works:
        _print_plan(prepared.problem, plan)
    else:
        typer.echo(NOTHING_WORKS, err=True)
    if not plan.works:
        raise typer.Exit(FOUND_NOTHING)


def costs_of_change(restart: str, bandwidth: str, checkpoint: str) -> dict[str, float]:
    """Parse the assumed costs of a change, as `Assumptions` takes them."""
    return {
        "restart_s": number("--switch-restart", restart),
        "storage_bytes_per_s": 1e9 * number("--switch-gb-per-s", bandwidth, above_zero=True),
        "checkpoint_every_s": number("--switch-checkpoint-every", checkpoint),
    }


def _print_progress(line: str) -> None:
    typer.echo(line, err=True)


def _print_plan(problem: Problem, plan: Plan) -> None:
    stretches = plan.best.stretches
    changes = [at for at, one in enumerate(stretches) if at == 0 or one.setup != stretches[at - 1].setup]
    shown = list(range(len(stretches))) if len(stretches) <= LONGEST_TABLE else changes
    print_table(
        ["from [s]", "to [s]", "hosts", "step [s]", "steps", "change [s]", "configuration"],
        [
            [
                f"{one.from_s:g}",
                f"{(stretches[end].from_s if end < len(stretches) else plan.until_s):g}",
                "-" if one.setup is None else str(len(one.setup.hosts)),
                "-" if one.step_time_s is None else predicted(one.step_time_s),
                f"{sum(each.steps for each in stretches[at:end]):,.0f}",
                f"{one.switch_s + one.lost_work_s:.0f}" if one.switch_s or one.lost_work_s else "",
                "waits" if one.setup is None else in_words(one.setup.config.values(problem.dimensions)),
            ]
            for at, end in zip(shown, [*shown[1:], len(stretches)], strict=True)
            for one in [stretches[at]]
        ],
    )
    for at in changes[1:]:
        typer.echo(f"{stretches[at].from_s:g} s: {printable(stretches[at].reason)}.")
    known = (
        f"predictions corrected by {plan.num_trials:,} trials"
        if plan.num_trials
        else "predictions; no trial has run yet"
    )
    typer.echo(f"{plan.best.steps:,.0f} steps until {plan.until_s:g} s ({known}).")
    gained = plan.gain_over_staying
    if gained is not None and plan.staying is not None:
        typer.echo(f"  {gained:+.2%} over keeping the study's best, which completes {plan.staying.steps:,.0f}.")
    else:
        typer.echo("  Keeping the study's best configuration completes no step.")
    told = plan.assumptions
    typer.echo(
        f"Assumed: {told.restart_s:g} s to restart, {told.storage_bytes_per_s / 1e9:g} GB/s from a host to the "
        f"checkpoint storage, a checkpoint every {told.checkpoint_every_s:g} s."
    )


def _print_robust(
    prepared: Prepared,
    traces: list[Trace],
    names: list[str],
    statistic: str,
    until_s: float | None,
    assumptions: Assumptions,
    as_json: bool,
) -> None:
    from tuner.replan.replanning import robust_choice, robust_json

    choice = robust_choice(
        prepared, traces, statistic, until_s=until_s, assumptions=assumptions, on_progress=_print_progress
    )
    if as_json:
        payload: dict[str, Any] = robust_json(prepared.problem, choice, names, statistic)
        print_json(payload | {"assumptions": asdict(assumptions)})
    elif choice.config is None:
        typer.echo(NOTHING_WORKS, err=True)
    else:
        typer.echo(f"Best over {len(names)} traces: {in_words(choice.config.values(prepared.problem.dimensions))}")
        staying = choice.of_traces_best or (None,) * len(names)
        print_table(
            ["steps", "tokens/s", "steps of the study's best", "trace"],
            [
                [
                    f"{one.steps:,.0f}",
                    f"{1 / one.time_per_token_s:,.0f}",
                    "-" if other is None else f"{other.steps:,.0f}",
                    printable(name),
                ]
                for name, one, other in zip(names, choice.of_traces, staying, strict=True)
            ],
        )
        told = "mean" if statistic == "mean" else "90th percentile"
        typer.echo(
            f"{told} of the time per token: {predicted(choice.figure_s)} s, of {choice.num_configs:,} configurations"
        )
        if math.isfinite(choice.figure_best_s):
            typer.echo(
                f"  {choice.figure_best_s / choice.figure_s - 1:+.2%} over keeping the study's best configuration"
            )
    if choice.config is None:
        raise typer.Exit(FOUND_NOTHING)
