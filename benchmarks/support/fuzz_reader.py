"""Read inputs of one fuzzing target, and keep the counts and the defects in a folder."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from pathlib import Path

from benchmarks.support.fuzz_tally import Tally
from tests.fuzz.target import Defect, Target, defect_of

LIMIT_S = 5
MOST_BYTES = 3 * 2**30
"""Address space that inputs may take beyond what the process begins with [bytes]."""
MOST_AT_ONCE = 512 * 2**20
"""Largest growth of peak resident memory that one input may cause [bytes]."""


class Reader:
    """Reader of inputs, which limits the memory of this process.

    Args:
        target: What reads the inputs.
        folder: Folder that gets `tally`, the current counts, and every distinct defect: its input and a description.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self._target, self._folder, self._workplace = target, folder, folder / "workplace"
        self._workplace.mkdir(parents=True, exist_ok=True)
        self._tally = Tally(folder / "tally")
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))

    def read(self, data: bytes) -> None:
        """Read one input, count it, and keep it if it shows a defect."""
        peak_bytes, begun_s = _peak_bytes(), time.monotonic()
        accepted, defect = defect_of(self._target, data, self._workplace)
        took_s = time.monotonic() - begun_s
        if defect is None and _peak_bytes() - peak_bytes > MOST_AT_ONCE:
            defect = Defect(kind="memory", text=f"takes {(_peak_bytes() - peak_bytes) / 2**20:.0f} MiB more")
        if defect is None and took_s > LIMIT_S:
            defect = Defect(kind="slow", text=f"takes {took_s:.1f} s")
        if defect is not None:
            self._keep(defect, data)
        self._tally.add(accepted=accepted, took_s=took_s)

    def _keep(self, defect: Defect, data: bytes) -> None:
        """Write a defect, unless the same defect is already known with a shorter input."""
        name = hashlib.sha256(defect.kind.encode()).hexdigest()[:12]
        before = self._folder / f"defect-{name}.input"
        if not before.exists() or before.stat().st_size > len(data):
            before.write_bytes(data)
            told = {"kind": defect.kind, "text": defect.text[-4000:]}
            (self._folder / f"defect-{name}.json").write_text(json.dumps(told), encoding="utf-8")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
