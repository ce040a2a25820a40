"""Messages from the ranks of a benchmark about the device and its calls; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Result of a benchmark.

    Attributes:
        time_s: Median time of one run [s].
        runs: Number of runs.
    """

    time_s: float
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Failure of a call.

    Attributes:
        reason: Error message of torch, or a description of how the process ended.
    """

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerators:
    """GPUs of this machine as torch sees them.

    Attributes:
        count: Number of GPUs.
        name: Name of the first GPU; empty without any.
    """

    count: int
    name: str
