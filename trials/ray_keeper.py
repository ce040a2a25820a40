"""Keeper of a local Ray: a small process that ends what Ray leaves behind when its driver is killed.

Ray's agents look for the raylet now and then, and some go on for minutes after a driver was killed. The keeper holds
one end of a pipe whose other end only the driver has. When the driver is gone, however it ended, the keeper gives Ray
some seconds to end by itself and then kills the rest. It knows Ray's processes by a variable of their environment. A
driver that has ended its Ray in order dismisses the keeper by a byte.

The process runs this file as a script, so it imports nothing but a few modules of the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

MARK = "MESHTUNE_RAY_SESSION"
"""Environment variable of all processes of one local Ray."""

DISMISSED = b"."
"""What a driver writes that has ended its Ray in order."""

GRACE_S = 3.0
"""Time that Ray's processes have to end by themselves [s]: workers end their commands meanwhile."""

LOOK_EVERY_S = 0.2
GIVE_UP_S = 30.0
"""Time after which the keeper ends, whatever is left [s]."""


def ray_processes(mark: str, folder: str) -> Iterator[int]:
    """Yield the numbers of Ray's processes, but not of the commands that its workers have started.

    Args:
        mark: Value of MARK in their environment.
        folder: Folder in which Ray is installed.
    """
    wanted = f"{MARK}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 # without pathlib the process is smaller
        try:
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                is_marked = wanted in file.read().split(b"\0")
            with open(f"/proc/{name}/cmdline", "rb") as file:  # noqa: PTH123
                command = file.read()
        except OSError:  # it has ended, or is another user's
            continue
        if is_marked and (command.startswith(b"ray::") or os.fsencode(folder) in command):
            yield int(name)


def keep(mark: str, folder: str) -> None:
    """Wait for the end of the driver, and end what is left of its Ray."""
    is_dismissed = False
    while os.read(0, 1):
        is_dismissed = True
    ended_s = time.monotonic()
    while time.monotonic() < ended_s + GIVE_UP_S:
        left = [*ray_processes(mark, folder)]
        is_late = time.monotonic() > ended_s + GRACE_S
        if not left and (is_dismissed or is_late):  # Ray that was just starting may show no process for a moment
            return
        if is_late:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the pipe is the only end
    keep(*sys.argv[1:])
