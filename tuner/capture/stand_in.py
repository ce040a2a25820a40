"""Program behind every stand-in: write down the command instead of running it.

A launcher or a container is looked through: the command that it would start is run here. An interpreter that evaluates
a short text (`python -c`, or a program on its standard input), or whose output a shell reads (`$(python3 tool.py)`),
really runs, because scripts use its output. Everything else is written down, one JSON file each, and ends with status
0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tuner.capture.launchers import (
    ALIASES,
    ANSWERED,
    ANY,
    HELD_BACK,
    RUN_BESIDES,
    THROUGH,
    TRAINING,
    base_name,
    inner_command,
    is_program,
    is_python,
    mpi_allocation,
)
from tuner.capture.program_output import is_read_by_shell, output_of_program, own_path
from tuner.capture.record import Record, files_among
from tuner.capture.slurm import Allocation, allocation_of, header_words, host_names, job_environment

THROUGH_SO_FAR = "MESHTUNE_CAPTURE_THROUGH"
"""Variable with the commands around the present one, as JSON."""
ALLOCATION = "MESHTUNE_CAPTURE_ALLOCATION"
"""Variable with the present allocation, as JSON."""
SUBMITTED = "MESHTUNE_CAPTURE_SUBMITTED"
"""Variable with the scripts that sbatch has begun around the present command, as JSON."""
OWN = (THROUGH_SO_FAR, ALLOCATION, SUBMITTED)
READS_ONLY = frozenset(("rev-parse", "describe", "symbolic-ref", "ls-files"))
"""Commands of git that only read, and whose answers scripts use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Facts of its capture that a stand-in has, also if the script starts it without environment variables.

    Attributes:
        folder: Folder of the capture.
        path: Search path without the stand-ins.
        python: Interpreter that runs short programs where the search path has none.
    """

    folder: str
    path: str
    python: str

    def as_values(self) -> dict[str, str]:
        """Return the values by their names."""
        return asdict(self)

    def program(self, name: str) -> str:
        """Return the path of the stand-in for a program, if it has one, and its own path or name otherwise."""
        own = f"{self.folder}/bin/{base_name(name)}"
        return own if os.path.exists(own) else name  # noqa: PTH110 # any word

    def with_path(self, environment: dict[str, str]) -> dict[str, str]:
        """Return environment variables whose search path begins with the stand-ins."""
        own, path = f"{self.folder}/bin", environment.get("PATH") or self.path
        is_first = path.split(os.pathsep, 1)[0] == own
        return {**environment, "PATH": path if is_first else os.pathsep.join((own, path))}


def main(words: list[str], home: Home) -> None:
    """Act for the program `words[0]` and end with its exit status."""
    sys.exit(_act(words, home))


def _act(words: list[str], home: Home) -> int:
    words[0] = ALIASES.get(base_name(words[0]), base_name(words[0]))
    # An interpreter that runs a launcher's file, such as /opt/bin/torchrun, stands for the launcher.
    if is_python(words[0]) and len(words) > 1 and base_name(words[1]) in TRAINING:
        words = [base_name(words[1]), *words[2:]]
    name = words[0]
    if name in ANSWERED:
        return _answer(words)
    if name == ANY:
        # a name that this machine does not know, such as that of a site's own launcher
        inner = inner_command(words[1:])
        return _run_inner(words[1:], inner, home) if inner else 127
    if name in THROUGH and (inner := inner_command(words) or _from_input(words, home)):
        if not (name == "sbatch" and _is_resubmitted(inner)):
            return _run_inner(words, inner, home)
        _write(words, home, held_back=True)  # it would submit itself again and again
        return 0
    if (
        name in RUN_BESIDES
        or (is_python(name) and not is_program(words))
        or (name == "git" and READS_ONLY & set(words[1:]))
    ):
        return _run_really(words, home)
    _write(words, home, held_back=name in HELD_BACK)
    if is_python(name) and is_read_by_shell():
        sys.stdout.buffer.write(output_of_program(words, path=home.path, python=home.python, folder=home.folder))
    return 0


def _is_resubmitted(inner: tuple[str, ...]) -> bool:
    """Return whether a script submits one that is submitted already; otherwise it counts as submitted from now on."""
    script = os.path.realpath(inner[1]) if len(inner) > 1 else ""
    submitted = json.loads(os.environ.get(SUBMITTED, "[]"))
    os.environ[SUBMITTED] = json.dumps([*submitted, script])
    return script in submitted


def _from_input(words: list[str], home: Home) -> tuple[str, ...]:
    """Return the command of a batch script on the standard input, which is kept in a file; nothing if there is none."""
    if words[0] not in ("sbatch", "qsub") or sys.stdin is None or sys.stdin.isatty():
        return ()
    text = sys.stdin.read()
    if not text.strip():
        return ()
    path = Path(home.folder) / "records" / f"{os.urandom(16).hex()}.sh"
    path.write_text(text, encoding="utf-8")
    return ("bash", str(path))


def _allocation() -> Allocation:
    return Allocation(**json.loads(os.environ.get(ALLOCATION, "{}")))


def _write(words: list[str], home: Home, *, held_back: bool) -> None:
    """Write the record of this command."""
    command = tuple(words)
    record = Record(
        words=command,
        directory=os.environ.get("PWD") or str(Path.cwd()),
        environment={name: value for name, value in os.environ.items() if name not in OWN},
        through=tuple(map(tuple, json.loads(os.environ.get(THROUGH_SO_FAR, "[]")))),
        files={} if held_back else files_among(command, Path.cwd()),
        allocation=_allocation(),
        held_back=held_back,
    )
    folder = Path(home.folder) / "records"
    # Written under another name first, so that a reader never sees half a record.
    target = folder / os.urandom(16).hex()
    target.write_text(record.to_json(), encoding="utf-8")
    number = len(list(folder.glob("*.json")))
    target.rename(folder / f"{number:06d}-{target.name}.json")


def _run_really(words: list[str], home: Home) -> int:
    """Run a program from the search path without stand-ins; without an interpreter there, Meshtune's own."""
    found = (f"{folder}/{words[0]}" for folder in home.path.split(os.pathsep) if folder)
    program = next((path for path in found if os.access(path, os.X_OK)), home.python)
    if is_python(words[0]):
        return _run([program, *words[1:]], dict(os.environ), home)
    return _run([own_path(program, home.folder), *words[1:]], dict(os.environ), home)


def _run(command: Sequence[str], environment: dict[str, str], home: Home) -> int:
    """Run a command and return its exit status as shells do, 127 if it cannot be started."""
    status = os.spawnvpe(os.P_WAIT, command[0], list(command), home.with_path(environment))  # noqa: S606 # the script's
    return status if status >= 0 else 128 - status


def _run_inner(words: list[str], inner: tuple[str, ...], home: Home) -> int:
    """Run the command that a launcher or a container would start, as its first process would."""
    environment = dict(os.environ)
    allocation, header = _allocation(), []
    if words[0] in ("srun", "sbatch", "salloc"):
        own = words[1 : len(words) - len(inner) + 1]
        stated = allocation_of(own)
        if words[0] == "sbatch":
            header = header_words(_text_of(inner))
            stated = stated.over(allocation_of(header))
        allocation = stated.over(allocation)
        environment |= job_environment(allocation, os.environ.get("PWD", ""))
    elif (by_mpi := mpi_allocation(words)) != Allocation():
        allocation = by_mpi.over(allocation)
        tasks = by_mpi.tasks_per_host or 1
        environment |= {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": str(tasks * (by_mpi.hosts or 1)),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(tasks),
        }
    environment[ALLOCATION] = json.dumps(asdict(allocation))
    before = json.loads(os.environ.get(THROUGH_SO_FAR, "[]"))
    # a script among the words begins with a shell that is not, and one of the input has no word
    is_whole = tuple(words[-len(inner) :]) == inner
    outer = words[: len(words) - len(inner) + (not is_whole)] if inner[-1] in words else words
    environment[THROUGH_SO_FAR] = json.dumps([*before, [outer[0], *header, *outer[1:]]])
    return _run((home.program(inner[0]), *inner[1:]), environment, home)


def _text_of(command: tuple[str, ...]) -> str:
    """Return the text of the script that a command runs, or nothing."""
    try:
        return Path(command[1]).read_text(encoding="utf-8", errors="replace")
    except (OSError, IndexError):
        return ""


def _answer(words: list[str]) -> int:
    """Print the host names of the job, or one line for each device of a host."""
    allocation = _allocation()
    if words[0] == "scontrol":
        listed = next((word for word in words[1:] if word.startswith("host-")), "")
        names = listed.split(",") if listed else host_names(allocation.hosts or 1)
        lines = names if {"hostname", "hostnames"} & set(words) else []
    else:
        devices = range(allocation.devices_per_host or 0)
        lines = [f"GPU {number}: captured (UUID: GPU-{number})" if "-L" in words else str(number) for number in devices]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
