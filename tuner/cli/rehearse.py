"""Command `meshtune rehearse`: the study's own program runs as single ranks on the CPU of this machine."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hardware.io.errors import ConfigError
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
    number,
    whole_number,
    with_plans,
)
from tuner.storage.stored_studies import StoredStudies
from tuner.terminal.console import config_in_words, print_json, printable, say, warn

if TYPE_CHECKING:  # these load numpy
    from costmodels.job.parallel_config import ParallelConfig
    from tuner.forecast.prepared import Prepared
    from tuner.rehearsal.answer import RankAnswer

STAGES, ALL = "stages", "all"
SHOWN_PLACES = 8
"""Largest number of places that are named."""


def rehearse(
    study: StudyFile,
    chosen: Config = CURRENT,
    ranks: Annotated[
        str, Option(metavar="stages|all|0,7", help="Ranks to run: the first of each stage, all, or these.")
    ] = STAGES,
    whole: Annotated[
        bool, Option("--all-micro-batches", help="Make all micro-batches of a step, not just twice pp of them.")
    ] = False,
    yes: Annotated[bool, Option("--yes", help="Run the program without asking.")] = False,
    unconfined: Annotated[
        bool, Option("--unconfined", help="Run it also where nothing can be put between the program and this machine.")
    ] = False,
    limit: Annotated[str, Option(metavar="S", help="Time limit of the whole rehearsal [s].")] = "600",
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run the study's own program on this machine's CPU, as one rank of each stage: does it train, and in what memory?

    Tensors have shapes and no data, process groups send nothing, and no accelerator is needed. The program runs in its
    own Python environment, without network, and what it writes is thrown away. Programs of Megatron-LM and
    torchtitan can be rehearsed; see `docs/rehearsal.md`.
    """
    limit_s = number("--limit", limit, above_zero=True)
    request = load(study, overrides, storage)
    wanted, notes = launchable_config(request, chosen)
    warn(notes)
    prepared = with_plans(request, StoredStudies(request.storage), wanted)
    config = prepared.problem.with_knobs(wanted)
    chosen_ranks = _ranks(ranks, config)
    question = "Run the study's program here, behind a boundary?"
    if not yes and not (sys.stdin.isatty() and typer.confirm(question, err=True)):
        rule = "runs the study's program, and was not confirmed"
        raise ConfigError(rule, key="rehearse", nearest="--yes confirms it")
    say(f"Rehearsing {config_in_words(prepared.problem, config)}", err=True)
    answers = _rehearsed(
        prepared, config, chosen_ranks, whole=whole, limit_s=limit_s, unconfined=unconfined, is_quiet=as_json
    )
    predicted = _predicted_bytes(prepared, config)
    if as_json:
        print_json(_payload(prepared, config, answers, predicted))
    else:
        _print_summary(answers, predicted)
    if any(answer.verdict != "accepted" for answer in answers):
        raise typer.Exit(FOUND_NOTHING)


def _rehearsed(
    prepared: Prepared,
    config: ParallelConfig,
    ranks: tuple[int, ...],
    *,
    whole: bool,
    limit_s: float,
    unconfined: bool,
    is_quiet: bool,
) -> list[RankAnswer]:
    """Rehearse the ranks, and show each answer as it comes."""
    from tuner.capture.run_script import NoBoundaryError
    from tuner.rehearsal.program import program_of
    from tuner.rehearsal.run import capability_of, cases_of, enough_micro_batches, rehearse
    from tuner.run.single_trial import num_trials

    starts = prepared.backend.starts(config, trial_number=num_trials(prepared))
    try:
        program = program_of(starts, os.environ)
    except ConfigError as error:
        raise error.in_file(prepared.request.file) from None
    device = prepared.problem.cluster.devices[0]
    if capability_of(device) is None:
        warn([f"the compute capability of {device.name} is not known here; the program is told 9.0, that of H100"])
    answers = []
    try:
        for answer in rehearse(
            cases_of(program, config, ranks, None if whole else enough_micro_batches(config)),
            device=device,
            limit_s=limit_s,
            unconfined=unconfined,
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


def _print_answer(answer: RankAnswer) -> None:
    told = f"stage {answer.stage}, rank {answer.rank}: {answer.verdict}"
    if answer.peak_bytes is not None and answer.verdict == "accepted":
        told += f", {answer.peak_bytes / 2**30:.2f} GiB at the peak, {answer.cpu_s or 0.0:.1f} s of CPU time a step"
    typer.echo(told)
    if answer.error is not None:
        typer.echo(f"  {printable(answer.error)}")
        for line in answer.where:
            typer.echo(f"    {printable(line)}")


def _print_summary(answers: list[RankAnswer], predicted: list[int] | None) -> None:
    from tuner.rehearsal.answer import PARTS

    accepted = [answer for answer in answers if answer.peak_bytes is not None and answer.verdict == "accepted"]
    if not accepted:
        return
    typer.echo(f"{'stage':>5} {'rank':>5} {'parameters':>14} {' '.join(f'{part:>11}' for part in PARTS)}   peak GiB")
    for answer in accepted:
        parts = " ".join(f"{answer.parts.get(part, 0) / 2**30:11.2f}" for part in PARTS)
        peak_gib = (answer.peak_bytes or 0) / 2**30
        typer.echo(f"{answer.stage:5} {answer.rank:5} {answer.parameters or 0:14,} {parts} {peak_gib:10.2f}")
    if predicted is not None:
        shown = ", ".join(f"{size / 2**30:.2f}" for size in predicted)
        typer.echo(f"The cost model predicts {shown} GiB of tensors at the peak of each stage.")
    made, of_step = accepted[0].micro_batches or (0, 0)
    if made < of_step:
        typer.echo(f"Made {made} of the {of_step} micro-batches of a step: with more, no stage holds more.")
    if places := {place for answer in accepted for place in answer.invented}:
        typer.echo(f"Answers that no data gave, at {len(places)} places (--json counts them):")
        for place in sorted(places)[:SHOWN_PLACES]:
            typer.echo(f"  {printable(place)}")


def _payload(
    prepared: Prepared, config: ParallelConfig, answers: list[RankAnswer], predicted: list[int] | None
) -> dict[str, Any]:
    return {
        "config": config.values(prepared.problem.dimensions),
        "world": config.num_devices,
        "ranks": [answer.as_json() for answer in answers],
        "predicted_bytes": predicted,
    }
