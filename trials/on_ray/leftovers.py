"""What drivers that are dead have left of local Rays on this machine: processes, and folders of their sessions.

A session of Ray has a folder `session_DATE_PID`, whose last part is the process that began it, a driver or `ray start`.
Only sessions that a driver of Meshtune has begun count here: a file in the folder says so. Processes are known by open
files in the folder. Nothing is ended or removed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trials.on_ray.local import OWN_SESSION

_SESSION = re.compile(r"(/\S*/session_[0-9_-]+_[0-9]+)(?:/|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftProcess:
    """Process of Ray whose driver is dead.

    Attributes:
        pid: Number of the process.
        command: Its command line, shortened.
        session: Name of its session.
    """

    pid: int
    command: str
    session: str


def left_processes() -> tuple[LeftProcess, ...]:
    """Return the processes of Ray sessions that drivers of Meshtune began and that are dead."""
    seen = [found for entry in Path("/proc").iterdir() if entry.name.isdigit() and (found := _look_at(entry))]
    return tuple(
        LeftProcess(pid=pid, command=command, session=folder.name)
        for pid, folder, command in sorted(seen)
        if (folder / OWN_SESSION).exists() and not _lives(int(folder.name.rpartition("_")[2]))
    )


def _look_at(entry: Path) -> tuple[int, Path, str] | None:
    """Return the number, the folder of the session and the command of a process of Ray; None for other processes."""
    try:
        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        if not (command.startswith("ray::") or "/ray/" in command):
            return None
        names = [command, *(str(link.readlink()) for link in (entry / "fd").iterdir())]
    except OSError:  # it has ended, or is another user's
        return None
    found = next(filter(None, map(_SESSION.search, names)), None)
    return None if found is None else (int(entry.name), Path(found[1]), command[:120])


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
