"""Find processes in the process table: the ranks of running trials, and processes that a program has left behind."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def ranks_by_server() -> dict[int, frozenset[int]]:
    """Return the rank servers that Ray's workers below this process have started, with the ranks of each.

    All are process ids. Ray's workers are children of its raylet, which is a child of the process that started Ray.
    """
    parents = {int(entry.name): parent_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    servers = [
        process
        for process, parent in parents.items()
        # a rank is a fork of its server and has its command line
        if b"trials.ranks.server" in _command(process)
        and b"ray::" in _command(parent)
        and _is_below(os.getpid(), parent, parents)
    ]
    return {server: frozenset(process for process, parent in parents.items() if parent == server) for server in servers}


def running_ranks() -> set[int]:
    """Return the ranks of all rank servers."""
    return set().union(*ranks_by_server().values())


def marked_processes(mark: str) -> dict[int, str]:
    """Return the command lines of other processes whose environment holds `mark` (`NAME=value`), by process id.

    Processes inherit the mark from the program that set it, including processes that outlive their parent.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = _in_words(_command(int(entry.name)))
        except OSError:  # it has just ended, or is not ours
            continue
    return found


def session_processes(driver: int) -> dict[int, str]:
    """Return the command lines of Ray's processes with open files of a session that a driver began, by process id.

    Ray's agents write their titles over their environments, and with them over any mark.
    """
    of_driver = re.compile(rf"/session_[0-9_-]+_{driver}/")
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (command := _command(int(entry.name))).startswith(b"ray::"):
            try:
                links = [str(link.readlink()) for link in (entry / "fd").iterdir()]
            except OSError:  # it has just ended, or closed one meanwhile
                continue
            if any(map(of_driver.search, links)):
                found[int(entry.name)] = _in_words(command)
    return found


def below(root: int) -> list[int]:
    """Return all descendants of a process."""
    parents = {int(entry.name): parent_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return [process for process in parents if process != root and _is_below(root, process, parents)]


def commands_below(root: int) -> list[str]:
    """Return the command lines of all descendants of a process."""
    return [_in_words(_command(process)) for process in below(root)]


def parent_of(process: int) -> int:
    """Return the parent of a process, or 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
        return 0


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _in_words(command: bytes) -> str:
    return command.decode(errors="replace").replace("\0", " ").strip()


def _is_below(root: int, process: int, parents: Mapping[int, int]) -> bool:
    while process in parents:
        if process == root:
            return True
        process = parents[process]
    return False
