"""Options, option parsing and exit statuses shared by the commands."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Argument, Option

from hardware.io.errors import ConfigError
from hardware.io.output_file import write_output
from trials.submitted_job import check_outlives_job
from tuner.terminal.console import printable, say, warn

if TYPE_CHECKING:  # these load numpy
    from costmodels.job.parallel_config import ParallelConfig
    from tuner.answers.basis import Basis
    from tuner.forecast.prepared import Prepared
    from tuner.storage.stored_studies import StoredStudies
    from tuner.study_file.request import StudyRequest

Command = TypeVar("Command", bound=Callable[..., Any])
StudyFile = Annotated[Path, Argument(metavar="STUDY", help="Study file (YAML).")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object, and nothing else, on stdout.")]
Overrides = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Replace a key of the study file, for example search.seed=3."),
]
Storage = Annotated[
    str | None,
    Option(metavar="URL", help="Database of the study; takes precedence over MESHTUNE_STORAGE and the study file."),
]
Config = Annotated[
    str,
    Option(
        "--config",
        metavar="pp=4,tp=2,...",
        help="Configuration, or `current`; a dimension not named is 1 or has the job's value.",
    ),
]

ConfigOrCurrent = Annotated[
    str,
    Option(
        "--config",
        metavar="pp=4,tp=2,...",
        help="Configuration; by default the current one. A dimension not named is 1 or has the job's value.",
    ),
]

At = Annotated[
    str | None,
    Option(
        "--at", metavar="SECONDS", help="Time in the trace (cluster.trace or --network) whose cluster state is used."
    ),
]
Network = Annotated[
    Path | None,
    Option("--network", metavar="TRACE", help="CSV trace of cluster changes, used instead of cluster.trace."),
]

CURRENT = "current"
"""Name of the study's current configuration, in place of its values."""

FOUND_NOTHING = 1
SOMETHING_WRONG = 1
OUTPUT_LOST = 1
USERS_MISTAKE = 2
STORAGE_LOST = 3
TAKEN_OVER = 4


def with_options(table: Mapping[str, tuple[str, str]], *, hidden: bool = False) -> Callable[[Command], Command]:
    """Give a command that takes `**keywords` one option for each row: its key, and its metavar and help.

    Hidden ones work and are not listed: another command explains them.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        kept = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                key,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, Option(metavar=metavar, help=meaning, hidden=hidden)],
            )
            for key, (metavar, meaning) in table.items()
        ]
        command.__dict__["__signature__"] = signature.replace(parameters=[*kept, *options])
        return command

    return decorate


def whole_number(option: str, text: str, least: int) -> int:
    """Parse the whole number that an option holds; typer's own message would not show the value."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= least):
        is_long = text.isdigit() and len(text) >= 20
        rule = "has more than 19 digits" if is_long else f"must be a whole number of at least {least}"
        raise ConfigError(rule, key=option, value=text)
    return int(text)


def number(option: str, text: str, *, above_zero: bool = False) -> float:
    """Parse the finite number of at least 0 (or above 0) that an option holds."""
    rule = "must be a number " + ("above 0" if above_zero else "of at least 0")
    try:
        found = float(text) if "_" not in text else math.nan
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and (found > 0 if above_zero else found >= 0)):
        raise ConfigError(rule, key=option, value=text)

    from hardware.io.config_file import check_size

    check_size(found, key=option)
    return found


def at_time(request: StudyRequest, at: str | None, network: Path | None) -> tuple[StudyRequest, str]:
    """Return the study on its cluster as the trace describes it at `--at`, and a text on what is missing then.

    Raises:
        ConfigError: No trace is named, or the trace cannot be read.
    """
    if at is None:
        if network is not None:
            rule = "needs --at, the time in the trace"
            raise ConfigError(rule, key="--network", value=str(network), nearest="for example --at 3600")
        return request, ""
    from tuner.replan.network import missing_in_words, study_at, trace_of

    time_s = number("--at", at)
    trace = trace_of(request, network, option="--at", value=at)
    return study_at(request, trace, time_s), missing_in_words(request.problem.cluster, trace, time_s)


def with_plans(
    request: StudyRequest,
    stored: StoredStudies,
    chosen: ParallelConfig | None = None,
    *,
    runs: bool = False,
    leaders_first: bool = False,
) -> Prepared:
    """Return the study with the sharding of its layers planned; see `prepare`. Planning all shows its progress.

    Raises:
        ConfigError: The planner's pins cannot be satisfied.
    """
    from tuner.forecast.planned_candidates import planned_in_words, prepare, unused_pins

    planning = request.problem.planning
    if planning.name == "megatron" or chosen is not None or (planning.is_auto and not runs):
        return prepare(request, stored, chosen, runs=runs)

    from tuner.terminal.progress import PlanningLine

    notes: list[str] = []
    with PlanningLine() as line:
        prepared = prepare(
            request, stored, runs=runs, leaders_first=leaders_first, on_planned=line.show, on_note=notes.append
        )
    warn(notes)
    warn(unused_pins(prepared.problem))
    left = planned_in_words(prepared.problem)
    warn([left] if left else [])
    return prepared


def taught_study(request: StudyRequest) -> tuple[Prepared, Basis]:
    """Return the study as it was run, and what its answers rest on: its trials, if there are any.

    Raises:
        ConfigError: The storage or the history cannot be read.
    """
    from tuner.answers.basis import basis_of
    from tuner.forecast.prepared import Prepared
    from tuner.storage.stored_studies import StoredStudies

    basis = basis_of(request, StoredStudies(request.storage), on_progress=lambda note: warn([note]))
    return basis.taught.prepared if basis.taught else Prepared(request=request, problem=request.problem), basis


def tell_basis(basis: Basis, untaught: str = "", *, err: bool = False) -> None:
    """Print the basis of an answer, on stderr if no trial is among it or stdout is for a program.

    Args:
        basis: Basis of the answer.
        untaught: Clause on settings of which the trials say nothing; empty if there are none.
        err: Whether stdout holds what a program reads.
    """
    say(printable(basis.in_words_but(untaught)), err=err or basis.taught is None)


def launchable_config(request: StudyRequest, text: str, missing: str = "") -> tuple[ParallelConfig, tuple[str, ...]]:
    """Parse the configuration of `--config` and return it with a note on each rule of the study that it breaks.

    `current` names the study's current configuration. `missing` says what the cluster lacks at that time, for the
    message.

    Raises:
        ConfigError: The text names no configuration, or one that cannot be launched at all.
    """
    wanted = _named_config(request, text)
    try:
        notes = request.problem.subject.check_launchable(
            request.problem.options, wanted, current=request.problem.current, missing=missing
        )
    except ConfigError as error:
        raise error.in_file(request.file) from None
    return wanted, notes


def _named_config(request: StudyRequest, text: str) -> ParallelConfig:
    """Return the configuration that a text names: the current one, or the values of its dimensions."""
    from costmodels.job.parallel_config import DEGREES, DIMENSIONS, parse_config

    name = text.strip()
    if not name.isalpha() or name in (*DEGREES, *DIMENSIONS):
        return parse_config(text, request.problem.subject.defaults)
    if name != CURRENT:
        raise ConfigError(
            "names no configuration", key="--config", value=text, nearest=f"{CURRENT}, or values such as pp=4,tp=2"
        )
    if request.problem.current is None:
        nearest = "values such as pp=4,tp=2, or `current:` in the study file"
        raise ConfigError("the study states none", key="--config", value=text, nearest=nearest, file=request.file)
    return request.problem.current


def load(study: Path, overrides: list[str] | None = None, storage: str | None = None) -> StudyRequest:
    """Load a study file, with the keys that the command line replaces."""
    from tuner.study_file.config import load_study

    request = load_study(study, overrides=overrides or (), storage=storage)
    warn(request.notes)
    return request


def check_out(out: Path, option: str = "--out") -> None:
    """Refuse an output file inside a Ray job's working directory, which is deleted with the job.

    Raises:
        ConfigError: The file would be deleted with the job.
    """
    nearest = "an absolute path outside, such as /shared/" + (out.name or "out")
    check_outlives_job(out, key=option, value=str(out), nearest=nearest)


def write_file(out: Path, text: str, *, private: bool = False) -> None:
    """Write a text to the file that `--out` names, which nobody else may read if it is private.

    Raises:
        ConfigError: The file cannot be written.
    """
    check_out(out)
    write_output(out, text.rstrip("\n") + "\n", private=private)
