"""Command line `meshtune`. Heavy imports are inside the commands, so that `--help` answers at once.

Results go to stdout, as one JSON object with `--json`; progress, warnings and errors go to stderr. Exit status: 0 done,
1 ran but found nothing or could not print its result, 2 a mistake of the user's (explained in one message), 3 the
storage was lost and what was measured is kept beside it, 4 another process took the study over, 75 told to end by
SIGTERM, SIGHUP or SIGUSR1 and to be started again, 130 interrupted.
"""

from __future__ import annotations

import atexit
import copy
import errno
import gc
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer import Option
from typer.main import get_command

from hardware.io.errors import ConfigError, shorten, shown_url
from hardware.io.output_file import check_place
from hardware.io.secret_texts import hide_words, holds_secret
from hardware.rounding import by_source
from trials.ranks.unheard_signals import ignore_signals
from tuner.cli import atlas as cli_atlas
from tuner.cli import calibrate as cli_calibrate
from tuner.cli import catalog as cli_catalog
from tuner.cli import completion as cli_completion
from tuner.cli import dashboard as cli_dashboard
from tuner.cli import estimate as cli_estimate
from tuner.cli import init as cli_init
from tuner.cli import learn as cli_learn
from tuner.cli import place as cli_place
from tuner.cli import plan as cli_plan
from tuner.cli import predictions as cli_predictions
from tuner.cli import rehearse as cli_rehearse
from tuner.cli import replan as cli_replan
from tuner.cli import status as cli_status
from tuner.cli import trial as cli_trial
from tuner.cli import trials as cli_trials
from tuner.cli import upkeep as cli_upkeep
from tuner.cli import watch as cli_watch
from tuner.cli.options import (
    FOUND_NOTHING,
    OUTPUT_LOST,
    STORAGE_LOST,
    TAKEN_OVER,
    USERS_MISTAKE,
    AsJson,
    Overrides,
    Storage,
    StudyFile,
    check_out,
    launchable_config,
    load,
    tell_basis,
    whole_number,
    with_plans,
    write_file,
)
from tuner.cli.panels import PanelGroup
from tuner.cli.status import counts
from tuner.run.endings import INTERRUPTED, PREEMPTED, StorageLostError, TakenOverError, ending_signals, keep_status
from tuner.storage.stored_studies import StoredStudies
from tuner.terminal.console import (
    NOTHING_WORKS,
    in_words,
    print_json,
    print_judged,
    print_run,
    printable,
    say,
    throughput_in_words,
    warn,
)
from tuner.terminal.event_lines import EventLines
from tuner.terminal.streams import lossy_streams

if TYPE_CHECKING:  # these load numpy, Optuna and Ray
    from tuner.forecast.prepared import Prepared
    from tuner.run.following import Followed
    from tuner.run.progress import Progress, RunResult
    from tuner.terminal.event_log import EventLog
    from tuner.terminal.progress import ProgressLine

app = typer.Typer(
    name="meshtune",
    cls=PanelGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # loading rich would double the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of command-line misuse errors: click's own, or the copy of it that typer holds."""


def main() -> NoReturn:
    """Run the command line and exit; a user's mistake ends in one message and status 2."""
    _hide_secrets()
    # called last of all: Python then puts the default back in place of handlers, long before the process has ended
    atexit.register(ignore_signals)
    # with the default of 700 new objects, collections during imports take a tenth of the time of a quick command, and
    # another tenth goes to the collections in which an ending process looks at all objects once more
    gc.set_threshold(200_000)
    atexit.register(gc.freeze)
    try:
        with lossy_streams() as lost:
            status = _status_of_app()
            if isinstance(sys.stderr, EventLines):
                sys.stderr.finish()
            if problem := lost():
                _complain(problem)
                status = status or OUTPUT_LOST
    except KeyboardInterrupt:  # it came while the last words were printed
        status = INTERRUPTED
    atexit.register(keep_status, status)
    sys.exit(status)


_OF_PATHS = (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP)
"""Errors of paths that the user has named, wherever they are looked at first."""

_STATUS_OF = {StorageLostError: STORAGE_LOST, TakenOverError: TAKEN_OVER}
"""Exit status of errors that are no mistake in what the user gave."""


def _status_of_app() -> int:
    """Run the command line, explain what went wrong, and return the exit status."""
    try:
        status: int = commands(next(iter(sys.argv[1:]), None))(prog_name="meshtune", standalone_mode=False) or 0
    except ConfigError as error:
        _complain(str(error), error.listed)
        return next((status for kind, status in _STATUS_OF.items() if isinstance(error, kind)), USERS_MISTAKE)
    except _UsageError as error:
        _complain(_usage_message(error))
        return USERS_MISTAKE
    except OSError as error:
        if error.errno not in _OF_PATHS or error.filename is None:
            raise
        _complain(str(ConfigError(f"cannot be used ({error.strerror})", file=os.fsdecode(error.filename))))
        return USERS_MISTAKE
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    if status == INTERRUPTED:
        _complain("interrupted")
    elif status == PREEMPTED:
        _complain("told to end; the same command goes on")
    return status


@cache
def commands(name: str | None = None) -> Any:
    """Return the commands of `app`, made once by a program that calls `main` again and again.

    Args:
        name: Command that is wanted, since to make all takes longer than to import typer; others make all.
    """
    wanted = copy.copy(app)
    named = [one for one in app.registered_commands if one.callback is not None and one.callback.__name__ == name]
    wanted.registered_commands = named or app.registered_commands
    return get_command(wanted)


_ARGUMENTS = "_MESHTUNE_ARGUMENTS"
"""Environment variable through which the process passes its original arguments to its restarted self."""

_OF_COMMANDS = re.compile(r"((?:--set=)?trial(?:\.(?:environment|command)[^=]*)?=).*", re.DOTALL)
"""Pattern of a `--set` option that may hold secrets of a trial's command, or environment variables."""


def _hide_secrets() -> None:
    """Restart this process if its arguments hold secrets: masked on the command line, readable only in the environment.

    Every user of the machine can read a process's command line, and Ray stores the driver's with the job. Only the same
    user can read a process's environment, and child processes do not inherit the variable: it is removed here.
    """
    given = sys.argv[1:]
    told = _texts_in(os.environ.pop(_ARGUMENTS, ""))
    if told is not None and _mask_arguments(told) == given:
        sys.argv[1:] = told
        return
    shown, at = _mask_arguments(given), len(sys.orig_argv) - len(given)
    if shown != given and sys.orig_argv[at:] == given:  # false if another program called `main`
        os.environ[_ARGUMENTS] = json.dumps(given)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:at], *shown])  # noqa: S606 # no shell wanted


def _texts_in(text: str) -> list[str] | None:
    """Return the texts of a JSON list; None if it is none, as when somebody else has set the variable."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else None


def _mask_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments with their secrets masked, also those behind `--`, which are the words of a script."""
    masked = [_mask_argument(argument) for argument in arguments]
    if "--" not in arguments:
        return masked
    own = arguments.index("--") + 1
    return [*masked[:own], *hide_words(masked[own:])]


def _mask_argument(argument: str) -> str:
    """Return an argument with passwords of URLs, and environment variables and secrets of commands, masked."""
    is_secret = "environment" in argument or ("command" in argument and holds_secret(argument.replace(",", " ")))
    return shown_url(_OF_COMMANDS.sub(r"\1***", argument) if is_secret else argument)


def _usage_message(error: Any) -> str:
    """Format typer's usage error like our own messages."""
    told = shorten(error.format_message().rstrip("."), 1_500)
    command = error.ctx.command_path if error.ctx else "meshtune"
    return f"{told}{'' if told.endswith('?') else ';'} `{command} --help` shows how"


def _complain(message: str, listed: Sequence[str] = ()) -> None:
    say("\n  ".join((f"meshtune: {printable(message)}", *map(printable, listed))), err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("meshtune")
        except PackageNotFoundError:  # a checkout that is not installed
            project = Path(__file__).parents[2] / "pyproject.toml"
            found = (
                re.search(r'^version = "(.*)"', project.read_text(encoding="utf-8"), re.M) if project.exists() else None
            )
            number = found[1] if found else "(unknown version)"
        typer.echo(f"meshtune {number}")
        raise typer.Exit


_STATUSES = (
    "Exit status: 0 done, 1 ran but found nothing or could not print its result, 2 invalid input (one message explains "
    "it), 3 the storage was lost and what was measured is kept beside it, 4 another process took the study over, 75 "
    "told to end by SIGTERM, SIGHUP or SIGUSR1 and to be started again, 130 interrupted."
)


@app.callback(invoke_without_command=True, epilog=_STATUSES)
def meshtune(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 # its callback does the work
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find the fastest parallelism configuration for training a large language model on a cluster.

    Begin with `meshtune init`, then `meshtune space STUDY` and `meshtune run STUDY`.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USERS_MISTAKE)


@app.command(short_help="Try the most promising configurations until the best is clear.")
def run(
    study: StudyFile,
    trials: Annotated[
        str | None, Option(metavar="N", help="Maximum number of trials; replaces search.max_trials.")
    ] = None,
    storage: Storage = None,
    seed: Annotated[str | None, Option(metavar="N", help="Random seed; replaces search.seed.")] = None,
    overrides: Overrides = None,
    ray_address: Annotated[
        str | None,
        Option(metavar="ADDRESS", help="Address of an existing Ray cluster; takes precedence over RAY_ADDRESS."),
    ] = None,
    log_format: Annotated[
        str, Option(metavar="FORMAT", help="Form of the progress on stderr: text, or json with one object per event.")
    ] = "text",
    metrics: Annotated[
        Path | None,
        Option(metavar="FILE", help="File for Prometheus metrics, kept up to date; OpenMetrics if it ends so."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tune: try promising configurations until confident that no other is faster, then print the best.

    Running the same command again continues an interrupted study.
    """
    if log_format not in ("text", "json"):
        raise ConfigError("is no format", key="--log-format", value=log_format, nearest="text or json")
    lines = EventLines(sys.stderr) if log_format == "json" else None
    if lines is not None:
        sys.stderr = lines  # `main` puts it back
    if metrics is not None:
        check_out(metrics, "--metrics")
        check_place(metrics, "--metrics")
    changes = list(overrides or [])
    changes += [f"search.max_trials={whole_number('--trials', trials, 1)}"] if trials is not None else []
    changes += [f"search.seed={whole_number('--seed', seed, 0)}"] if seed is not None else []
    line: ProgressLine | EventLog | None = None

    def show_interrupt() -> None:
        if line is not None:
            line.show_interrupt()

    with ending_signals(show_interrupt) as interrupted:
        try:
            request = load(study, changes, storage)
            if lines is not None:
                lines.study = request.name
            prepared = with_plans(request, StoredStudies(request.storage), runs=True, leaders_first=True)

            # Import after reading the study: loading Optuna takes seconds, and mistakes should be told at once.
            from tuner.run.following import run_following
            from tuner.study_file.config import load_study
            from tuner.terminal.event_log import EventLog
            from tuner.terminal.metrics_file import MetricsFile
            from tuner.terminal.progress import ProgressLine

            inherited = os.environ.pop("MESHTUNE_STORAGE", None)  # the processes of trials would inherit it

            def on_hosts(hosts: tuple[int, ...]) -> Prepared:
                part = load_study(study, overrides=changes, storage=storage or inherited, hosts=hosts)
                return with_plans(part, StoredStudies(part.storage), runs=True)

            events = EventLog(request) if log_format == "json" else None
            shown = MetricsFile(metrics, request.name, lambda trouble: warn([trouble])) if metrics is not None else None

            def show(progress: Progress) -> None:
                assert line is not None, "the run begins after it"
                line.show(progress)
                if shown is not None:
                    shown.show(progress)

            with events or ProgressLine(request) as line:
                followed = run_following(prepared, on_hosts, on_progress=show, ray_address=ray_address)
            _tell_end(followed, events, as_json=as_json)
        except KeyboardInterrupt:  # before the study was begun, or again while the run ended
            raise typer.Exit(interrupted()) from None
    result = followed.result
    if result.stop_reason == "interrupted":
        raise typer.Exit(interrupted())
    if result.best is None and result.extrapolated is None:
        raise typer.Exit(FOUND_NOTHING)


def _tell_end(followed: Followed, events: EventLog | None, *, as_json: bool) -> None:
    """Print what a run has found."""
    from tuner.terminal.failing_command import failing_command_lines

    prepared, result = followed.prepared, followed.result
    payload = {**_run_payload(prepared, result), "hosts": list(followed.hosts)}
    if events is None:
        warn(result.warnings)
    else:
        for warning in result.warnings:
            events.tell("warning", warning=warning)
        events.tell("end", stop_reason=payload["stop_reason"], best=payload["best"], step_time_s=payload["step_time_s"])
    if result.fails_alike:
        typer.echo("\n".join(failing_command_lines(result)), err=True)
    if as_json:
        print_json(payload)
    elif not result.fails_alike:
        print_run(prepared, result, payload)


def _run_payload(prepared: Prepared, result: RunResult) -> dict[str, Any]:
    from tuner.answers.gain import compared_of, gains
    from tuner.answers.measured_front import front_json, measured_front
    from tuner.economics.device_time import device_time_json
    from tuner.economics.training import limited_of

    best, extrapolated = result.best, result.extrapolated
    compared = compared_of(prepared.problem, result.reference, result.records, best, result.gain)
    training = limited_of(prepared, best, extrapolated)
    step_time_s = best.step_time_s if best else extrapolated.step_time_s if extrapolated else None
    return {
        "best": best.params if best else extrapolated.config if extrapolated else None,
        "step_time_s": step_time_s,
        "tokens_per_s_per_device": prepared.problem.subject.throughput(step_time_s) if step_time_s else None,
        **gains(compared),
        "source": "predicted" if extrapolated else prepared.request.trials.backend.origin,
        "clock": prepared.request.trials.backend.clock,
        "training": training and training.as_json(prepared.problem.dimensions),
        "extrapolated": extrapolated is not None,
        "in_training": prepared.request.trials.backend.in_training(),
        "front": front_json(prepared.problem, measured_front(prepared.problem, result.records)),
        **counts(result.records),
        **device_time_json(prepared.request, compared, result.records),
        "candidates": result.num_candidates,
        "p_star": result.p_star,
        "stop_reason": result.stop_reason.value,
        "study_name": prepared.request.name,
        "storage": str(prepared.request.storage),
    }


app.command(short_help="Write a study file from your launch script.")(cli_init.init)
app.command(short_help="Count the configurations that can work; explain the others.")(cli_predictions.space)
app.command(short_help="Predict step time and memory of one configuration.")(cli_predictions.predict)
app.command(short_help="Simulate one step of one configuration, pass by pass.")(cli_predictions.simulate)
app.command(short_help="Print the configurations predicted to be fastest.")(cli_predictions.rank)
app.command(short_help="Write a site of the layouts that models of the catalog want.")(cli_atlas.atlas)
app.command(short_help="Shard one training step over a device mesh, with your pins.")(cli_plan.plan)
app.command(short_help="Place several models on one cluster.")(cli_place.place)
app.command(short_help="Plan configuration changes on a cluster that changes over time.")(cli_replan.replan)
app.command(short_help="Follow a cluster; say when to change a running job.")(cli_watch.watch)


app.command(short_help="List devices, clusters, models, runtimes and knobs.")(cli_catalog.catalog)
app.command(short_help="Fit a runtime's profile, or time operators on this machine.")(cli_calibrate.calibrate)
app.command(short_help="Learn from your training logs: keep the runs, fit a profile.")(cli_learn.learn)
app.command(short_help="Write your measured runs without anything that names you.")(cli_learn.share)


app.command()(cli_status.status)
app.command(short_help="Print what one trial starts, or run one.")(cli_trial.trial)
app.command(short_help="Run the study's program as single ranks on a CPU.")(cli_rehearse.rehearse)
app.command(short_help="Print the table of a study's trials.")(cli_trials.trials)
app.command(short_help="Look for damage and for what dead drivers have left.")(cli_upkeep.doctor)
app.command(short_help="Copy a study's storage, while it runs or afterwards.")(cli_upkeep.backup)
app.command(short_help="Show a study in the browser, while it runs or afterwards.")(cli_dashboard.dashboard)


@app.command(short_help="Print the best known configuration.")
def best(study: StudyFile, storage: Storage = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the best known configuration: measured or learned if the study has run, else predicted."""
    request = load(study, overrides, storage)

    from tuner.answers.basis import basis_of
    from tuner.answers.best import best_known
    from tuner.answers.gain import gains
    from tuner.economics.training import limited_training
    from tuner.forecast.idle_hosts import idle_hosts_of

    stored = StoredStudies(request.storage)
    prepared = with_plans(request, stored)
    basis = basis_of(request, stored, prepared)
    found = best_known(prepared, stored.find(request.name), basis)
    if found is None:
        unknown = dict.fromkeys(("config", "step_time_s", "source", "clock", "idle_hosts", "training"))
        _finish_empty(as_json, {**unknown, "extrapolated": False, **gains(None), **basis.as_json()})
    idle, training = (
        idle_hosts_of(prepared.problem, found.config),
        limited_training(prepared, found.config, found.source, found.step_time_s),
    )
    payload: dict[str, Any] = {
        "config": found.config.values(prepared.problem.dimensions),
        "step_time_s": found.step_time_s,
        "idle_hosts": idle and idle.as_json(),
        "source": found.source,
        "clock": request.trials.backend.clock if found.is_measured else None,
        "extrapolated": found.extrapolated is not None,
        **gains(found.compared),
        "training": training and training.as_json(prepared.problem.dimensions),
        **basis.as_json(),
    }
    shardings = prepared.problem.subject.shardings(found.config, request.name)
    if as_json:
        print_json(payload | ({} if shardings is None else {"shardings": shardings.answer.to_json()}))
        return
    known = found.known_in_words
    say(f"Best: {in_words(payload['config'])}")
    tokens = throughput_in_words(prepared.problem.subject.throughput(found.step_time_s), found.source)
    say(f"  {by_source(found.step_time_s, found.source)} s per step{tokens} ({known})")
    print_judged(request, found.compared, training, found.p_star)
    if idle is not None:
        say(f"  {idle.in_words}")
    tell_basis(basis)
    if shardings is not None:
        from tuner.terminal.shardings import print_shardings

        print_shardings(request.file, shardings)


app.command(short_help="Print the days, device-hours and cost of a whole training.")(cli_estimate.estimate)


@app.command()
def report(
    study: StudyFile,
    out: Annotated[Path, Option(help="HTML file to write.")] = Path("report.html"),
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML report of the best configuration and all trials."""
    check_out(out)
    request = load(study, overrides, storage)

    from tuner.report import write_report

    written = write_report(request, out)
    _print_written(str(written), as_json)


@app.command()
def export(
    study: StudyFile,
    to: Annotated[
        str,
        Option(
            metavar="TARGET",
            help="megatron, torchtitan, torchtitan-main, bridge, swift, verl, maxtext, deepspeed, mindspeed, nemo, "
            "nanotron, gpt-neox, flagscale "
            "or json; jax or torch for a step of your own in it; or a target of an installed package.",
            autocompletion=cli_completion.targets,
        ),
    ],
    chosen: Annotated[
        str | None, Option("--config", metavar="pp=4,...", help="Configuration to export instead of the study's best.")
    ] = None,
    out: Annotated[Path | None, Option(help="File to write; by default stdout.")] = None,
    storage: Storage = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the best configuration as flags for a training framework.

    A step of your own is written as a Python module that shards it (`--to jax`, `--to torch`).
    """
    from tuner.answers.basis import basis_of
    from tuner.answers.export import export_configuration
    from tuner.export import find_exporter
    from tuner.forecast.candidates import notes_on_plan
    from tuner.forecast.idle_hosts import notes_on_idle_hosts
    from tuner.own_step.answer import OWN_TARGETS

    if to not in OWN_TARGETS:
        find_exporter(to)
    request = load(study, overrides, storage)
    request.problem.subject.check_target(to)
    stored = StoredStudies(request.storage)
    basis = basis_of(request, stored)
    if chosen is not None:
        wanted, notes = launchable_config(request, chosen)
        prepared = with_plans(request, stored, wanted)
        step = basis.taught and basis.taught.step_of(wanted)
        if step and not step.fits:
            reason = f"it {step.outcome}" if step.outcome else "by the study's trials it does not fit"
            notes += (f"this configuration is not expected to run: {reason}",)
    else:
        from tuner.answers.best import best_known
        from tuner.economics.cost_words import limited_in_words
        from tuner.economics.training import limited_training

        prepared = with_plans(request, stored)
        found = best_known(prepared, stored.find(request.name), basis)
        if found is None:
            _finish_empty(as_json, {"target": to, "text": None, "notes": [], **basis.as_json()})
        wanted = found.config
        known = found.known_in_words
        notes = () if found.source == "measured" else (f"this configuration is {known}, not measured",)
        training = limited_training(prepared, found.config, found.source, found.step_time_s)
        if training is None or training.breaks:
            notes += tuple(filter(None, [limited_in_words(request.economics, training)]))
    notes += notes_on_idle_hosts(prepared.problem, wanted)
    notes += notes_on_plan(prepared.problem, wanted) if to != "json" else ()
    exported = export_configuration(prepared, basis, wanted, to, out)
    if out is not None:
        write_file(out, exported.text)
    if as_json:
        warn(notes)
        written = {"written": str(out)} if out else {}
        print_json(
            {"target": to, "text": exported.text, "notes": [*notes, *exported.notes], **basis.as_json()} | written
        )
        return
    if out is None:
        typer.echo(exported.text.rstrip("\n"))
    else:
        typer.echo(f"wrote {printable(str(out))}", err=True)
    warn((*notes, *exported.notes))
    tell_basis(basis, err=True)


def _finish_empty(as_json: bool, payload: Mapping[str, Any]) -> NoReturn:
    if as_json:
        print_json(payload)
    else:
        typer.echo(NOTHING_WORKS, err=True)
    raise typer.Exit(FOUND_NOTHING)


def _print_written(file: str, as_json: bool) -> None:
    if as_json:
        print_json({"written": file})
    else:
        typer.echo(f"wrote {printable(file)}")
