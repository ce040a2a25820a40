"""`meshtune dashboard`: a study in the browser."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from hardware.io.errors import ConfigError, shown_url
from tuner.cli.options import AsJson, Overrides, Storage, StudyFile, load, whole_number
from tuner.terminal.console import print_json, warn

MAX_PORT = 65_535


def dashboard(
    study: StudyFile,
    port: Annotated[
        str | None, typer.Option(metavar="N", help="Port, 0 for a free one; 8080 without it, if free.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; the dashboard has no login.")] = (
        "127.0.0.1"
    ),
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show a study in the browser while it runs and afterwards: optuna-dashboard, with notes and logs of every trial.

    It reads the study, and keeps the notes that you write there; Ctrl-C ends it.
    """
    wanted = None if port is None else whole_number("--port", port, 0)
    if wanted is not None and wanted > MAX_PORT:
        raise ConfigError(f"must be at most {MAX_PORT}", key="--port", value=wanted)
    config = load(study, overrides, storage)

    from tuner.dashboard import Place, dashboard_server

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    opened = dashboard_server(config, Place(host=host, port=wanted))
    if opened.is_open:
        warn(["whoever reaches this address reads the study and its logs, and can write notes: there is no login"])
    if as_json:
        print_json(
            {
                "url": opened.url,
                "study_url": opened.study_url,
                "study_name": config.name,
                "storage": shown_url(config.storage),
            }
        )
    else:
        typer.echo(opened.study_url)
        typer.echo(f"what was found: {opened.study_url}/note; Ctrl-C ends it", err=True)
    opened.serve()
