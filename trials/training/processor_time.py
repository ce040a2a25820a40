"""Number of cores of this machine, and the CPU time that they have worked."""

from __future__ import annotations

import os
import time
from pathlib import Path

MUCH_CPU = 0.1
"""Share of the machine's CPU that other programs may use before an observation mentions it."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_s() -> float | None:
    """Return the CPU time that the whole machine has worked since its start [s]; None if it cannot be read."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class MachineLoad:
    """CPU time that the whole machine works between `begin` and the last `note`.

    Args:
        cores: Number of cores of the machine that all ranks share; None if they run on several machines.
    """

    def __init__(self, cores: int | None) -> None:
        self._cores = cores
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._began_s = self._ended_s = time.monotonic()
        self._busy_at_begin_s = self._busy_at_end_s = busy_s()

    def note(self) -> None:
        """Count until now."""
        self._ended_s, self._busy_at_end_s = time.monotonic(), busy_s()

    def others_share(self, own_s: float) -> float | None:
        """Return the share of the machine's CPU time that other programs used; None if unknown.

        Args:
            own_s: CPU time of the trial's own ranks in that time [s].
        """
        if self._cores is None or self._busy_at_begin_s is None or self._busy_at_end_s is None:
            return None
        if self._ended_s <= self._began_s:
            return None
        others_s = self._busy_at_end_s - self._busy_at_begin_s - own_s
        return max(others_s, 0.0) / ((self._ended_s - self._began_s) * self._cores)


def load_remark(share: float | None) -> list[str]:
    """Return a sentence on other programs if they used much of the machine's CPU time."""
    return [f"other programs used {share:.0%} of the machine's CPU"] if share is not None and share > MUCH_CPU else []
