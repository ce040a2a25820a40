"""Keeper of a local Ray: a small process that ends what Ray leaves behind when its driver is killed.

Ray's agents look for the raylet now and then, and some go on for minutes after a driver was killed, because they tell a
server that has died too. A keeper waits for the end of the driver, by a pipe whose other end only the driver has and by
the driver's process itself. When the driver is gone, however it ended, the keeper gives Ray some seconds to end by
itself and then kills the rest. A driver that has ended its Ray in order dismisses its keepers by a byte, and they kill
the rest at once. It has two, so that one may be killed too, and starts another for each that was (`local.py`).

A process is this Ray's if its environment holds a mark that this Ray alone has, or if it has an open file in the folder
of this Ray's session. The mark does not suffice: agents write their titles over the front of their environments, and
Ray deals environments in any order. The name of the session is read from the command line of a marked process.

The process runs this file as a script, so it imports nothing but a few modules of the standard library.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator

MARK = "MESHTUNE_RAY_SESSION"
"""Environment variable of all processes of one local Ray, but not of its keepers."""

DISMISSED = b"."
"""What a driver writes that has ended its Ray in order."""

GRACE_S = 3.0
"""Time that Ray's processes have to end by themselves [s]: workers end their commands meanwhile."""

LOOK_EVERY_S = 0.2
GIVE_UP_S = 30.0
"""Time after which the keeper ends, whatever is left [s]."""

_SESSION = re.compile(rb"/(session_[0-9_-]+)/")


def ray_processes(mark: str, folder: str, session: str = "") -> Iterator[int]:
    """Yield the numbers of Ray's processes, but not of the commands that its workers have started.

    Args:
        mark: Value of MARK in their environment.
        folder: Folder in which Ray is installed.
        session: Name of the session in whose folder they have open files; empty if it is not known.
    """
    for number in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 # without pathlib the process is smaller
        command = _read(number, "cmdline")
        is_of_ray = command.startswith(b"ray::") or os.fsencode(folder) in command
        if is_of_ray and (_is_marked(number, mark) or (session and _has_file_in(number, session))):
            yield int(number)


def session_of(mark: str) -> str:
    """Return the name of the session of a Ray, as its marked processes tell it; empty if none does."""
    for number in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        if (found := _SESSION.search(_read(number, "cmdline"))) and _is_marked(number, mark):
            return found[1].decode()
    return ""


def _is_marked(number: str, mark: str) -> bool:
    return f"{MARK}={mark}".encode() in _read(number, "environ").split(b"\0")


def _has_file_in(number: str, session: str) -> bool:
    """Return whether a process has an open file in the folder of a session."""
    try:
        links = [os.readlink(f"/proc/{number}/fd/{entry}") for entry in os.listdir(f"/proc/{number}/fd")]  # noqa: PTH115, PTH208
    except OSError:  # it has ended, or closed one meanwhile
        return False
    return any(f"/{session}/" in link for link in links)


def _read(number: str, name: str) -> bytes:
    """Return a file of a process; empty if it has ended or is another user's."""
    try:
        with open(f"/proc/{number}/{name}", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def keep(mark: str, folder: str, driver: int) -> None:
    """Wait for the end of the driver, and end what is left of its Ray."""
    session, is_dismissed = _wait(mark, driver)
    ended_s = time.monotonic()
    while time.monotonic() < ended_s + GIVE_UP_S:
        left = [*ray_processes(mark, folder, session)]
        is_late = is_dismissed or time.monotonic() > ended_s + GRACE_S
        if not left and is_late:  # Ray that was just starting may show no process for a moment
            return
        if is_late:
            for number in left:
                try:
                    os.kill(number, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(LOOK_EVERY_S)


def _wait(mark: str, driver: int) -> tuple[str, bool]:
    """Wait for the end of the driver; return the name of Ray's session, and whether the keeper is dismissed."""
    session, is_dismissed = "", False
    ends = [0]
    try:
        # children that the driver has forked would hold its end of the pipe open
        ends.append(os.pidfd_open(driver))
    except ProcessLookupError:
        return session_of(mark), False
    except OSError:  # a kernel before 5.3
        pass
    while True:
        ready, _, _ = select.select(ends, [], [], None if session else LOOK_EVERY_S)
        if any(end != 0 for end in ready):
            return session, is_dismissed
        if 0 in ready:
            if not os.read(0, 1):
                return session, is_dismissed
            is_dismissed = True
        # read while Ray lives, because its server ends at once when the driver is killed
        session = session or session_of(mark)


if __name__ == "__main__":  # the end of the driver is its only end: it is started among unheard signals
    keep(sys.argv[1], sys.argv[2], int(sys.argv[3]))
