"""Output of the commands: text for people, and JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hardware.rounding import by_source, measured, predicted
from tuner.terminal.tables import degrees_in_words, has_room_for, print_table

if TYPE_CHECKING:  # these load numpy, Optuna and Ray
    from costmodels.job.parallel_config import ParallelConfig
    from costmodels.simulator.simulated_step import Simulation
    from tuner.answers.gain import Compared
    from tuner.calibrate.device_results import DeviceCalibration
    from tuner.calibrate.measured_steps import CalibratedFile
    from tuner.economics.training import Training
    from tuner.forecast.prepared import Prepared
    from tuner.run.progress import RunResult
    from tuner.search.proxy.extrapolation import Extrapolated
    from tuner.storage.record import TrialRecord
    from tuner.study_file.request import StudyRequest
    from tuner.subject.problem import Problem

LEFT_OUT_WORTH_TELLING = 0.01
"""Smallest unmeasurable share of the steps that is reported after a device calibration."""

NARROWEST = 40
"""Width of a terminal from which on lines are broken between words."""

LAYOUT = "configuration"
"""Head of a column of whole configurations."""

FAILURES_SHOWN = 3
"""Number of failed trials that are listed individually."""

NOTHING_WORKS = "No configuration works; `meshtune space` explains why, and `meshtune status` lists failed trials."


def print_json(payload: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; a NaN or infinity raises, since JSON cannot represent it."""
    typer.echo(json.dumps(payload, indent=2, default=_plain, allow_nan=False))


def _plain(value: Any) -> Any:
    """Convert a numpy scalar to Python's type."""
    return value.item()


def say(line: str, *, err: bool = False) -> None:
    """Print a line of words. A terminal gets it broken between words, with the rest under its beginning."""
    stream = sys.stderr if err else sys.stdout
    width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    if len(line) > width >= NARROWEST:
        begins = line[: len(line) - len(line.lstrip())] + "  "
        line = textwrap.fill(line, width, subsequent_indent=begins, break_long_words=False, break_on_hyphens=False)
    typer.echo(line, err=err)


def warn(warnings: Sequence[str]) -> None:
    """Print notes on stderr, one per line."""
    for warning in warnings:
        say(f"note: {printable(warning)}", err=True)


def layout_columns(
    layouts: Sequence[Mapping[str, Any]], beside: Mapping[str, Sequence[str]], spare: Collection[str] = ()
) -> dict[str, list[str]]:
    """Return a column for each dimension of some layouts, or fewer where a terminal has no room for these.

    Dimensions in which all layouts agree leave first, then spare columns; then one column has the degrees above 1.

    Args:
        layouts: Values of the dimensions of each row; none of a row without a layout.
        beside: Columns that a table should have room for beside these, by their heads.
        spare: Heads of those that matter less than a column for each dimension.
    """
    known = [row for row in layouts if row]
    columns = {
        name: [value_in_words(row[name]) if row else "-" for row in layouts] for name in (known[0] if known else {})
    }
    varying = {name: cells for name, cells in columns.items() if len({row[name] for row in known}) > 1}
    least = {head: cells for head, cells in beside.items() if head not in spare}
    for others in (beside, least):
        for some in (columns, varying):
            if has_room_for({**some, **others}):
                return some
    return {LAYOUT: [short_layout(row) if row else "-" for row in layouts]}


def tell_columns(layouts: Sequence[Mapping[str, Any]], columns: Collection[str], dropped: Sequence[str] = ()) -> None:
    """Print, below a table on stderr, what it had no room for and the meanings of its degrees.

    Args:
        layouts: Values of the dimensions of each row, as `layout_columns` got them.
        columns: Heads of the columns that it gave.
        dropped: Heads of other columns that were left out.
    """
    first = next(filter(None, layouts), {})
    if LAYOUT not in columns and (same := in_words({name: first[name] for name in first if name not in columns})):
        say(f"In all rows: {same}", err=True)
    if dropped:
        say(f"Without room here: {', '.join(dropped)}; a wider terminal and --json have them.", err=True)
    if told := degrees_in_words(first):
        say(told, err=True)


def print_in_training(payload: Mapping[str, Any]) -> None:
    """Print the state of the training in which the trials run, if they run in one."""
    if payload["in_training"] is not None:
        say(f"{payload['in_training']['in_words']}.")


def print_run(prepared: Prepared, result: RunResult, payload: Mapping[str, Any]) -> None:
    """Print why a run stopped, its best configuration, and the flags for that configuration's framework."""
    from tuner.answers.gain import compared_of
    from tuner.economics.training import limited_of
    from tuner.storage.record import completed_times_s, counted, excused_in_words, num_failed, repeated_trials

    compared = compared_of(prepared.problem, result.reference, result.records, result.best, result.gain)
    training = limited_of(prepared, result.best, result.extrapolated)
    if not payload["candidates"]:
        say(NOTHING_WORKS)
        return
    ended = counted(result.records)
    tried = len({tuple(record.params.values()) for record in ended})
    trials = f" in {len(ended):,} trials" if len(ended) > tried else ""
    excused = f"; {told}" if (told := excused_in_words(result.records)) else ""
    sure = f"; {confidence_in_words(prepared.problem, payload['p_star'])}" if result.best is not None else ""
    say(
        f"Stopped: {result.stop_reason.sentence}. Tried {tried:,} of {payload['candidates']:,} "
        f"candidates{trials}, {num_failed(ended):,} failed{excused}{sure}."
    )
    if not result.records:
        return
    if result.best is not None:
        print_failed(result.records)
    if payload["pruned"]:
        say(f"{pruned_in_words(payload['pruned'], payload['saved_s'])}.")
    if payload["proxies"]:
        say(f"{payload['proxies']:,} of the trials ran smaller proxy jobs in place of the full job.")
    print_device_time(prepared.request, compared, result.records)
    print_in_training(payload)
    if result.extrapolated is not None:
        print_extrapolated(result.extrapolated)
        print_judged(prepared.request, compared, training, None)
        return
    if result.best is None or result.best.step_time_s is None:
        say(f"No configuration completed a trial: {_failures_in_words(result)}.")
        return
    source = (
        "SYNTHETIC: a simulated world, not a measurement"
        if payload["source"] == "synthetic"
        else prepared.request.trials.backend.source_in_words
    )
    best_s = result.best.step_time_s
    say(f"Best: {in_words(result.best.params)}")
    tokens = payload["tokens_per_s_per_device"]
    say(f"  {measured(best_s)} s per step{throughput_in_words(tokens, payload['source'])} ({source})")
    for rival in repeated_trials(result.records):
        if rival.params != result.best.params and rival.step_time_s is not None:
            counts = [len(completed_times_s(result.records, each)) for each in (result.best.params, rival.params)]
            say(
                f"  repeated because too close to call ({counts[0]} and {counts[1]} trials): "
                f"{in_words(rival.params)} takes {measured(rival.step_time_s)} s "
                f"({rival.step_time_s / best_s - 1:+.1%})"
            )
    print_judged(prepared.request, compared, training, result.p_star)
    _print_front(prepared, result)
    if rows := prepared.problem.subject.rows:
        fastest_s = min(run.step_time_s for run in rows if run.step_time_s is not None)
        behind = best_s / fastest_s - 1
        among = f"all {len(rows)} measured rows"
        needed = 1 + [record.number for record in result.records].index(result.best.number)
        slower = f"{behind:.1%} slower than the fastest of {among} ({measured(fastest_s)} s)"
        say(f"  {slower if behind > 0 else f'the fastest of {among}'}, found with {needed} trials")
    _print_use(prepared, prepared.problem.config_of(result.best.params))


def _print_front(prepared: Prepared, result: RunResult) -> None:
    """Print the value that a study minimizes or, of two, the trials that no other beats in both."""
    from tuner.answers.measured_front import measured_front
    from tuner.forecast.objective import labels_of
    from tuner.search.objectives import STEP_TIME

    if prepared.problem.objective == (STEP_TIME,) or result.best is None:
        return
    if len(prepared.problem.objective) == 1:
        say(f"  {labels_of(prepared.problem, prepared.request.economics)[0]}: {measured(result.best.values[0])}")
        return
    front = measured_front(prepared.problem, result.records)
    say(f"No other trial is better in both values than these {len(front)}; the best is the first:")
    rows = [[*map(measured, record.values), str(record.number), in_words(record.params)] for record in front]
    print_table(
        [*labels_of(prepared.problem, prepared.request.economics), "trial", "configuration"],
        rows,
        left=(len(prepared.problem.objective) + 1,),
    )


def _print_use(prepared: Prepared, chosen: ParallelConfig) -> None:
    """Print how to train with a configuration: flags for the framework, or shardings of the user's own step."""
    from tuner.export import exporter_for
    from tuner.export.knob_export import with_knobs
    from tuner.forecast.candidates import notes_on_plan
    from tuner.forecast.idle_hosts import notes_on_idle_hosts
    from tuner.terminal.shardings import print_shardings

    shardings = prepared.problem.subject.shardings(chosen, prepared.request.name)
    if shardings is not None:
        print_shardings(prepared.request.file, shardings)
        return
    export_config, what = exporter_for(prepared.problem.setting.runtime)
    say(f"{what}:")
    export = with_knobs(export_config(prepared.problem.setting, chosen), prepared.problem.knobs, chosen)
    typer.echo(export.text.rstrip("\n"))
    warn((*notes_on_idle_hosts(prepared.problem, chosen), *notes_on_plan(prepared.problem, chosen), *export.notes))


def print_device_time(request: StudyRequest, compared: Compared | None, records: Sequence[TrialRecord]) -> None:
    """Print the device time that the trials took, and the steps after which the gain repays it."""
    from tuner.answers.trial_parts import parts_in_words
    from tuner.economics.device_time import device_time_of, hours_in_words, payback_in_words, payback_of

    spent = device_time_of(request, records)
    if not spent.device_s:
        return
    payback = payback_of(request, compared, records)
    told = f"; {payback_in_words(compared.reference, payback)}" if payback and compared else ""
    say(f"{hours_in_words(spent)}{told}.")
    if spent.is_spent and (parts := parts_in_words(records)):
        say(parts)


def print_judged(
    request: StudyRequest, compared: Compared | None, training: Training | None, p_star: float | None
) -> None:
    """Print the gain of the best over the reference, and whether its training keeps the study's limits.

    Args:
        request: Study.
        compared: Comparison of the best with the reference.
        training: Training of the study's tokens with the best; see `limited_training`.
        p_star: Confidence that no untried configuration is faster; None before any trial.
    """
    from tuner.economics.cost_words import limited_in_words

    gain = "" if compared is None else gain_in_words(request, compared, p_star)
    for told in filter(None, (gain, limited_in_words(request.economics, training))):
        say(f"  {told}")


def gain_in_words(request: StudyRequest, compared: Compared, p_star: float | None) -> str:
    """Describe how many times as fast the best configuration is as the reference, or why the two are not compared.

    Args:
        request: Study.
        compared: Comparison of the two.
        p_star: Confidence that no untried configuration is faster; None before any trial.
    """
    if compared.gain is None:
        return compared.not_compared
    reference = compared.reference
    named = [] if reference.role == "current" else [in_words(reference.values)]
    told = [
        f"{compared.gain_in_words}x as fast as {reference.in_words} ({', '.join([*named, compared.basis_in_words])})",
        compared.interval_in_words,
        compared.luck_in_words,
        confidence_in_words(request.problem, p_star)
        if p_star is not None and p_star <= request.search.confidence
        else "",
    ]
    return "; ".join(filter(None, told))


def print_extrapolated(found: Extrapolated) -> None:
    """Print the best configuration of a study in which only proxy jobs have completed."""
    say(f"Best by extrapolation: {in_words(found.config)}")
    say(f"  {predicted(found.step_time_s)} s per step, {found.in_words}; no full-size trial has completed")


def print_knobs(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the knobs that a study searches, and the known ones that it does not, with the reasons."""
    from trials.knobs.places import text_of

    for is_searched, title in ((True, "Searched:"), (False, "Known of the framework, and not searched:")):
        chosen = [row for row in rows if row["searched"] == is_searched]
        if not chosen:
            continue
        typer.echo(title)
        for row in chosen:
            values = ", ".join("absent" if value is None else text_of(value) for value in row["values"])
            reason = f": {row['reason']}" if "reason" in row else ""
            typer.echo(printable(f"  {row['name']}{reason}"))
            typer.echo(printable(f"      {values}" + (f"; set where {row['when']}" if row["when"] else "")))
            if "text" in row:
                requires = f" Requires {row['requires']}." if row["requires"] else ""
                typer.echo(printable(f"      {row['text']}{requires}"))
                typer.echo(printable(f"      from {row['source']}; effect: {row['effect']}"))


def print_reasons(problem: Problem, chosen: ParallelConfig, reasons: Mapping[str, str]) -> None:
    """Print every reason that keeps a configuration out of the space."""
    named = config_in_words(problem, chosen)
    if not reasons:
        typer.echo(f"{named} is in the space.")
        return
    stays = chosen == problem.current
    typer.echo(
        f"{named} " + ("is in the space as the current configuration, although:" if stays else "is not in the space:")
    )
    for name, reason in reasons.items():
        typer.echo(f"  {name}: {reason}")


def print_simulation(simulation: Simulation, payload: Mapping[str, Any]) -> None:
    """Print simulated and closed-form step time side by side, and the pipeline's timeline."""
    from costmodels.simulator.stage_rows import stage_rows
    from tuner.terminal.stage_text import LEGEND, pipeline_lines

    step_s, closed_form_s = payload["step_time_s"], payload["predicted_step_time_s"]
    typer.echo(speed_in_words(payload))
    of_1f1b = "" if payload["schedule"] == "1f1b" else ", which models 1f1b only"
    typer.echo(f"  {step_s / closed_form_s - 1:+.1%} relative to the closed form of `meshtune predict`{of_1f1b}:")
    rows = [
        [part, *(cell for value, whole in values for cell in (predicted(value), f"{value / whole:.1%}"))]
        for part, values in {
            part: ((seconds, step_s), (payload["predicted_breakdown_s"].get(part, 0.0), closed_form_s))
            for part, seconds in payload["breakdown_s"].items()
        }.items()
        if any(value for value, _ in values)
    ]
    print_table(
        ["part", "simulated [s]", "share", "predicted [s]", "share"],
        [*rows, ["step", predicted(step_s), "", predicted(closed_form_s), ""]],
    )
    typer.echo(f"{payload['operator_events']:,} kernels and collectives. Timeline of every stage ({LEGEND}):")
    for line in pipeline_lines(stage_rows(simulation), simulation.timeline.makespan_s):
        typer.echo(line)


def print_calibration(done: CalibratedFile) -> None:
    """Print the fitted constants with their uncertainty, and name those that the runs do not determine."""
    fit = done.fit
    typer.echo(f"Fitted {done.runtime} to {fit.num_runs:,} runs of {', '.join(map(printable, fit.sources))}.")
    fitted = {**fit.constants, **{f"speed of {name}": speed for name, speed in fit.device_speed.items()}}
    print_table(
        ["constant", "value", "68% range", "determined by"],
        [
            [
                name,
                f"{constant.value:.4g}",
                f"x/{math.exp(constant.log_error):.2f}",
                ("the runs" if constant.is_determined else "the prior")
                + (", at its bound" if constant.at_bound else ""),
            ]
            for name, constant in fitted.items()
        ],
    )
    unknown = [name for name, constant in fit.constants.items() if not constant.is_determined]
    if unknown:
        typer.echo(f"The runs do not determine {', '.join(unknown)}: these stay near their prior values.")
    typer.echo(
        f"Median error {fit.median_ape:.1%} on these runs; "
        f"{fit.step_error:.1%} (one standard deviation) on held-out runs."
    )
    if done.memory_error is not None:
        typer.echo(f"Error of predicted peak memory: {done.memory_error:.1%} (one standard deviation).")
    for reason, count in done.skipped.items():
        typer.echo(f"  skipped {count:,}: {printable(reason)}", err=True)
    typer.echo(f"wrote {printable(str(done.out))}", err=True)


def print_device_calibration(done: DeviceCalibration, plot: Path | None) -> None:
    """Print the measured operators' speeds relative to the formula and to the device's peaks."""
    left = done.planned - done.measured - done.known - sum(done.refused.values())
    typer.echo(
        f"Measured {done.measured:,} calls of {done.device.name} in {done.precision} in {done.seconds:.0f} s; "
        f"{done.known:,} were known already."
    )
    rows = [
        [kind, str(found["shapes"]), f"{found['of_formula']:.2f}", f"{found['of_peak']:.1%}"]
        for kind, found in done.kinds().items()
    ]
    print_table(["kind", "shapes", "speed over formula", "share of peak"], rows)
    if left:
        typer.echo(f"The time ran out before {left:,} more calls; run the same command again to continue with them.")
    if done.left_out > LEFT_OUT_WORTH_TELLING:
        typer.echo(f"{done.left_out:.0%} of the candidates' step time cannot be measured in isolation on this machine.")
    for reason, count in done.refused.items():
        typer.echo(f"  {count:,} could not be run: {printable(reason)}", err=True)
    if plot is not None:
        typer.echo(f"wrote {printable(str(plot))}", err=True)


def speed_in_words(prediction: Mapping[str, Any]) -> str:
    """Describe the step time, throughput and MFU of a prediction."""
    source = prediction.get("source", "predicted")
    tokens = throughput_in_words(prediction.get("tokens_per_s_per_device"), source)
    return f"{by_source(prediction['step_time_s'], source)} s per step{tokens}, MFU {prediction['mfu']:.1%}"


def throughput_in_words(tokens_per_s: float | None, source: str) -> str:
    """Describe a device's throughput after a step time; empty for a step of the user's own, which has no tokens."""
    return "" if tokens_per_s is None else f", {by_source(tokens_per_s, source)} tokens/s per device"


def confidence_in_words(problem: Problem, p_star: float) -> str:
    """Describe `p_star`: the share of posterior draws in which no untried candidate is the best."""
    better = "faster" if problem.objective == ("step_time",) else "better"
    return f"confidence {p_star:.2f} that no untried configuration is {better}"


def pruned_in_words(pruned: int, saved_s: float) -> str:
    """Describe how many trials were stopped early, and the time this saved."""
    trials = "1 trial" if pruned == 1 else f"{pruned:,} trials"
    return f"{trials} stopped early, about {saved_s:,.4g} s of steps saved"


def print_failed(records: Sequence[TrialRecord]) -> None:
    """Print the latest failed trials with their status and reason."""
    failed = [record for record in records if record.has_failed and record.observation is not None]
    for record in failed[-FAILURES_SHOWN:]:
        assert record.observation is not None
        status = record.observation.status.in_words
        reason = f": {printable(record.observation.reason)[:200]}" if record.observation.reason else ""
        say(f"  trial {record.number}, {in_words(record.params)}, {status}{reason}")
    if len(failed) > FAILURES_SHOWN:
        say(f"  and {len(failed) - FAILURES_SHOWN:,} failed earlier; the report lists all of them")


def print_taken(records: Sequence[TrialRecord]) -> None:
    """Print the trials that were not run, but measured before."""
    for record in records:
        if record.observation is not None and record.observation.taken_from:
            say(f"Trial {record.number} was {printable(record.observation.reason)}.")


def _failures_in_words(result: RunResult) -> str:
    """Count the failed trials by status, and quote the first reason."""
    observations = [record.observation for record in result.records if record.observation is not None]
    kinds = Counter(observation.status.in_words for observation in observations)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none has ended"
    reason = next((observation.reason for observation in observations if observation.reason), "")
    return told + (f"; first reason: {printable(reason)}" if reason else "")


def in_words(values: Mapping[str, Any]) -> str:
    """Format a configuration as `--config` takes it."""
    told = [str(value) if name == "assignment" else f"{name}={value_in_words(value)}" for name, value in values.items()]
    return ",".join(filter(None, told))


def short_layout(values: Mapping[str, Any]) -> str:
    """Format a configuration without its degrees of 1."""
    from costmodels.job.parallel_config import DEGREES

    return in_words({name: value for name, value in values.items() if name not in DEGREES or value != 1}) or "all 1"


def config_in_words(problem: Problem, chosen: ParallelConfig) -> str:
    """Format a configuration as `--config` takes it, with fixed dimensions that differ from the job's values."""
    fixed = problem.subject.defaults
    values = chosen.values(fixed)
    changed = [name for name in fixed if name not in problem.dimensions and values[name] != fixed[name]]
    return in_words(chosen.values((*problem.dimensions, *changed)))


def value_in_words(value: object) -> str:
    """Format a dimension's value as study files and `--config` take it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def hosts_in_words(hosts: int) -> str:
    """Format a number of hosts."""
    return "1 host" if hosts == 1 else f"{hosts:,} hosts"


def printable(text: str) -> str:
    """Return `text` on one line, with control characters written as Python's escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
