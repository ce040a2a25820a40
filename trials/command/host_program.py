"""Program on each host of a trial: it runs the user's command and reads its output line by line.

The supervisor of the command inherits the pipe of this process's messages, and closes it last. The end of a host is
therefore received only when all processes that the command started are gone.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hardware.io.errors import quote_value
from trials.command.log_pattern import LogPattern, StepSize
from trials.command.patience import TooSlowError, at_most
from trials.command.placeholders import fill_all, fill_text, without_wildcards
from trials.command.process_tree import start_supervised
from trials.ranks.messages import Place

HEARTBEAT_S = 1.0
"""Shortest interval between two messages that there was output [s]."""

READ_BYTES = 65_536

LINE_LIMIT_S = 2.0
"""Time that one line may take to be read [s]: a user's expression may backtrack for years."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserCommand:
    """Command of a user, which a study describes and every host runs.

    Attributes:
        arguments: Program and arguments of the command, with placeholders.
        environment: Environment variables in addition to the host's, with placeholders; None removes a variable.
        directory: Working directory of the command.
        pattern: Pattern that reads the log.
        logs: Folder for whole logs on each host; None keeps only the end of a log, in the study.
        profile: Path of the traces of torch.profiler that the command leaves, with placeholders and perhaps wildcards;
            None if it leaves none.
        profile_root: Folder that `profile` is relative to.
    """

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str | None], ...] = ()
    directory: Path
    pattern: LogPattern
    logs: Path | None = None
    profile: str | None = None
    profile_root: Path = Path()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan(UserCommand):
    """Work of each host.

    Attributes:
        values: Names and values of the placeholders, except for those that only a host knows.
        flags: Arguments that take the place of `{flags}`.
        step: Size of a step, which converts rates to times.
        log_name: Beginning of the log's file name.
    """

    values: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    step: StepSize
    log_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """Message that there was output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Message that the command has ended.

    Attributes:
        code: Exit status of the command, or the negative number of the signal that killed it.
        trouble: Reason for no longer waiting for the command; empty if it has ended by itself.
    """

    code: int
    trouble: str = ""


def run_host(place: Place, plan: HostPlan) -> None:
    """Run the command to its end, and print its output here too."""
    if place.listening is not None:
        os.close(place.listening)  # the command will listen there
    values = dict(plan.values) | {
        "host_rank": str(place.rank),
        "master_address": place.host,
        "master_port": str(place.port),
    }
    if plan.profile is not None:
        values["profile"] = str(plan.profile_root / without_wildcards(fill_text(plan.profile, values)))
    arguments = fill_all(plan.arguments, values, plan.flags)
    command = start_supervised(arguments, _environment(plan, values), plan.directory)
    with _Log(plan, place.rank) as log:
        heard_s = 0.0
        for line in _lines(command.output):
            log.keep(line)
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            try:
                with at_most(LINE_LIMIT_S):
                    reading = plan.pattern.reading(line.decode(errors="replace"), plan.step)
            except TooSlowError:
                place.tell(Ended(code=1, trouble=_too_slow(line)))
                return
            now_s = time.monotonic()
            if reading is not None:
                place.tell(reading)
            elif now_s - heard_s >= HEARTBEAT_S:
                place.tell(Printed())
                heard_s = now_s
    place.tell(Ended(code=command.wait()))


def _too_slow(line: bytes) -> str:
    seen = quote_value(line.decode(errors="replace").strip())
    return f"trial.log.pattern takes more than {LINE_LIMIT_S:g} s for one line: {seen}"


def _environment(plan: HostPlan, values: Mapping[str, str]) -> dict[str, str]:
    found = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE"):  # they count hosts here, and would mislead the command
        found.pop(name, None)
    for name, text in plan.environment:
        if text is None:
            found.pop(name, None)
        else:
            found[name] = fill_text(text, values)
    return found


class _Log:
    """File with the whole log, as far as there is room for it: no trial fails because its log cannot be kept."""

    def __init__(self, plan: HostPlan, host_rank: int) -> None:
        self._file: BinaryIO | None = None
        if plan.logs is not None:
            with self._room():
                plan.logs.mkdir(parents=True, exist_ok=True)
                self._file = (plan.logs / f"{plan.log_name}-host-{host_rank}.log").open("wb", buffering=0)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, line: bytes) -> None:
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


def _lines(output: int) -> Iterator[bytes]:
    """Yield whole lines as they come; a carriage return ends a line too, as in progress bars."""
    rest = b""
    while True:
        select.select([output], [], [])
        read = os.read(output, READ_BYTES)
        if not read:
            break
        *whole, rest = (rest + read).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield line + b"\n"
        if len(rest) > READ_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest + b"\n"
