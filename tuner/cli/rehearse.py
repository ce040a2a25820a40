"""Command `meshtune rehearse`: the study's own program runs as single ranks on the CPU of this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hardware.io.errors import ConfigError
from hardware.rounding import predicted
from tuner.cli.completion import targets
from tuner.cli.options import (
    CURRENT,
    FOUND_NOTHING,
    AsJson,
    Overrides,
    Storage,
    StudyFile,
    launchable_config,
    load,
    number,
    whole_number,
    with_plans,
)
from tuner.cli.rehearse_leaders import rehearse_leaders
from tuner.storage.stored_studies import StoredStudies
from tuner.terminal.console import NOTHING_WORKS, config_in_words, print_json, printable, say, warn

if TYPE_CHECKING:  # these load numpy
    from costmodels.job.parallel_config import ParallelConfig
    from trials.started import Started
    from tuner.export import Export
    from tuner.forecast.prepared import Prepared
    from tuner.rehearsal.answer import RankAnswer
    from tuner.study_file.request import StudyRequest

STAGES, ALL = "stages", "all"
OPTION = "--program"
LIMIT_S = 600.0
"""Default time limit of the rehearsal of one configuration [s]."""
SHOWN_PLACES = 8
"""Largest number of places that are named."""


def rehearse(
    study: StudyFile,
    chosen: Annotated[
        str | None,
        Option(
            "--config",
            metavar="pp=4,tp=2,...",
            help="Configuration; by default the current one, or with --export the study's best.",
        ),
    ] = None,
    leaders: Annotated[
        str | None,
        Option(metavar="N", help="Rehearse the first N configurations of `meshtune rank` instead, with one import."),
    ] = None,
    again: Annotated[
        bool, Option("--again", help="With --leaders, rehearse also those whose answers the study's storage keeps.")
    ] = False,
    ranks: Annotated[
        str, Option(metavar="stages|all|0,7", help="Ranks to run: the first of each stage, all, or these.")
    ] = STAGES,
    whole: Annotated[
        bool, Option("--all-micro-batches", help="Make all micro-batches of a step, not as many as fill the pipeline.")
    ] = False,
    timed: Annotated[
        bool, Option("--time", help="Replay what the ranks ran in the event simulator: how long does a step take?")
    ] = False,
    export: Annotated[
        str | None,
        Option(
            "--export",
            metavar="TARGET",
            help="Run the program with the flags of `meshtune export --to TARGET`: do they train?",
            autocompletion=targets,
        ),
    ] = None,
    program: Annotated[
        str | None,
        Option(
            metavar="'pretrain.py ...'",
            help="Program for --export, with its own flags of model and data; by default that of the trials.",
        ),
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Run the program without asking.")] = False,
    unconfined: Annotated[
        bool, Option("--unconfined", help="Run it also where nothing can be put between the program and this machine.")
    ] = False,
    limit: Annotated[
        str | None,
        Option(
            metavar="S", help="Time limit of the whole rehearsal [s]; 600, or 60 for each of --leaders, by default."
        ),
    ] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run the study's own program on this machine's CPU, as one rank of each stage: does it train, and in what memory?

    Tensors have shapes and no data, process groups send nothing, and no accelerator is needed. The program runs in its
    own Python environment, without network, and what it writes is thrown away. Any training program of PyTorch or JAX
    can be rehearsed; see `docs/rehearsal.md`. The status is 0 if all of them are accepted, and 1 otherwise.
    """
    limit_s = None if limit is None else number("--limit", limit, above_zero=True)
    if program is not None and export is None:
        raise ConfigError("is a program for exported flags", key=OPTION, value=program, nearest="--export TARGET")
    if leaders is not None:
        count = whole_number("--leaders", leaders, 1)
        _check_alone(chosen=chosen, ranks=ranks, whole=whole, export=export)
        request = load(study, overrides, storage)
        _agree(yes=yes)
        rehearse_leaders(request, count, again=again, limit_s=limit_s, unconfined=unconfined, as_json=as_json)
        return
    if again:
        raise ConfigError("needs --leaders, whose answers are kept", key="--again")
    request = load(study, overrides, storage)
    prepared, config = _chosen(request, chosen, is_best=export is not None)
    exported = None if export is None else _exported(prepared, config, export)
    starts = _starts(prepared, config, exported, program)
    chosen_ranks = _ranks(ranks, config)
    _agree(yes=yes)
    say(f"Rehearsing {config_in_words(prepared.problem, config)}", err=True)
    key = "trial.command" if program is None else OPTION
    answers = _rehearsed(
        prepared,
        config,
        starts,
        chosen_ranks,
        key=key,
        whole=whole,
        timed=timed,
        limit_s=limit_s or LIMIT_S,
        unconfined=unconfined,
        is_quiet=as_json,
    )
    predicted = _predicted_bytes(prepared, config)
    if as_json:
        told = {} if exported is None else {"exported": {"target": export, "arguments": list(exported.arguments)}}
        print_json(
            _payload(prepared, config, answers, predicted) | told | (_times(prepared, config, answers) if timed else {})
        )
    else:
        _print_summary(answers, predicted)
        if timed:
            _print_times(_times(prepared, config, answers))
    if any(answer.verdict != "accepted" for answer in answers):
        raise typer.Exit(FOUND_NOTHING)


def _check_alone(*, chosen: str | None, ranks: str, whole: bool, export: str | None) -> None:
    """Refuse options that name one configuration, or how it runs, beside `--leaders`.

    Raises:
        ConfigError: One is given.
    """
    given = {"--config": chosen, "--ranks": None if ranks == STAGES else ranks, "--all-micro-batches": whole or None}
    given["--export"] = export
    for key, value in given.items():
        if value is not None:
            rule = "cannot be combined with --leaders, which rehearses each as the first rank of every stage"
            raise ConfigError(rule, key=key, value=value)


def _agree(*, yes: bool) -> None:
    """Ask whether the program may run, unless `--yes` has answered.

    Raises:
        ConfigError: It was not confirmed.
    """
    question = "Run the study's program here, behind a boundary?"
    if not yes and not (sys.stdin.isatty() and typer.confirm(question, err=True)):
        rule = "runs the study's program, and was not confirmed"
        raise ConfigError(rule, key="rehearse", nearest="--yes confirms it")


def _chosen(request: StudyRequest, text: str | None, *, is_best: bool) -> tuple[Prepared, ParallelConfig]:
    """Return the study and the configuration to rehearse, by default its current or its best one."""
    stored = StoredStudies(request.storage)
    if text is not None or not is_best:
        wanted, notes = launchable_config(request, CURRENT if text is None else text)
        warn(notes)
        prepared = with_plans(request, stored, wanted)
        return prepared, prepared.problem.with_knobs(wanted)
    from tuner.answers.best import best_known

    prepared = with_plans(request, stored)
    found = best_known(prepared, stored.find(request.name))
    if found is None:
        say(NOTHING_WORKS, err=True)
        raise typer.Exit(FOUND_NOTHING)
    return prepared, found.config


def _exported(prepared: Prepared, config: ParallelConfig, target: str) -> Export:
    """Return the configuration as `meshtune export --to` writes it."""
    from tuner.answers.basis import basis_of
    from tuner.answers.export import export_configuration
    from tuner.export import find_exporter

    prepared.problem.subject.check_target(target)
    find_exporter(target, key="--export")
    basis = basis_of(prepared.request, StoredStudies(prepared.request.storage), prepared)
    exported = export_configuration(prepared, basis, config, target)
    warn(exported.notes)
    return exported


def _starts(prepared: Prepared, config: ParallelConfig, exported: Export | None, program: str | None) -> Started:
    """Return what is started: what a trial starts, or a program with exported flags."""
    from trials.started import Started
    from tuner.rehearsal.exported import with_exported_flags
    from tuner.run.single_trial import num_trials

    of_trial = Started(in_words="")
    if program is None:
        of_trial = prepared.backend.loading_nothing().starts(config, trial_number=num_trials(prepared))
    return of_trial if exported is None else with_exported_flags(of_trial, exported, program, Path.cwd())


def _rehearsed(
    prepared: Prepared,
    config: ParallelConfig,
    starts: Started,
    ranks: tuple[int, ...],
    *,
    key: str,
    whole: bool,
    timed: bool,
    limit_s: float,
    unconfined: bool,
    is_quiet: bool,
) -> list[RankAnswer]:
    """Rehearse the ranks, and show each answer as it comes."""
    from hardware.compute_capability import capability_of
    from tuner.capture.run_script import NoBoundaryError
    from tuner.rehearsal.program import program_of
    from tuner.rehearsal.run import cases_of, enough_micro_batches, rehearse

    try:
        program = program_of(starts, os.environ, key)
    except ConfigError as error:
        raise (error if key == OPTION else error.in_file(prepared.request.file)) from None
    device = prepared.problem.cluster.devices[0]
    if capability_of(device) is None:
        warn([f"the compute capability of {device.name} is not known here; the program is told 9.0, that of H100"])
    answers = []
    try:
        for answer in rehearse(
            cases_of(program, config, ranks, None if whole else enough_micro_batches(config), has_order=timed),
            device=device,
            jobs=len(os.sched_getaffinity(0)),
            limit_s=limit_s,
            unconfined=unconfined,
            has_order=timed,
            environment=os.environ,
        ):
            answers.append(answer)
            if not is_quiet:
                _print_answer(answer)
    except NoBoundaryError as error:
        rule = f"runs no program of which nothing keeps this machine apart ({error})"
        raise ConfigError(rule, key="rehearse", nearest="--unconfined runs it all the same") from None
    return answers


def _ranks(ranks: str, config: ParallelConfig) -> tuple[int, ...]:
    """Return the ranks that `--ranks` names.

    Raises:
        ConfigError: it names none, or one outside the world.
    """
    from tuner.rehearsal.run import one_rank_a_stage

    if ranks == STAGES:
        return one_rank_a_stage(config)
    world = config.num_devices
    numbers = range(world) if ranks == ALL else [whole_number("--ranks", one.strip(), 0) for one in ranks.split(",")]
    outside = next((number for number in numbers if number >= world), None)
    if outside is not None:
        raise ConfigError(f"is no rank of {world}, which begin at 0", key="--ranks", value=outside)
    return tuple(numbers)


def _predicted_bytes(prepared: Prepared, config: ParallelConfig) -> list[int] | None:
    """Return the bytes of tensors that the cost model predicts at each stage's peak; None where it has no model."""
    from costmodels.step.memory.peak import stage_memory

    try:
        setting = prepared.problem.subject.setting
    except ConfigError:  # a step of the user's own is predicted as a whole
        return None
    return [round(size) for size in stage_memory(setting, config).peak_as("allocated")]


def _times(prepared: Prepared, config: ParallelConfig, answers: list[RankAnswer]) -> dict[str, Any]:
    """Return the time of a step as it is replayed, of each rank alone, and by the closed form [s]; null if unknown."""
    from costmodels.job.parallel_config import ConfigGrid
    from costmodels.step.memory.peak import busiest_micro_batches
    from costmodels.step.step_time import estimate_step
    from tuner.rehearsal.replay import replayed_step

    try:
        setting = prepared.problem.subject.setting
    except ConfigError:  # a step of the user's own has no model whose runtime could price it
        return {"step_s": None, "ranks_s": None, "predicted_step_s": None}
    grid = ConfigGrid.from_configs([config])
    closed_s = float(estimate_step(setting, grid).step_time_s[0])
    accepted = [answer for answer in answers if answer.verdict == "accepted"]
    found = replayed_step(setting, config, accepted, int(busiest_micro_batches(setting.job, grid)[0]))
    return {
        "step_s": None if found is None else found.step_s,
        "ranks_s": None if found is None else [found.ranks_s.get(answer.rank) for answer in answers],
        "predicted_step_s": closed_s,
    }


def _print_times(times: dict[str, Any]) -> None:
    if times["predicted_step_s"] is None:
        return
    closed = f"closed form {predicted(times['predicted_step_s'])} s"
    if times["step_s"] is None:
        typer.echo(f"Step time: {closed}; a replay needs a rank of every stage that is accepted.")
        return
    typer.echo(f"Step time: replayed {predicted(times['step_s'])} s, {closed}.")


def _print_answer(answer: RankAnswer) -> None:
    told = f"stage {answer.stage}, rank {answer.rank}: {answer.verdict}"
    if answer.peak_bytes is not None and answer.verdict == "accepted":
        told += f", {answer.peak_bytes / 2**30:.2f} GiB at the peak, {answer.cpu_s or 0.0:.1f} s of CPU time"
        told += " a step" if answer.framework == "torch" else ""
    typer.echo(told)
    if answer.error is not None:
        typer.echo(f"  {printable(answer.error)}")
        for line in answer.where:
            typer.echo(f"    {printable(line)}")


def _print_summary(answers: list[RankAnswer], predicted: list[int] | None) -> None:
    from tuner.rehearsal.answer import PARTS
    from tuner.rehearsal.workspaces import ERROR_BYTES

    accepted = [answer for answer in answers if answer.peak_bytes is not None and answer.verdict == "accepted"]
    if not accepted:
        return
    typer.echo(f"{'stage':>5} {'rank':>5} {'parameters':>14} {' '.join(f'{part:>11}' for part in PARTS)}   peak GiB")
    for answer in accepted:
        parts = " ".join(f"{answer.parts.get(part, 0) / 2**30:11.2f}" for part in PARTS)
        peak_gib = (answer.peak_bytes or 0) / 2**30
        typer.echo(f"{answer.stage:5} {answer.rank:5} {answer.parameters or 0:14,} {parts} {peak_gib:10.2f}")
    if workspace := max(answer.workspace_bytes for answer in accepted):
        typer.echo(
            f"Beside the tensors: {workspace / 2**30:.2f} GiB of workspaces of cuBLAS (+- {ERROR_BYTES / 2**30:.2f})."
        )
    if predicted is not None:
        shown = ", ".join(f"{size / 2**30:.2f}" for size in predicted)
        typer.echo(f"The cost model predicts {shown} GiB of tensors at the peak of each stage.")
    if accepted[0].framework == "jax":
        typer.echo(_of_jax(accepted[0]))
    made, of_step = accepted[0].micro_batches or (0, 0)
    if made < of_step:
        follows = "the figures of all follow" if accepted[0].is_whole_step else "with more, no stage holds more"
        typer.echo(f"Made {made} of the {of_step} micro-batches of a step: {follows}.")
    if places := {place for answer in accepted for place in answer.invented}:
        typer.echo(f"Answers that no data gave, and other stand-ins, at {len(places)} places (--json counts them):")
        for place in sorted(places)[:SHOWN_PLACES]:
            typer.echo(f"  {printable(place)}")


def _of_jax(answer: RankAnswer) -> str:
    """Return what is to be known of the figures of a compiled program."""
    told = "XLA compiled one program for all ranks"
    if answer.compiled_for == "gpu":
        return f"{told}; activations are its temporaries, gradients among them."
    return (
        f"{told}, for CPUs: temporaries, gradients and activations, are those of a CPU's schedule. "
        "The packages jax-cuda12-pjrt and jax-cuda12-plugin have its compiler for GPUs, which needs none."
    )


def _payload(
    prepared: Prepared, config: ParallelConfig, answers: list[RankAnswer], predicted: list[int] | None
) -> dict[str, Any]:
    return {
        "config": config.values(prepared.problem.dimensions),
        "world": config.num_devices,
        "ranks": [answer.as_json() for answer in answers],
        "predicted_bytes": predicted,
    }
