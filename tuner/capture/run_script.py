"""Run of a user's command with stand-ins for what trains, behind a boundary of the kernel and with a time limit."""

from __future__ import annotations

import json
import os
import re
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trials.command.process_tree import LOOK_EVERY_S, Supervised, start_supervised
from tuner.capture.prelude import LOGIN_LINE
from tuner.capture.read_records import read_records
from tuner.capture.record import Record, record_paths
from tuner.capture.room.enter import (
    BOUNDARIES,
    GUARD,
    MOST_WRITTEN,
    NAMESPACES,
    OUTCOME,
    Outcome,
    Setting,
    start_behind,
)
from tuner.capture.room.keeper import Bounds
from tuner.capture.scratch import SMALL_BYTES, Copy, short_folder
from tuner.capture.slurm import Allocation, allocation_of, header_words, job_environment
from tuner.capture.stand_in import ALLOCATION, OWN
from tuner.capture.stand_ins import NAMES, write_stand_ins

LIMIT_S = 60.0
"""Default time limit of the run [s]."""
_LAST_CHARACTERS = 2_000
_READ_BYTES = 65_536
_NEVER_OF_SCRIPT = frozenset(("PATH", "PWD", "OLDPWD", "SHLVL", "_", "BASH_ENV", "LINES", "COLUMNS", *OWN))
_PATH = re.compile(r"(?<![\w$}./-])(/[\w.+-]+(?:/[\w.+-]+)+)")
"""Absolute path in a script's text."""
_MOST_OWN = 32
_OF_KERNEL = ("/proc/", "/sys/", "/dev/")
_END_WITHIN_S = 10.0
"""Time that the boundary's program has to end by itself after the time limit [s]."""


class NoBoundaryError(Exception):
    """Refusal of a machine to put anything between a script and itself.

    Attributes:
        reasons: Why each boundary is not possible, by its name.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
        self.reasons = dict(reasons)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """Outcome of a captured run.

    Attributes:
        records: Commands that the stand-ins wrote down, in their order.
        status: Exit status of the command; None if a limit ended it.
        output: Last lines that the command wrote to stdout and stderr.
        environment: Environment variables before the run.
        header: Words of the `#SBATCH` lines of the first script in the command that has any.
        boundary: Boundary that held the command, `namespaces` or `guard`; nothing if there was none.
        stopped: Limit that ended the command, as a sentence, or nothing.
        written: Files that the command wrote and that are gone now; removed ones begin with `-`.
        unseen: Places that the command could not see, some with the reason.
        unread: What in the records cannot be read, one sentence each.
    """

    records: tuple[Record, ...]
    status: int | None
    output: str
    environment: Mapping[str, str]
    header: tuple[str, ...] = ()
    boundary: str = ""
    stopped: str = ""
    written: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def own_environment(self, record: Record) -> dict[str, str]:
        """Return the variables of a recorded command that the script set or changed."""
        return {
            name: value
            for name, value in record.environment.items()
            if self.environment.get(name) != value
            and name not in _NEVER_OF_SCRIPT
            and not name.startswith(("SLURM", "OMPI_COMM_WORLD", "BASH_FUNC"))
        }


def capture(
    command: Sequence[str],
    *,
    limit_s: float = LIMIT_S,
    boundaries: Sequence[str] = BOUNDARIES,
    unconfined: bool = False,
    bounds: Bounds | None = None,
) -> Capture:
    """Run a command behind the first boundary that the machine allows, and return what it started.

    In namespaces the command sees the file system through overlays. Otherwise it runs in a copy of the working
    directory.

    Args:
        command: Program and arguments.
        limit_s: Time limit [s].
        boundaries: Boundaries to try, in order.
        unconfined: Whether the command runs without a boundary if none is possible.
        bounds: Other bounds of the run; `limit_s` replaces its time.

    Raises:
        OSError: the command cannot be started.
        NoBoundaryError: no boundary is possible, and nothing was started.
    """
    bounds = replace(bounds or Bounds(seconds=limit_s), seconds=limit_s)
    reasons: dict[str, str] = {}
    for boundary in (*boundaries, *([""] if unconfined else [])):
        with short_folder() as folder:
            found = _run_behind(boundary, command, folder, bounds)
        if isinstance(found, Capture):
            return found
        reasons[boundary] = found
    raise NoBoundaryError(reasons)


def _run_behind(boundary: str, command: Sequence[str], folder: Path, bounds: Bounds) -> Capture | str:
    """Run the command behind a boundary, or none; return why it is not possible where it is not."""
    here = Path.cwd()
    work, copy = here, None
    if boundary != NAMESPACES:
        copy = Copy(to=folder / "work", links=boundary == GUARD)
        copy.fill(here)
        work = copy.to
    write_stand_ins(folder, os.environ.get("PATH", os.defpath))
    for name in ("base", "records", "out", "tmp"):
        (folder / name).mkdir()
    header = _header_of(command)
    environment = _environment(folder, allocation_of(header), work)
    if boundary != NAMESPACES:
        environment["TMPDIR"] = str(folder / "tmp")
    if _is_of_login_shell(work / command[0]):
        command = ("bash", *command)  # whose stand-in runs no profile
    if boundary:
        setting = Setting(
            command=tuple(command),
            directory=str(work),
            environment=environment,
            folder=str(folder),
            stand_ins=NAMES,
            own=() if os.geteuid() == 0 else _own_folders(command, here),
            boundary=boundary,
            bounds=bounds,
        )
        status, output, stopped = _read(start_behind(setting), bounds, patience_s=_END_WITHIN_S)
        outcome = _outcome(folder, output)
        if outcome.refused:
            return outcome.refused
    else:
        linger_s = min(bounds.seconds, bounds.background_s)
        status, output, stopped = _read(start_supervised(command, environment, work, linger_s=linger_s), bounds)
        outcome = Outcome()
    place = folder / ("out" if boundary else "records")
    written = copy.changes(MOST_WRITTEN) if copy else outcome.written
    records, unread = read_records(record_paths(place, most=bounds.records, most_bytes=bounds.records_bytes))
    return Capture(
        records=tuple(_at_home(record, folder, here) for record in records),
        status=None if stopped or outcome.stopped else status,
        output=_home_text(output, folder, here),
        environment={key: _home_text(value, folder, here) for key, value in environment.items()},
        header=tuple(header),
        boundary=boundary,
        stopped=outcome.stopped or stopped,
        written=tuple(_home_text(name, folder, here) for name in written),
        unseen=(*outcome.unshown, *(copy.left_out if copy else ())),
        unread=tuple(dict.fromkeys(unread)),
    )


def _outcome(folder: Path, output: str) -> Outcome:
    """Return the outcome that the boundary's program wrote; without one, it did not get that far."""
    try:
        return Outcome.from_json((folder / "out" / OUTCOME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        last = output.strip().rpartition("\n")[2]
        return Outcome(refused=f"what goes between it and the script was ended{': ' if last else ''}{last}")


def _own_folders(command: Sequence[str], here: Path) -> tuple[str, ...]:
    """Return the folders of this user that the script is likely to write below, although they lie in another's."""
    texts = [text for word in command if (text := _script_text(Path(word)))]
    found = {str(here), str(Path.home())}
    for named in {path for text in texts for path in _PATH.findall(text) if not path.startswith(_OF_KERNEL)}:
        folder = named
        while not os.path.isdir(folder):  # noqa: PTH112 # pathlib raises where a folder may not be read
            folder = os.path.dirname(folder)  # noqa: PTH120 # a text
        if os.access(folder, os.W_OK):
            found.add(os.path.realpath(folder))
    return tuple(sorted(found)[:_MOST_OWN])


def _script_text(path: Path) -> str:
    """Return the text of a script among the words of a command, or nothing."""
    if path.suffix in (".py", ".json") or not path.is_file() or path.stat().st_size > SMALL_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _header_of(command: Sequence[str]) -> list[str]:
    """Return the words of the `#SBATCH` lines of the first script in the command that has any."""
    return next((words for word in command if (words := header_words(_script_text(Path(word))))), [])


def _environment(folder: Path, allocation: Allocation, work: Path) -> dict[str, str]:
    """Return the environment of the run. A script with `#SBATCH` lines gets the variables of its job."""
    environment = dict(os.environ)
    environment |= {
        "PATH": os.pathsep.join((str(folder / "bin"), environment.get("PATH", os.defpath))),
        "PWD": str(work),
        "BASH_ENV": str(folder / "prelude.sh"),
        "GIT_DISCOVERY_ACROSS_FILESYSTEM": "1",  # overlays are file systems
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "site"), environment.get("PYTHONPATH")))),
        ALLOCATION: json.dumps(asdict(allocation)),
    }
    if allocation != Allocation():
        environment |= job_environment(allocation, str(work))
    return environment


def _read(running: Supervised, bounds: Bounds, *, patience_s: float = 0.0) -> tuple[int | None, str, str]:
    """Read the output of a command to its end or a limit.

    The patience is added to the time limit, for a command that another process holds to that limit.

    Returns:
        The exit status, the last output, and the limit that ended the command, as a sentence, or nothing.
    """
    deadline_s = time.monotonic() + bounds.seconds + patience_s
    last, status, read_bytes, stopped = b"", None, 0, ""
    try:
        while (status := running.poll()) is None and not stopped:
            if select.select([running.output], [], [], LOOK_EVERY_S)[0]:
                read = os.read(running.output, _READ_BYTES)
                last, read_bytes = (last + read)[-_LAST_CHARACTERS:], read_bytes + len(read)
                if not read:
                    time.sleep(LOOK_EVERY_S)  # closed: what the command left behind writes elsewhere
            if time.monotonic() >= deadline_s:
                stopped = bounds.time_words
            elif read_bytes > bounds.output_bytes:
                stopped = f"it printed more than {bounds.output_bytes >> 20} MiB"
    finally:
        # whatever the command has started ends with its life line
        os.close(running.life_line)
        if status is None:
            running.wait()
        while read := os.read(running.output, _READ_BYTES):
            last = (last + read)[-_LAST_CHARACTERS:]
        os.close(running.output)
    return status, last.decode("utf-8", errors="replace"), stopped


def _is_of_login_shell(script: Path) -> bool:
    """Return whether a file's first line has a login shell run it, which would run this machine's profile first."""
    if not script.is_file():
        return False
    with script.open("rb") as file:
        return re.match(LOGIN_LINE, file.readline(200).decode("utf-8", errors="replace")) is not None


def _home_text(text: str, folder: Path, here: Path) -> str:
    """Replace the scratch folder in a text by the working directory, and leave the folder of stand-ins out of paths."""
    for site in (f"{folder}/site:", f":{folder}/site"):
        text = text.replace(site, "")
    return text.replace(str(folder / "work"), str(here))


def _at_home(record: Record, folder: Path, here: Path) -> Record:
    """Return the record with the working directory in place of the scratch folder."""
    return replace(
        record,
        words=tuple(_home_text(word, folder, here) for word in record.words),
        directory=_home_text(record.directory, folder, here),
        environment={name: _home_text(value, folder, here) for name, value in record.environment.items()},
        through=tuple(tuple(_home_text(word, folder, here) for word in outer) for outer in record.through),
        files={_home_text(name, folder, here): text for name, text in record.files.items()},
    )
