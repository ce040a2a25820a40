"""Command `meshtune estimate`: days, device-hours and cost of a whole training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from hardware.rounding import by_source
from tuner.cli.costs import load_with_prices, tokens_of
from tuner.cli.options import FOUND_NOTHING, AsJson, Overrides, Storage, StudyFile, tell_basis, with_plans
from tuner.storage.stored_studies import StoredStudies
from tuner.terminal.console import NOTHING_WORKS, in_words, print_json, say, warn
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # these load numpy
    from tuner.economics.training import Training, TrainingEstimate
    from tuner.study_file.request import Economics, StudyRequest
    from tuner.subject.problem import Problem


def estimate(
    study: StudyFile,
    tokens: Annotated[
        str | None,
        Option(metavar="N", help="Tokens to train on, for example 1e12, 300B or 15T; by default limits.tokens."),
    ] = None,
    hosts: Annotated[
        str | None, Option(metavar="2,4,8,...", help="Predict the training on these numbers of hosts too.")
    ] = None,
    prices: Annotated[
        Path | None, Option(metavar="FILE", help="Prices of device-hours (YAML); replaces the study's cost.prices.")
    ] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the days, device-hours and cost of a whole training, today and with the best configuration.

    Step times are measured where the study has tried a configuration, and else what its trials taught.
    """
    from tuner.answers.basis import basis_of
    from tuner.economics.training import estimate_training
    from tuner.forecast.sizes import parse_sizes

    config = load_with_prices(study, list(overrides or []), storage, prices)
    count = tokens_of(config.economics, tokens)
    stored = StoredStudies(config.storage)
    sizes = () if hosts is None else parse_sizes(config, hosts)
    prepared = with_plans(config, stored)
    basis = basis_of(config, stored, prepared, on_progress=lambda note: warn([note]))
    found = estimate_training(prepared, stored.find(config.name), basis, count, sizes)
    if as_json:
        print_json(_as_json(config.problem, found) | basis.as_json())
    elif found is not None:
        _print(found, config)
        tell_basis(basis)
    if found is None:
        if not as_json:
            typer.echo(NOTHING_WORKS, err=True)
        raise typer.Exit(FOUND_NOTHING)


def _as_json(problem: Problem, found: TrainingEstimate | None) -> dict[str, object]:
    from tuner.answers.gain import gains

    if found is None:
        return {"tokens": None, "trainings": [], "sizes": []}
    return {
        "tokens": found.tokens,
        "trainings": [training.as_json(problem.dimensions) for training in found.trainings],
        "sizes": [training.as_json(problem.dimensions) for training in found.sizes],
        "sizes_without": [{"hosts": hosts, "reason": reason} for hosts, reason in found.reasons],
        "saved_device_hours": found.saved_device_hours,
        "saved_device_hours_interval": found.saved_device_hours_interval and list(found.saved_device_hours_interval),
        **gains(found.compared),
        "tuning_device_hours": found.tuning_device_hours if found.takes_devices else None,
    }


def _print(found: TrainingEstimate, request: StudyRequest) -> None:
    from hardware.time_units import HOUR_S
    from tuner.economics.device_time import duration, hours
    from tuner.search.gain import COVERED
    from tuner.search.step_draws import slower_in_words

    steps = found.trainings[0].steps
    per_step = request.problem.setting.job.tokens_per_step
    typer.echo(f"{found.tokens:.4g} tokens are {steps:,} steps of {per_step:,} tokens.")
    print_table(["", *_columns(request.economics)], [_row(training, request.economics) for training in found.trainings])
    for training in found.trainings:
        typer.echo(f"{training.label}: {in_words(training.config.values(request.problem.dimensions))}")
        if training.range_s is not None:
            low, high = (duration(training.steps * step_s) for step_s in training.range_s)
            typer.echo(f"  {low} to {high} with probability 95%{slower_in_words(training.slower_probability)}")
    saved, between, compared = found.saved_device_hours, found.saved_device_hours_interval, found.compared
    if compared is not None and compared.reason:
        say(compared.not_compared)
    elif compared is not None and saved is not None:
        low, high = (hours(end * HOUR_S) for end in between or (saved, saved))
        told = "" if between is None else f", {low} to {high} with probability {COVERED:.0%}"
        # the table shows the measured steps, whose ratio is another
        best = "The best" if compared.measured_gain in (None, compared.gain) else "By all trials together, the best"
        say(f"{best} saves {hours(saved * HOUR_S)} device-hours over {compared.reference.in_words}{told}.")
        if compared.luck_in_words:
            say(f"It is {compared.gain:.3f}x as fast; {compared.luck_in_words}.")
    if found.takes_devices and found.tuning_device_hours:
        typer.echo(f"Tuning has taken {hours(found.tuning_device_hours * HOUR_S)} device-hours.")
    if found.sizes or found.reasons:
        typer.echo("\nBest on other numbers of hosts:")
        if found.sizes:
            print_table(
                ["hosts", *_columns(request.economics)], [_row(size, request.economics) for size in found.sizes]
            )
        for count, reason in found.reasons:
            typer.echo(f"{count} hosts: {reason}")


def _columns(economics: Economics) -> list[str]:
    """Return the heads of a table of trainings behind their labels."""
    cost = [] if economics.prices is None else [f"cost [{economics.prices.currency}]"]
    limits = ["breaks"] if economics.limits.are_set else []
    return ["devices", "step [s]", "source", "time", "device-hours", *cost, *limits]


def _row(training: Training, economics: Economics) -> list[str]:
    from hardware.time_units import HOUR_S
    from tuner.economics.cost_words import money
    from tuner.economics.device_time import duration, hours

    return [
        training.label,
        f"{training.devices:,}",
        by_source(training.step_time_s, training.source),
        training.source,
        duration(training.seconds),
        hours(training.device_hours * HOUR_S),
        *([] if economics.prices is None else ["-" if training.cost is None else money(training.cost)]),
        *([", ".join(training.breaks) or "none"] if economics.limits.are_set else []),
    ]
