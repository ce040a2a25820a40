"""What a round of studies holds of the machine: its processes, its shared memory and the ports that it listens on.

All are found from outside: processes by a mark in their environment, the rest by what /proc says of them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.process_table import marked_processes, session_processes

LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""

EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What is held of the machine at one moment, or was at some.

    Attributes:
        processes: Their numbers, with the moment of their start, which tells them from later ones of the same number.
        segments: Shared memory: names in /dev/shm, and `sysv:` with the number of others.
        jobs: Numbers of Slurm jobs.
        ports: On which somebody listens, with the number of the socket: another program may get the same port.
    """

    processes: frozenset[tuple[int, str]] = frozenset()
    segments: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    ports: frozenset[tuple[int, str]] = frozenset()

    def __or__(self, other: Held) -> Held:
        """All of both."""
        return Held(
            processes=self.processes | other.processes,
            segments=self.segments | other.segments,
            jobs=self.jobs | other.jobs,
            ports=self.ports | other.ports,
        )


NOTHING_HELD = Held()


def held_now(mark: str, drivers: Sequence[int] = ()) -> Held:
    """What the whole machine holds; of processes, those with this mark, and Ray's of these drivers.

    Ray's agents write their titles over their environments, and perhaps over the mark.
    """
    segments = {f"sysv:{fields[1]}" for fields in _table("/proc/sysvipc/shm")}
    found = marked_processes(mark).keys() | {number for driver in drivers for number in session_processes(driver)}
    shared = Path("/dev/shm")  # noqa: S108 # where Linux keeps shared memory
    return Held(
        processes=frozenset((process, _start(process)) for process in found),
        segments=frozenset(segments | {entry.name for entry in shared.iterdir()}),
        ports=frozenset(_listening()),
    )


def held_by(mark: str) -> Held:
    """What the processes with this mark hold."""
    listening = _listening()
    processes, segments, ports = set(), set(), set()
    for process in marked_processes(mark):
        processes.add((process, _start(process)))
        sockets = set(_sockets(process))
        ports |= {(port, inode) for port, inode in listening if inode in sockets}
        segments |= set(_mapped(process))
    return Held(processes=frozenset(processes), segments=frozenset(segments), ports=frozenset(ports))


class Watch(threading.Thread):
    """Gathers what the processes with a mark hold, until it is stopped."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self._mark = mark
        self._over = threading.Event()
        self.seen = NOTHING_HELD

    def run(self) -> None:
        """Looks now and then."""
        while not self._over.wait(EVERY_S):
            self.seen |= held_by(self._mark)

    def stop(self) -> Held:
        """All that was seen."""
        self._over.set()
        self.join()
        return self.seen


def _table(path: str) -> Iterator[list[str]]:
    file = Path(path)
    for line in file.read_text(encoding="ascii").splitlines()[1:] if file.exists() else ():
        yield line.split()


def _listening() -> set[tuple[int, str]]:
    """Ports, and the inodes of the sockets that listen there."""
    return {
        (int(fields[1].rpartition(":")[2], 16), fields[9])
        for path in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in _table(path)
        if fields[3] == LISTENS
    }


def _start(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _sockets(process: int) -> Iterator[str]:
    try:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
            if found:
                yield found[1]
    except OSError:  # it has just ended
        return


def _mapped(process: int) -> Iterator[str]:
    try:
        lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and not name[0].endswith("(deleted)") and name[0].startswith("/dev/shm/"):  # noqa: S108 # as above
            yield name[0].removeprefix("/dev/shm/")  # noqa: S108 # as above
        elif name and name[0].startswith("/SYSV"):  # these are always `(deleted)`: they have no name in a file system
            yield f"sysv:{inode}"
