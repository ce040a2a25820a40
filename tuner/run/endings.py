"""Endings of a run that are no decision of its search, each with an exit status of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from hardware.io.errors import ConfigError

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run in order: the user's, those of whoever takes the machine away, and the warning before that."""


class StorageLostError(ConfigError):
    """Storage that was lost while a study ran; the message names the file with the measurements."""


class TakenOverError(ConfigError):
    """Study that another process has taken over while this one ran it."""


def ignore_signal() -> None:
    """Do nothing, for commands that say nothing when a signal comes."""


@contextmanager
def ending_signals(on_signal: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt in the block at each signal that ends a run, after calling `on_signal`.

    The function that it gives tells whether one came that is not the user's: the machine is taken away, and the run is
    to be started again elsewhere. A signal that is ignored, as `nohup` has it, stays ignored.
    """
    came: list[int] = []

    def end(number: int, _frame: object) -> NoReturn:
        came.append(number)
        on_signal()
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, end)
        for number in ENDING_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield lambda: any(number != signal.SIGINT for number in came)
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not installed from Python, and Python cannot put it back
                signal.signal(number, handler)


def keep_status(status: int) -> None:
    """Let a signal that comes while Python ends, which takes a moment after Ray, end the process with this status."""
    for number in ENDING_SIGNALS:
        signal.signal(number, lambda _number, _frame: os._exit(status))
