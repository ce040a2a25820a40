"""What the ranks of a benchmark tell of a device and of its calls; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What a benchmark measured.

    Attributes:
        time_s: Median of the runs.
        runs: How many there were.
    """

    time_s: float
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a call could not be run.

    Attributes:
        reason: What torch said, or how the process ended.
    """

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerators:
    """The GPUs of this machine as torch sees them.

    Attributes:
        count: How many.
        name: What the first one calls itself; empty without any.
    """

    count: int
    name: str
