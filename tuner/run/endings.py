"""Endings of a run that are no decision of its search, each with an exit status of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hardware.io.errors import ConfigError
from trials.ranks.unheard_signals import ENDING_SIGNALS

PREEMPTED = 75
"""Status for batch systems: the machine was taken away, and the same command goes on (EX_TEMPFAIL of sysexits.h)."""

INTERRUPTED = 130

SAME_S = 1.0
"""Time within which further signals ask for nothing more than the first [s]: `timeout` sends its signal to the program
and to its process group, and a terminal that is closed and its shell both send one."""


class StorageLostError(ConfigError):
    """Storage that was lost while a study ran; the message names the file with the measurements."""


class TakenOverError(ConfigError):
    """Study that another process has taken over while this one ran it."""


class FirstSignal:
    """Moment of the first signal of some, which tells whether a later one only repeats it."""

    def __init__(self) -> None:
        self._came_s: float | None = None

    def is_repeated(self) -> bool:
        """Take note of a signal that comes now; return whether it only repeats the first."""
        now_s = time.monotonic()
        if self._came_s is None:
            self._came_s = now_s
            return False
        return now_s - self._came_s < SAME_S


def put_back(before: Mapping[signal.Signals, Any]) -> None:
    """Install the handlers that signals had before."""
    for number, handler in before.items():
        if handler is not None:  # None: not installed from Python, and Python cannot put it back
            signal.signal(number, handler)


@contextmanager
def ending_signals(on_signal: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Raise KeyboardInterrupt in the block at a signal that ends a run, after calling `on_signal`.

    A later one interrupts the ending, too, unless it follows at once; after the block it ends the process. The function
    that it gives returns the exit status. A signal that is ignored, as `nohup` has it, stays ignored.
    """
    came: list[int] = []
    first = FirstSignal()

    def end(number: int, _frame: object) -> None:
        came.append(number)
        if not first.is_repeated():
            on_signal()
            raise KeyboardInterrupt

    before = {
        number: signal.signal(number, end)
        for number in ENDING_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }

    def status() -> int:
        return PREEMPTED if any(number != signal.SIGINT for number in came) else INTERRUPTED

    try:
        yield status
    finally:
        if came:
            keep_status(status())
        else:
            put_back(before)


def keep_status(status: int) -> None:
    """Let a signal that comes while Python ends, which takes a moment after Ray, end the process with this status."""
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda _number, _frame: os._exit(status))
