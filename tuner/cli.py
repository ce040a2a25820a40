"""The command `meshtune`. Heavy imports stand inside the commands, so that `--help` answers at once.

Results go to stdout, as one JSON object with `--json`; progress, warnings and errors go to stderr. Exit status: 0 done,
1 ran but found nothing, 2 the user's mistake (told in one message), 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hardware.errors import ConfigError

if TYPE_CHECKING:  # these load numpy, Optuna and Ray
    from tuner.config import StudyConfig
    from tuner.study import RunResult

app = typer.Typer(
    name="meshtune",
    help="Finds the fastest parallelism configuration for training a large language model on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="Study file (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the study file, e.g. search.seed=3."),
]
Storage = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Database of the study; wins over MESHTUNE_STORAGE and the study file."),
]
Config = Annotated[
    str,
    typer.Option("--config", metavar="pp=4,tp=2,...", help="A configuration; what is left out is 1 or the job's."),
]

FOUND_NOTHING = 1
USERS_MISTAKE = 2
INTERRUPTED = 130


def main() -> NoReturn:
    """Runs the command line and exits; a user's mistake ends in one message and status 2."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"meshtune: {error}", err=True)
        sys.exit(USERS_MISTAKE)
    except KeyboardInterrupt:
        typer.echo("meshtune: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(0)


@app.command()
def run(
    study: StudyFile,
    trials: Annotated[int | None, typer.Option(min=1, help="Budget of trials; replaces search.max_trials.")] = None,
    storage: Storage = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Replaces search.seed.")] = None,
    overrides: Overrides = None,
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Existing Ray cluster; wins over RAY_ADDRESS.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tune: try the most promising configurations in parallel, stop when confident, print the best.

    The same command continues a study that was interrupted.
    """
    from tuner.progress import ProgressLine
    from tuner.study import run_study

    changes = list(overrides or [])
    changes += [f"search.max_trials={trials}"] if trials is not None else []
    changes += [f"search.seed={seed}"] if seed is not None else []
    config = _load(study, changes, storage)
    signal.signal(signal.SIGTERM, _interrupt)
    with ProgressLine(config) as line:
        result = run_study(config, on_progress=line.show, ray_address=ray_address)
    _warn(result.warnings)
    payload = _run_payload(config, result)
    if as_json:
        _print_json(payload)
    else:
        _print_run(config, result, payload)
    if result.stop_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if result.best is None:
        raise typer.Exit(FOUND_NOTHING)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _run_payload(config: StudyConfig, result: RunResult) -> dict[str, Any]:
    from tuner.candidates import tokens_per_s_per_device
    from tuner.storage import shown_url

    best = result.best
    step_time_s = best.step_time_s if best else None
    return {
        "best": best.params if best else None,
        "step_time_s": step_time_s,
        "tokens_per_s_per_device": tokens_per_s_per_device(config.setting, step_time_s) if step_time_s else None,
        "source": config.backend.origin,
        "trials": len(result.records),
        "failed": _num_failed(result.records),
        "candidates": result.num_candidates,
        "p_star": result.p_star,
        "stop_reason": result.stop_reason.value,
        "study_name": config.name,
        "storage": shown_url(config.storage),
    }


def _num_failed(records: list[Any]) -> int:
    return sum(record.finished and record.step_time_s is None for record in records)


def _print_run(config: StudyConfig, result: RunResult, payload: Mapping[str, Any]) -> None:
    from tuner.export import find_exporter
    from tuner.record import expert_step_time_s

    told = f"{payload['trials']} trials ({payload['failed']} failed) of {payload['candidates']} candidates"
    typer.echo(f"Stopped: {result.stop_reason.sentence} (p_star {payload['p_star']:.2f}). {told}.")
    if result.best is None or result.best.step_time_s is None:
        typer.echo("No configuration completed a trial.")
        return
    source = "SYNTHETIC: a simulated world, not a measurement" if payload["source"] == "synthetic" else "measured"
    best_s = result.best.step_time_s
    typer.echo(f"Best: {_in_words(result.best.params)}")
    typer.echo(f"  {best_s:.4g} s per step, {payload['tokens_per_s_per_device']:,.0f} tokens/s per device ({source})")
    if config.expert is not None:
        expert_s = expert_step_time_s(result.records, config.expert.values(config.dimensions))
        if expert_s is not None:
            typer.echo(f"  {expert_s / best_s:.3f}x as fast as the expert's configuration ({expert_s:.4g} s)")
    if config.measured is not None:
        fastest_s = min(run.step_time_s for run in config.measured.runs if run.step_time_s is not None)
        share = payload["trials"] / payload["candidates"]
        typer.echo(
            f"  {best_s / fastest_s - 1:.1%} slower than the fastest of all measured rows ({fastest_s:.4g} s), found with "
            f"{share:.0%} of them tried"
        )
    typer.echo("Flags for Megatron-LM:")
    export = find_exporter("megatron")(config.setting, config.config_of(result.best.params))
    typer.echo(export.text)


@app.command()
def space(
    study: StudyFile,
    list_configs: Annotated[bool, typer.Option("--list", help="Print every candidate.")] = False,
    why: Annotated[
        str | None, typer.Option(metavar="pp=8,tp=3,...", help="Tell every rule that a configuration breaks.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Count the configurations that can work, and tell why the others cannot."""
    from costmodels.parallel import parse_config
    from tuner.space import why_not

    config = _load(study, overrides)
    if why is not None:
        chosen = parse_config(why, config.config_defaults, option="--why")
        reasons = why_not(config.setting, config.options, chosen)
        if as_json:
            _print_json({"config": chosen.values(config.dimensions), "reasons": reasons})
        else:
            typer.echo(f"{chosen}" + (" breaks:" if reasons else " breaks no rule and fits in memory."))
            for name, reason in reasons.items():
                typer.echo(f"  {name}: {reason}")
        return
    found = config.space()
    _warn(found.warnings)
    configs = [found.grid.values(position) for position in range(len(found.grid))] if list_configs else []
    payload: dict[str, Any] = {
        "grid": found.num_before_memory,
        "feasible": len(found.grid),
        "removed": found.removed,
    }
    if as_json:
        _print_json(payload | ({"configs": configs} if list_configs else {}))
    else:
        for values in configs:
            typer.echo(_in_words(values))
        typer.echo(
            f"{payload['grid']:,} configurations obey every rule, {payload['feasible']:,} of them fit in memory."
        )
        for name, count in sorted(found.removed.items(), key=lambda entry: -entry[1]):
            typer.echo(f"  {name:<28} removed {count:>14,}")
    if not len(found.grid):
        raise typer.Exit(FOUND_NOTHING)


@app.command()
def predict(study: StudyFile, chosen: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Predict step time and memory of one configuration, in the searched space or not."""
    from costmodels.parallel import parse_config
    from tuner.candidates import predicted
    from tuner.space import broken_rules, launchable

    config = _load(study, overrides)
    wanted = parse_config(chosen, config.config_defaults)
    broken = broken_rules(config.setting, config.options, wanted)
    if not launchable(config.setting, wanted):
        raise ConfigError(
            "cannot be launched: " + "; ".join(broken.values()),
            file=config.file,
            key="--config",
            value=str(wanted),
            nearest="`meshtune space --list` prints configurations that can",
        )
    _warn(tuple(f"{name}: {reason}" for name, reason in broken.items()))
    payload = predicted(config, wanted)
    if as_json:
        _print_json(payload)
        return
    typer.echo(
        f"{payload['step_time_s']:.4g} s per step, {payload['tokens_per_s_per_device']:,.0f} tokens/s per device"
    )
    typer.echo(f"MFU {payload['mfu']:.1%} (predicted)")
    for part, seconds in payload["breakdown_s"].items():
        if seconds:
            typer.echo(f"  {part:<12} {seconds:10.4f} s  {seconds / payload['step_time_s']:6.1%}")
    fits = "fits" if payload["fits"] else "DOES NOT FIT"
    capacity = payload["memory_capacity_bytes"]
    typer.echo(f"{payload['peak_memory_bytes'] / 2**30:.1f} GiB of {capacity / 2**30:.1f} GiB per device: {fits}")
    for part, size in payload["memory_bytes"].items():
        if size:
            typer.echo(f"  {part:<12} {size / 2**30:10.2f} GiB")


@app.command()
def rank(
    study: StudyFile,
    top: Annotated[int, typer.Option(min=1, help="How many configurations to print.")] = 10,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the configurations that the cost model predicts to be fastest; no trial is run."""
    import numpy as np

    from tuner.candidates import candidates_of, tokens_per_s_per_device

    config = _load(study, overrides)
    candidates = candidates_of(config)
    _warn(candidates.space.warnings)
    step_time_s, grid = candidates.estimate.step_time_s, candidates.space.grid
    rows = [
        {
            **grid.values(int(position)),
            "step_time_s": float(step_time_s[position]),
            "peak_memory_bytes": int(candidates.space.memory.peak_bytes[position]),
            "tokens_per_s_per_device": tokens_per_s_per_device(config.setting, float(step_time_s[position])),
        }
        for position in np.argsort(step_time_s, kind="stable")[:top]
    ]
    if as_json:
        _print_json({"configs": rows})
    else:
        _print_table(
            ["rank", *grid.dimensions, "step [s]", "memory [GiB]", "tokens/s/device"],
            [
                [
                    str(place),
                    *(str(row[name]) for name in grid.dimensions),
                    f"{row['step_time_s']:.4g}",
                    f"{row['peak_memory_bytes'] / 2**30:.1f}",
                    f"{row['tokens_per_s_per_device']:,.0f}",
                ]
                for place, row in enumerate(rows, start=1)
            ],
        )
    if not rows:
        raise typer.Exit(FOUND_NOTHING)


@app.command()
def status(study: StudyFile, storage: Storage = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tell how far a study is; it may be running."""
    from tuner.record import STOP_REASON, best_record, read_records
    from tuner.sampler import P_STAR
    from tuner.study import is_running, stored_study

    config = _load(study, overrides, storage)
    stored = stored_study(config)
    records = read_records(stored)
    best = best_record(records)
    running = is_running(stored)
    payload = {
        "study_name": config.name,
        "trials": len(records),
        "running": sum(not record.finished for record in records) if running else 0,
        "failed": _num_failed(records),
        "best_step_time_s": best.step_time_s if best else None,
        "p_star": stored.user_attrs.get(P_STAR, 0.0),
        "stop_reason": None if running else stored.user_attrs.get(STOP_REASON, "interrupted"),
    }
    if as_json:
        _print_json(payload)
        return
    state = "running" if running else f"stopped ({payload['stop_reason']})"
    typer.echo(f"{config.name}: {state}, {payload['trials']} trials, {payload['failed']} failed")
    if best is not None:
        typer.echo(f"Best {best.step_time_s:.4g} s with {_in_words(best.params)}; p_star {payload['p_star']:.2f}")


@app.command()
def best(study: StudyFile, storage: Storage = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the best configuration: measured if the study has run, else predicted."""
    from tuner.best import best_configuration

    config = _load(study, overrides, storage)
    found = best_configuration(config)
    if found is None:
        _finish_empty(as_json, {"config": None, "step_time_s": None, "source": None, "gain_over_expert": None})
    payload = {
        "config": found.config.values(config.dimensions),
        "step_time_s": found.step_time_s,
        "source": found.source,
        "gain_over_expert": found.gain_over_expert,
    }
    if as_json:
        _print_json(payload)
        return
    typer.echo(f"{_in_words(payload['config'])}: {found.step_time_s:.4g} s per step ({found.source})")
    if found.gain_over_expert is not None:
        typer.echo(f"{found.gain_over_expert:.3f}x as fast as the expert's configuration")


@app.command()
def report(
    study: StudyFile,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that shows what was found and why."""
    from tuner.report import write_report

    written = write_report(_load(study, overrides, storage), out)
    _tell_written(str(written), as_json)


@app.command()
def export(
    study: StudyFile,
    to: Annotated[str, typer.Option(metavar="TARGET", help="megatron or json.")],
    chosen: Annotated[
        str | None, typer.Option("--config", metavar="pp=4,...", help="Instead of the study's best.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; stdout without it.")] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the best configuration as flags for a training framework."""
    from costmodels.parallel import parse_config
    from tuner.best import best_configuration
    from tuner.export import find_exporter

    exporter = find_exporter(to)
    config = _load(study, overrides, storage)
    if chosen is not None:
        wanted = parse_config(chosen, config.config_defaults)
    else:
        found = best_configuration(config)
        if found is None:
            _finish_empty(as_json, {"target": to, "text": None, "notes": []})
        wanted = found.config
        if found.source != "measured":
            _warn((f"this configuration is {found.source}, not measured",))
    exported = exporter(config.setting, wanted)
    if out is not None:
        _write(out, exported.text)
    if as_json:
        written = {"written": str(out)} if out else {}
        _print_json({"target": to, "text": exported.text, "notes": list(exported.notes)} | written)
        return
    if out is None:
        typer.echo(exported.text)
    else:
        typer.echo(f"wrote {out}", err=True)
    _warn(exported.notes)


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", key="--out", value=str(out)) from None


def _load(study: Path, overrides: list[str] | None = None, storage: str | None = None) -> StudyConfig:
    from tuner.config import load_study

    return load_study(study, overrides=overrides or (), storage=storage)


def _finish_empty(as_json: bool, payload: Mapping[str, Any]) -> NoReturn:
    if as_json:
        _print_json(payload)
    else:
        typer.echo("No configuration works; `meshtune space` tells why.", err=True)
    raise typer.Exit(FOUND_NOTHING)


def _tell_written(file: str, as_json: bool) -> None:
    if as_json:
        _print_json({"written": file})
    else:
        typer.echo(f"wrote {file}")


def _print_json(payload: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(payload, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's."""
    return value.item()


def _in_words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _warn(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        typer.echo(f"note: {warning}", err=True)


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    line: Callable[[list[str]], str] = lambda cells: "  ".join(  # noqa: E731 # used three lines below only
        cell.rjust(width) for cell, width in zip(cells, widths, strict=True)
    )
    for cells in (header, *rows):
        typer.echo(line(cells))
