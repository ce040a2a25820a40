"""Command `meshtune dashboard`: show a study in the browser."""

from __future__ import annotations

import signal
from typing import Annotated

import typer
from typer import Option

from hardware.io.errors import ConfigError
from tuner.cli.options import AsJson, Overrides, Storage, StudyFile, load, whole_number
from tuner.terminal.console import print_json, warn

MAX_PORT = 65_535


def dashboard(
    study: StudyFile,
    port: Annotated[
        str | None, Option(metavar="N", help="Port to listen on; 0 picks a free one. By default 8080 if it is free.")
    ] = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="Address to listen on; the dashboard has no login.")] = (
        "127.0.0.1"
    ),
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show a study in the browser, while it runs and afterwards.

    The page is optuna-dashboard, with notes and logs for every trial. It only reads the study, except for notes edited
    there. Ctrl-C stops the server.
    """
    wanted = None if port is None else whole_number("--port", port, 0)
    if wanted is not None and wanted > MAX_PORT:
        raise ConfigError(f"must be at most {MAX_PORT}", key="--port", value=wanted)
    request = load(study, overrides, storage)

    from tuner.dashboard import Place, dashboard_server

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    opened = dashboard_server(request, Place(host=host, port=wanted))
    if opened.is_open:
        warn(["the dashboard has no login: anybody who can reach this address can read the study and edit its notes"])
    if as_json:
        print_json(
            {
                "url": opened.url,
                "study_url": opened.study_url,
                "study_name": request.name,
                "storage": str(request.storage),
            }
        )
    else:
        typer.echo(opened.study_url)
        typer.echo("press Ctrl-C to stop", err=True)
    opened.serve()
