"""Keeper of a captured script: it answers the watch of program starts, and ends the script at its bounds.

In namespaces the keeper is the first process, so that all others end with it. Under the guard it adopts the orphans of
the script's processes, and ends all of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

from trials.command.process_tree import SIGNALLED, descendants, end_descendants
from tuner.capture.room.exec_watch import ExecWatch

LOOK_EVERY_S = 0.02
_MEASURE_EVERY_S = 0.1
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of a captured script.

    Attributes:
        seconds: Longest time of the run [s].
        background_s: Longest time for what the script left in the background [s].
        processes: Largest number of processes at a time.
        memory_bytes: Most memory of all processes together [bytes].
        output_bytes: Most that may be written to standard output and error [bytes].
        written_bytes: Most that may be written to files [bytes].
        records: Largest number of commands that are kept.
        records_bytes: Largest size of all kept commands together [bytes].
    """

    seconds: float
    background_s: float = 5.0
    processes: int = 512
    memory_bytes: int = 4 << 30
    output_bytes: int = 64 << 20
    written_bytes: int = 1 << 30
    records: int = 10_000
    records_bytes: int = 256 << 20

    @property
    def time_words(self) -> str:
        """Return the sentence for a script that was ended by the time limit."""
        return f"it ran longer than {self.seconds:g} s"

    @property
    def processes_words(self) -> str:
        """Return the sentence for a script that was ended by the number of its processes."""
        return f"it had more than {self.processes} processes"


class _Processes:
    """Processes that the script may still start before they are counted again.

    A script that starts processes without end would leave the keeper no time to count them; so each start waits for it.

    Attributes:
        are_too_many: Whether the bound was passed.
    """

    def __init__(self, most: int) -> None:
        self._most, self._left = most, 0
        self.are_too_many = False

    def refuse(self) -> int:
        """Return the error with which the start of a process fails, or 0."""
        if self._left <= 0:
            self._left = self._most - len(descendants(os.getpid()))
            self.are_too_many |= self._left <= 0
        if self.are_too_many:
            return errno.EAGAIN
        self._left -= 1
        return 0


def keep(command: int, watch: ExecWatch, bounds: Bounds, life_end: int) -> tuple[int, str]:
    """Let the command run to its end or to a bound, and end all that it has started.

    Args:
        command: Process number of the command.
        watch: Watch of program starts.
        bounds: Bounds of the run.
        life_end: Descriptor at whose end of file the command ends.

    Returns:
        The exit status as shells have it, and the bound that ended the command, as a sentence, or nothing.
    """
    asked = select.poll()
    asked.register(watch.listener, select.POLLIN)
    asked.register(life_end, 0)
    end_s, measured_s = time.monotonic() + bounds.seconds, 0.0
    status, stopped, processes = None, "", _Processes(bounds.processes)
    while not stopped:
        events = dict(asked.poll(LOOK_EVERY_S * 1e3))
        if life_end in events:
            break
        if events.get(watch.listener, 0) & select.POLLIN:
            watch.answer(processes.refuse)
        elif events:  # nothing runs that could ask
            time.sleep(LOOK_EVERY_S)
        ended, is_any_left = _take_ended(command)
        now_s = time.monotonic()
        if status is None and ended is not None:
            status, end_s = ended, min(end_s, now_s + bounds.background_s)
        if not is_any_left or (status is not None and now_s >= end_s):
            break
        if now_s >= end_s:
            stopped = bounds.time_words
        elif processes.are_too_many:
            stopped = bounds.processes_words
        elif now_s - measured_s >= _MEASURE_EVERY_S:
            measured_s, stopped = now_s, _passed(bounds)
    end_descendants()
    return (0 if status is None else status), stopped


def _take_ended(command: int) -> tuple[int | None, bool]:
    """Take note of ended processes; return the command's exit status if it ended, and whether any is left."""
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                code = os.waitstatus_to_exitcode(ended[1])
                found = code if code >= 0 else SIGNALLED - code
    except ChildProcessError:
        return found, False
    return found, True


def _passed(bounds: Bounds) -> str:
    """Return the bound of processes or memory that is passed now, as a sentence, or nothing."""
    running = descendants(os.getpid())
    if len(running) > bounds.processes:
        return bounds.processes_words
    pages = 0
    for process in running:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
            resident, shared = Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1:3]
            pages += int(resident) - int(shared)
    if pages * _PAGE_BYTES > bounds.memory_bytes:
        return f"it took more than {bounds.memory_bytes >> 20} MiB of memory"
    return ""
