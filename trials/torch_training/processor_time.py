"""Number of cores of this machine, and the CPU time that they have worked."""

from __future__ import annotations

import os
from pathlib import Path


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
