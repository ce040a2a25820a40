"""Limit of the data that this process may add to its memory (RLIMIT_DATA); nothing here imports torch."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_data(more_bytes: int) -> None:
    """Let this process add this much data to what it has now [bytes]; a hard limit that is below stays."""
    limit = _data_bytes() + more_bytes
    _, highest = resource.getrlimit(resource.RLIMIT_DATA)
    if highest != resource.RLIM_INFINITY:  # the hard limit, which only root may raise
        limit = min(limit, highest)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _data_bytes() -> int:
    """Return the data and stacks of this process as RLIMIT_DATA counts them [bytes]: private, writable mappings."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    except OSError:  # no Linux
        return 0
    return pages * resource.getpagesize()
