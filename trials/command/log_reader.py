"""Reader of a command's output: it keeps and prints each line, and tells the trial what the line says."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hardware.io.errors import quote_value
from hardware.io.output_file import new_file
from trials.command.log_pattern import LogPattern, StepSize, Totals
from trials.command.patience import TooSlowError, at_most

HEARTBEAT_S = 1.0
"""Shortest interval between two messages that there was output [s]."""

READ_BYTES = 65_536

LINE_LIMIT_S = 2.0
"""Time that one line may take to be read [s]: a user's expression may backtrack for years."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """Message that there was output."""


class SlowLineError(Exception):
    """Line that the user's pattern does not read in time; the text says which."""


class LogReader:
    """Reader of the output of one command, as it comes.

    Args:
        tell: Function that sends a message to the process that runs the trial.
        pattern: Pattern that reads the log.
        step: Size of a step, which converts rates to times.
        kept: File that keeps the whole log; None keeps none.
    """

    def __init__(self, tell: Callable[[Any], None], pattern: LogPattern, step: StepSize, kept: Path | None) -> None:
        self._tell = tell
        self._pattern = pattern
        self._step = step
        self._totals = Totals()
        self._kept = _KeptLog(kept)
        self._rest = b""
        self._heard_s = 0.0

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the kept log."""
        self._kept.close()

    def feed(self, read: bytes) -> None:
        """Read the whole lines of the output so far; a carriage return ends a line too, as in progress bars.

        Raises:
            SlowLineError: A line takes too long.
        """
        *whole, self._rest = (self._rest + read).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            self._read(line + b"\n")
        if len(self._rest) > READ_BYTES:
            line, self._rest = self._rest, b""
            self._read(line)

    def note(self, text: str) -> None:
        """Add a line of our own, also between two parts of a line of the output."""
        self._read(f"[{text}]\n".encode())

    def end(self) -> None:
        """Read the last line, which need not be whole.

        Raises:
            SlowLineError: It takes too long.
        """
        if self._rest:
            line, self._rest = self._rest, b""
            self._read(line + b"\n")

    def _read(self, line: bytes) -> None:
        self._kept.add(line)
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
        text = line.decode(errors="replace")
        try:
            with at_most(LINE_LIMIT_S):
                reading = self._pattern.reading(text, self._step)
        except TooSlowError:
            seen = quote_value(text.strip())
            message = f"trial.log.pattern takes more than {LINE_LIMIT_S:g} s for one line: {seen}"
            raise SlowLineError(message) from None
        now_s = time.monotonic()
        if reading is not None:
            self._tell(self._totals.of_step(reading))
        elif now_s - self._heard_s >= HEARTBEAT_S:
            self._tell(Printed())
            self._heard_s = now_s


class _KeptLog:
    """File with the whole log, as far as there is room for it: no trial fails because its log cannot be kept."""

    def __init__(self, path: Path | None) -> None:
        self._file: BinaryIO | None = None
        if path is not None:
            with self._room():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.fdopen(new_file(path), "wb", buffering=0)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()

    def add(self, line: bytes) -> None:
        """Write a line, unless there was no room for an earlier one."""
        if self._file is not None:
            with self._room():
                left = memoryview(line)
                while left:
                    left = left[self._file.write(left) :]

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Give the log up if the disk is full, and print a note on it."""
        try:
            yield
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            sys.stdout.write(f"[trial.logs: the log is kept no further: {error.strerror}]\n")
            sys.stdout.flush()
            if self._file is not None:
                self._file.close()
                self._file = None
