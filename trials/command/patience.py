"""Time limit for code in the main thread of a process, also inside a search for a regular expression."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlowError(Exception):
    """End of a block that did not finish in time."""


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Limit the time of the block inside; nothing else in this thread may use SIGALRM.

    Raises:
        TooSlowError: The block took longer.
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
