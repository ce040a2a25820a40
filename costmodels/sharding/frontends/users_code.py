"""Boundary around a user's own code, which a process imports and calls: what it does there stays on its side.

What it prints goes to standard error, also from C and from the processes that it starts. What it raises, whatever that
is, becomes one message. The working directory, the streams and the handlers of signals that end a process are put back,
and a copy of the process that its code has forked goes no further. Code that ends the process in one stroke, with
`os._exit`, a signal or a crash in C, cannot be held.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hardware.io.answer_stream import AnswerStream
from hardware.io.errors import ConfigError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals whose handlers may raise KeyboardInterrupt."""


@contextmanager
def users_code(factory: str, *, option: str, folder: str | None = None) -> Iterator[None]:
    """Run code of a user's module, that of `factory`, in this context.

    Args:
        factory: Factory as `module:factory`.
        option: Name of the option or key in messages.
        folder: Folder in which the message suggests to import the module; None for the working directory.

    Raises:
        ConfigError: The code has raised something; the rule says what, and where.
        KeyboardInterrupt: A signal has ended the process while the code ran.
    """
    process = os.getpid()
    with _printing_to_stderr(), _same_directory(), _same_handlers() as is_ended:
        try:
            yield
        except ConfigError as error:
            if error.__cause__ is None:
                raise
            rule = error.rule + _place_of(error.__cause__)
            raise ConfigError(rule, key=error.key, value=error.value, nearest=error.nearest) from None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and is_ended():
                raise
            module = factory.partition(":")[0]
            where = "" if folder is None else f" in {folder}"
            raise ConfigError(
                f"fails: {_in_words(error)}",
                key=option,
                value=factory,
                nearest=f"`python -c 'from {module} import *'`{where} shows whether it imports",
            ) from None
        finally:
            if os.getpid() != process:  # the code has forked, and this copy would go on as if it were the command
                os._exit(0)


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Print to standard error whatever goes to standard output.

    If the command's answer has a stream of its own, the descriptor of standard output stays with standard error for
    good, since code that has run once may print later.
    """
    before = sys.stdout, sys.stderr
    _flush(*before, sys.__stdout__)
    kept = [_copy(1), _copy(2)]
    target = os.open(os.devnull, os.O_WRONLY) if kept[1] is None else os.dup(2)
    os.dup2(target, 1)
    os.close(target)
    # streams of their own, because the code may keep or close them
    sys.stdout, sys.stderr = _stream_on(1), _stream_on(1)
    try:
        yield
    finally:
        _flush(sys.stdout, sys.stderr, sys.__stdout__)
        ctypes.CDLL(None).fflush(None)  # what C code has printed but not written
        sys.stdout, sys.stderr = before
        _put_back(2, kept[1])
        if isinstance(sys.stdout, AnswerStream):
            _put_back(1, _copy(2))
            if kept[0] is not None:
                os.close(kept[0])
        else:
            _put_back(1, kept[0])


def _stream_on(descriptor: int) -> io.TextIOWrapper:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # of a number


def _flush(*streams: Any) -> None:
    """Flush streams, of which the user's code may have made anything."""
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()


def _copy(descriptor: int) -> int | None:
    """Return a copy of a descriptor; None if it is closed."""
    try:
        return os.dup(descriptor)
    except OSError:
        return None


def _put_back(descriptor: int, kept: int | None) -> None:
    """Put a copy back in a descriptor's place."""
    if kept is not None:
        os.dup2(kept, descriptor)
        os.close(kept)
    else:
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextmanager
def _same_directory() -> Iterator[None]:
    here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))  # O_PATH needs no right to list it
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


@contextmanager
def _same_handlers() -> Iterator[Callable[[], bool]]:
    """Put the handlers of signals that end the process back; the function tells whether one of them was called."""
    ended: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only that one has handlers
        yield lambda: True
        return

    def noting(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
        def note(number: int, frame: Any) -> Any:
            ended.append(number)
            return handler(number, frame)

        return note

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, noting(handler))
    try:
        yield lambda: bool(ended)
    finally:
        for number, handler in before.items():
            if handler is not None:  # None is a handler that was not set by Python
                signal.signal(number, handler)


def _in_words(error: BaseException) -> str:
    """Return the first line of an error with the place in the user's code that raised it."""
    try:
        lines = str(error).strip().splitlines()
    except BaseException:  # noqa: BLE001 # an error of the user's, with a method of the user's
        lines = []
    said = ": ".join([type(error).__name__, *lines[:1]])
    return f"{f'it ends the interpreter ({said})' if isinstance(error, SystemExit) else said}{_place_of(error)}"


def _place_of(error: BaseException) -> str:
    """Return the last line of the user's code in the traceback of an error, in words; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "site-packages" not in frame.filename and not _NOT_THEIRS(frame.filename)]
    return f" (line {theirs[-1].lineno} of {theirs[-1].filename})" if theirs else ""


_ROOT = Path(__file__).resolve().parents[3]
_NOT_THEIRS = re.compile(
    "<frozen |"
    + "|".join(
        re.escape(f"{folder}{os.sep}")
        for folder in (
            *(_ROOT / room for room in ("hardware", "costmodels", "trials", "tuner")),
            Path(os.__file__).parent,
        )
    )
).match
"""Match of file names of ours and of Python's."""
