"""Keep the counts of a fuzzing process in a memory-mapped file, so that they survive however the process ends."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_FORM = struct.Struct("<QQdd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of a fuzzing run so far.

    Attributes:
        inputs: Number of inputs that were read to their end.
        accepted: Number of inputs that were not refused.
        seconds: Time since the first input [s].
        worst_s: Longest time spent on one input [s].
    """

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    worst_s: float = 0.0

    def and_then(self, other: Counts) -> Counts:
        """Return the combined counts of both runs."""
        return Counts(
            inputs=self.inputs + other.inputs,
            accepted=self.accepted + other.accepted,
            seconds=self.seconds + other.seconds,
            worst_s=max(self.worst_s, other.worst_s),
        )


class Tally:
    """Counter that writes its counts to a file after each input."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)
        self._inputs, self._accepted, self._worst_s = 0, 0, 0.0
        self._begun_s = time.monotonic()

    def add(self, *, accepted: bool, took_s: float) -> None:
        """Count one input."""
        self._inputs += 1
        self._accepted += accepted
        self._worst_s = max(self._worst_s, took_s)
        _FORM.pack_into(self._memory, 0, self._inputs, self._accepted, time.monotonic() - self._begun_s, self._worst_s)


def counted(path: Path) -> Counts:
    """Read the counts of a file; return zeros if it does not exist."""
    if not path.exists():
        return Counts()
    inputs, accepted, seconds, worst_s = _FORM.unpack(path.read_bytes())
    return Counts(inputs=inputs, accepted=accepted, seconds=seconds, worst_s=worst_s)
