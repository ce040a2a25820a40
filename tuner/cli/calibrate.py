"""Command `meshtune calibrate`: fit a runtime's profile to measured steps, or time operators on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from hardware.io.errors import ConfigError
from hardware.io.output_file import check_place
from tuner.cli.options import FOUND_NOTHING, AsJson, Overrides, Storage, check_out, load, number
from tuner.terminal.console import NOTHING_WORKS, print_calibration, print_device_calibration, print_json, warn


def calibrate(
    measured: Annotated[
        list[Path] | None,
        Option(metavar="CSV...", help="CSV files of measured runs, in the format of configs/measured."),
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Profile to write; a study names it as its runtime. With --device: HTML page to write."
        ),
    ] = None,
    more: Annotated[list[Path] | None, Argument(metavar="CSV", help="Further CSV files.", show_default=False)] = None,
    runtime: Annotated[
        str | None, Option(metavar="NAME", help="Runtime to fit, if the files hold runs of several.")
    ] = None,
    device: Annotated[
        Path | None, Option(metavar="STUDY", help="Study whose operators and collectives are timed on this machine.")
    ] = None,
    seconds: Annotated[
        str | None, Option(metavar="S", help="With --device: time budget; by default 120 on a CPU, 300 on a GPU.")
    ] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    force: Annotated[
        bool, Option("--force", help="Replace an existing file; with --device also repeat known measurements.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fit a runtime's profile to measured steps, or measure the operators of a study's device on this machine.

    With --measured and --out, the constants of a runtime's profile are fitted to measured runs. The output names the
    constants that the runs do not determine. With --device, operators and collectives are timed in isolation. Later
    studies on that device that use the same storage start from these times.
    """
    if out is not None:
        check_out(out)
    if device is None:
        given = {"--seconds": seconds, "--storage": storage, "--set": overrides and overrides[0]}
        for option, value in given.items():
            if value is not None:
                raise ConfigError("belongs to --device", key=option, value=value)
        _fit(measured, out, more, runtime, force=force, as_json=as_json)
        return
    files = [*(measured or []), *(more or [])]
    for option, text in {"--measured": str(files[0]) if files else None, "--runtime": runtime}.items():
        if text is not None:
            raise ConfigError("cannot be combined with --device, which reads no measured runs", key=option, value=text)
    _measure(device, seconds, storage, overrides, out, force=force, as_json=as_json)


def _fit(
    measured: list[Path] | None,
    out: Path | None,
    more: list[Path] | None,
    runtime: str | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    from tuner.calibrate.measured_steps import calibrate_file

    if not measured or out is None:
        missing = "--out" if measured else "--measured"
        raise ConfigError(
            f"needs {missing}: use either --measured CSV --out PROFILE or --device STUDY", key="calibrate"
        )
    done = calibrate_file(
        [*measured, *(more or [])],
        out,
        runtime=runtime,
        overwrite=force,
        on_progress=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        print_json(done.as_json())
    else:
        print_calibration(done)


def _measure(
    study: Path,
    seconds: str | None,
    storage: str | None,
    overrides: list[str] | None,
    out: Path | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    limit_s = None if seconds is None else number("--seconds", seconds, above_zero=True)
    if out is not None and out.suffix != ".html":
        raise ConfigError("must end in .html: with --device it is an HTML page", key="--out", value=str(out))
    request = load(study, overrides, storage)

    # Import after reading the study: loading Optuna takes seconds, and mistakes should be told at once.
    from tuner.calibrate.device import calibrate_device
    from tuner.report.calibration_page import write_calibration_page
    from tuner.terminal.progress import CalibrationLine

    if out is not None:
        check_place(out)
    with CalibrationLine(request.problem.cluster.device_names) as line:
        done = calibrate_device(request, seconds=limit_s, force=force, on_progress=line.show)
    if done is None:
        typer.echo(NOTHING_WORKS, err=True)
        raise typer.Exit(FOUND_NOTHING)
    plot = None if out is None else write_calibration_page(done, out)
    warn(done.notes)
    if as_json:
        print_json(done.as_json(plot))
    else:
        print_device_calibration(done, plot)
    if not done.samples:
        raise typer.Exit(FOUND_NOTHING)
