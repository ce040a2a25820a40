"""Signals that end a run, and processes that do not hear them because only the driver should.

A terminal and `timeout` send a signal to the driver's whole process group, and systemd to all processes of its control
group, whatever their session. If Ray ended with it, the driver would lose its Ray before it has given its study up. A
signal that is blocked stays so in every process that is started meanwhile, and in all that those start. Programs of
users hear it again, since whoever ends them, and what they start, may rely on it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run in order: the user's, those of whoever takes the machine away, and the warning before that."""


@contextmanager
def unheard() -> Iterator[None]:
    """Let processes that the block starts not hear signals that end a run; for this thread they wait until its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray sets its own when it starts, and the default, which kills, when it ends."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None: not installed from Python, and Python cannot put it back
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def ignore_signals() -> None:
    """Ignore signals that end a run, in a process that ends by itself when whoever started it is gone."""
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def hear_signals() -> None:
    """Let a forked process, which is to be a program of the user's, hear signals that end a run."""
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
