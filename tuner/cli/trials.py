"""Command `trials`: the table of a study's trials."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from hardware.io.errors import ConfigError
from tuner.cli.options import AsJson, Overrides, Storage, StudyFile, load, write_file
from tuner.terminal.console import print_json, printable, say, tell_columns
from tuner.terminal.tables import print_lines


def trials(
    study: StudyFile,
    as_csv: Annotated[bool, Option("--csv", help="Print the trials as CSV, with all columns.")] = False,
    out: Annotated[Path | None, Option(help="File to write the CSV to; by default stdout.")] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print all trials of a study, which may be running.

    Dimensions that have the same value in all trials have no column. The table fits the terminal; --csv and --json
    leave nothing out, except that a training's losses are in --json alone.
    """
    if as_csv and as_json:
        raise ConfigError("cannot be combined with --json", key="--csv")
    if out is not None and not as_csv:
        raise ConfigError("is where --csv writes", key="--out", value=str(out), nearest=f"--csv --out {out}")
    request = load(study, overrides, storage)

    from trials.backend import TrialAbility
    from tuner.answers.comparison import comparison_of
    from tuner.answers.reference import reference_of
    from tuner.answers.trial_parts import parts_in_words
    from tuner.answers.trial_rows import csv_of, trial_rows
    from tuner.forecast.planned_candidates import prepare_stored
    from tuner.run.studies import stored_study
    from tuner.storage.record import best_record, read_records
    from tuner.terminal.trial_table import style_of, table_lines

    stored = stored_study(request)
    prepared = prepare_stored(request, stored)
    records = read_records(stored)
    compared = comparison_of(reference_of(prepared.problem, stored), records)
    rows = trial_rows(records, compared)
    best = best_record(records)
    if as_json:
        print_json(
            {
                "study_name": request.name,
                "clock": request.trials.backend.clock,
                "compared_with": compared.name if compared else None,
                "best_trial": best.number if best else None,
                "trials": [asdict(row) for row in rows],
            }
        )
    elif as_csv:
        text = csv_of(rows, tuple(records[0].params) if records else prepared.problem.dimensions)
        if out is None:
            typer.echo(text, nl=False)
        else:
            write_file(out, text)
            typer.echo(f"wrote {printable(str(out))}", err=True)
    elif rows:
        width = shutil.get_terminal_size((80, 24)).columns
        first = best.number if best else None
        styles = {0: "bold"} | {at: style_of(row, first) for at, row in enumerate(rows, start=1)}
        print_lines(table_lines(rows, compared, first, width), styles)
        tell_columns([rows[0].config], rows[0].config)
        if TrialAbility.TRAINING in request.trials.backend.abilities and (parts := parts_in_words(records)):
            say(parts)
    else:
        typer.echo("No trial has begun yet.")
