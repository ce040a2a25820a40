"""Commands `doctor` and `backup`, for those who keep studies running on a cluster."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from tuner.cli.options import SOMETHING_WRONG, AsJson, Overrides, Storage, StudyFile, check_out, load
from tuner.run.endings import ending_signals
from tuner.terminal.console import print_json, printable, say


def doctor(
    study: Annotated[
        Path | None, Argument(metavar="[STUDY]", help="Study file (YAML); without one only this machine is looked at.")
    ] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Look for damage and for what dead drivers have left, and say what to do; it changes no study and ends nothing.

    Checks the storage's file, the claim of a driver that is gone, trials left running, and processes of Ray on this
    machine whose driver is dead. Exit status 1 if anything was found.
    """
    config = None if study is None else load(study, overrides, storage)

    from tuner.run.doctor import findings_of_machine, findings_of_study

    findings = [*(findings_of_study(config) if config else ()), *findings_of_machine()]
    if as_json:
        print_json(
            {
                "study_name": config.name if config else None,
                "storage": str(config.storage) if config else None,
                "findings": [asdict(finding) for finding in findings],
            }
        )
    for finding in () if as_json else findings:
        say(f"{finding.what}: {finding.found}")
        say(f"  {finding.advice}")
    if not findings and not as_json:
        say("Nothing is wrong.")
    if findings:
        raise typer.Exit(SOMETHING_WRONG)


def backup(
    study: StudyFile,
    target: Annotated[Path, Argument(metavar="TARGET", help="File to write; it must not exist.")],
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Copy the storage of a study, which may be running, to a new file.

    SQLite databases are copied as of one moment, journals up to their last complete entry, and the copy is checked. Of
    PostgreSQL, `pg_dump` makes copies. Runs continue from a copy with `--storage`.
    """
    request = load(study, overrides, storage)
    check_out(target, "TARGET")

    from tuner.storage.backup import back_up

    with ending_signals(lambda: None) as interrupted:
        try:
            written = back_up(request.storage, target)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None
    url = f"{request.storage.kind}:///{written}"
    if as_json:
        print_json({"study_name": request.name, "storage": str(request.storage), "backup": url})
    else:
        typer.echo(f"wrote {printable(str(written))}; it continues with --storage {printable(url)}")
