"""Ends what takes too long in the main thread of a process, a search for a regular expression too."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlowError(Exception):
    """What was begun did not end in time."""


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Lets what stands inside take so long; nothing else of this thread may use SIGALRM.

    Raises:
        TooSlowError: it took longer.
    """

    def end(_signal: int, _frame: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
