"""Command `meshtune trial`: what one trial starts, and one trial outside of the search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hardware.io.errors import ConfigError
from hardware.rounding import measured, predicted
from tuner.cli.options import (
    CURRENT,
    FOUND_NOTHING,
    AsJson,
    Config,
    Overrides,
    Storage,
    StudyFile,
    launchable_config,
    load,
    with_plans,
)
from tuner.run.endings import ending_signals
from tuner.storage.stored_studies import StoredStudies
from tuner.terminal.console import config_in_words, print_json, printable, say, warn

if TYPE_CHECKING:  # these load numpy
    from costmodels.job.parallel_config import ParallelConfig
    from trials.backend import Observation
    from tuner.forecast.prepared import Prepared
    from tuner.search.proxy.proxy_trials import Proxy
    from tuner.study_file.request import StudyRequest

FAR_FROM_LOG = 0.1
"""Share by which a step time may differ from the log's before its command is doubted: steps of one program differ by
some percent from run to run (assumed)."""


def trial(
    study: StudyFile,
    chosen: Config = CURRENT,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the command, environment and batch file of the trial; start nothing.")
    ] = False,
    once: Annotated[
        bool, Option("--once", help="Run this one trial, and compare its step time with the log's.")
    ] = False,
    proxy: Annotated[
        bool, Option("--proxy", help="The smaller job that the study runs in place of the configuration (trial.proxy).")
    ] = False,
    ray_address: Annotated[
        str | None,
        Option(metavar="ADDRESS", help="Address of an existing Ray cluster; takes precedence over RAY_ADDRESS."),
    ] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print what one trial starts (--dry-run), or run it outside of the search (--once), as a check before a sweep.

    --once shows the log as it comes, and compares the step time with that of the log that `measured:` in the study
    states. A trial that measured a candidate is kept in the study; one that failed, or took 10% more or less than the
    log's step, is not.
    """
    if dry_run == once:
        raise ConfigError("needs either --dry-run or --once", key="trial")
    request = load(study, overrides, storage)
    wanted, notes = launchable_config(request, chosen)
    warn(notes)
    if dry_run:
        prepared = with_plans(request, StoredStudies(request.storage), wanted)
        _print_what_starts(prepared, wanted, as_proxy=proxy, as_json=as_json)
        return
    with ending_signals(lambda: None) as interrupted:
        try:
            payload = _run_once(request, wanted, ray_address, as_proxy=proxy, as_json=as_json)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None
    if as_json:
        print_json(payload)
    if payload["step_time_s"] is None:
        raise typer.Exit(FOUND_NOTHING)


def _print_what_starts(prepared: Prepared, wanted: ParallelConfig, *, as_proxy: bool, as_json: bool) -> None:
    from tuner.run.single_trial import num_trials, smaller_job, starting

    config = prepared.problem.with_knobs(wanted)
    smaller = smaller_job(prepared, config) if as_proxy else None
    backend, measured = starting(prepared, config, smaller)
    starts = backend.starts(measured, trial_number=num_trials(prepared))
    if as_json:
        told = {"config": wanted.values(prepared.problem.dimensions), "proxy": smaller and smaller.as_json()}
        print_json(told | starts.as_json())
        return
    if smaller is not None:
        typer.echo(f"In place of {config_in_words(prepared.problem, config)}: {smaller.in_words}")
    for line in starts.lines():
        typer.echo(printable(line))


def _run_once(
    request: StudyRequest, wanted: ParallelConfig, ray_address: str | None, *, as_proxy: bool, as_json: bool
) -> dict[str, Any]:
    from tuner.run.single_trial import place_of, run_single, smaller_job

    prepared = with_plans(request, StoredStudies(request.storage), runs=True)
    config = prepared.problem.with_knobs(wanted)
    smaller = smaller_job(prepared, config) if as_proxy else None
    place = place_of(prepared, config, lambda note: warn([note]))
    if place.hindrance:
        warn([f"the study will not keep this trial: {place.hindrance}"])
    as_what = f" as {smaller.in_words}" if smaller else ""
    say(f"Trying {config_in_words(prepared.problem, config)}{as_what}", err=True)
    seen = run_single(
        prepared, config, tell_log=_show_log, tell=lambda note: warn([note]), ray_address=ray_address, proxy=smaller
    )
    payload = _as_json(prepared, config, smaller, seen)
    kept, hindrance = None, place.hindrance
    if payload["step_time_s"] is None:
        hindrance = "it measured no step time"
    elif _is_far(payload["ratio_to_log"]):
        hindrance = "its step time is far from the log's, and the command may have to be mended first"
    if not hindrance:
        try:
            kept = place.keep(seen, smaller)
        except ConfigError as error:  # the result is worth more than its place
            hindrance = str(error)
    payload |= {"kept_as": kept, "not_kept": hindrance or None}
    if not as_json:
        _print_outcome(prepared, seen, payload)
    return payload


def _is_far(ratio: float | None) -> bool:
    return ratio is not None and abs(ratio - 1) > FAR_FROM_LOG


def _show_log(text: str) -> None:
    for line in text.splitlines():
        typer.echo(f"  | {printable(line)}", err=True)


def _as_json(prepared: Prepared, config: ParallelConfig, smaller: Proxy | None, seen: Observation) -> dict[str, Any]:
    """Return the outcome, beside the prediction and, for the current configuration, the log's step time."""
    from tuner.forecast.candidates import predict_candidate
    from tuner.run.single_trial import predict_proxy

    problem, stated = prepared.problem, prepared.request.trials.current
    is_current = problem.current is not None and config == problem.with_knobs(problem.current)
    log_s = stated.step_time_s if stated is not None and is_current and smaller is None else None
    step_s = seen.step_time_s
    return {
        "config": config.values(problem.dimensions),
        "proxy": smaller and smaller.as_json(),
        "status": seen.status.value,
        "reason": seen.reason,
        "step_time_s": step_s,
        "step_times_s": list(seen.step_times_s),
        "predicted_s": predict_candidate(problem, config)["step_time_s"]
        if smaller is None
        else predict_proxy(prepared, smaller),
        "log_step_time_s": log_s,
        "ratio_to_log": step_s / log_s if step_s is not None and log_s is not None else None,
        "peak_memory_bytes": seen.peak_memory_bytes,
        "source": seen.origin,
        "clock": seen.clock,
    }


def _print_outcome(prepared: Prepared, seen: Observation, payload: dict[str, Any]) -> None:
    step_s, ratio, stated = payload["step_time_s"], payload["ratio_to_log"], prepared.request.trials.current
    if step_s is None:
        say(f"{seen.status.in_words}: {printable(seen.reason)}")
        say("Nothing is kept of it. Mend what its log names, and give the same command again.")
        return
    steps = len(seen.step_times_s)
    say(
        f"{measured(step_s)} s per step ({prepared.backend.source_in_words}, median of {steps}); "
        f"predicted {predicted(payload['predicted_s'])} s"
    )
    if ratio is not None and stated is not None:
        say(f"{ratio:.2f} times the log's {measured(payload['log_step_time_s'])} s ({printable(stated.taken_from)})")
        if _is_far(ratio):
            say("  That is another program or another machine: compare --dry-run with the command of the log.")
    if seen.peak_memory_bytes is not None:
        say(f"{seen.peak_memory_bytes / 2**30:.1f} GiB at the peak of a device")
    if payload["not_kept"]:
        say(f"Not kept in the study: {payload['not_kept']}.")
    else:
        say(f"Kept in the study as trial {payload['kept_as']}: `meshtune run` knows it.")
