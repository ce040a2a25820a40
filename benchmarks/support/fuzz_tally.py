"""Counts of one process that fuzzes, in a file, which survive however it ends."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_FORM = struct.Struct("<QQdd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What was done so far.

    Attributes:
        inputs: Read to their end.
        accepted: Of these, not refused.
        seconds: Since the first.
        worst_s: The longest that one took [s].
    """

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    worst_s: float = 0.0

    def and_then(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(
            inputs=self.inputs + other.inputs,
            accepted=self.accepted + other.accepted,
            seconds=self.seconds + other.seconds,
            worst_s=max(self.worst_s, other.worst_s),
        )


class Tally:
    """Counts that are being made."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)
        self._inputs, self._accepted, self._worst_s = 0, 0, 0.0
        self._begun_s = time.monotonic()

    def add(self, *, accepted: bool, took_s: float) -> None:
        """Counts one input."""
        self._inputs += 1
        self._accepted += accepted
        self._worst_s = max(self._worst_s, took_s)
        _FORM.pack_into(self._memory, 0, self._inputs, self._accepted, time.monotonic() - self._begun_s, self._worst_s)


def counted(path: Path) -> Counts:
    """What stands in a file; nothing where there is none."""
    if not path.exists():
        return Counts()
    inputs, accepted, seconds, worst_s = _FORM.unpack(path.read_bytes())
    return Counts(inputs=inputs, accepted=accepted, seconds=seconds, worst_s=worst_s)
