"""Timing of a call: the median of warmed-up runs on a CPU core or a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from trials.torch_training.benchmarks.messages import Timing

FEWEST_RUNS, MOST_RUNS = 5, 1000
LEAST_S = 0.02
"""Minimum time of all runs [s]; there are at least FEWEST_RUNS.

The median of five runs that scatter by 10% is known to 6%. Short runs are repeated more often, so theirs is more
precise.
"""

ENOUGH_S = 2.0
"""Time after which no further run begins, however few there were [s]."""

FLUSHED_BYTES = 2**28
"""Number of bytes overwritten between two runs on a GPU: several times any level 2 cache (H200: 50 MB)."""


def time_runs(runs: Sequence[Callable[[], object]], device: torch.device) -> Timing:
    """Return the time of one run of a call, on one or several sets of data in turn."""
    one = _cuda_timer(device) if device.type == "cuda" else _cpu_time_s
    # The first run of each data set is a warm-up.
    for run in runs:
        one(run)
    times_s: list[float] = []
    start_s = time.monotonic()
    while not _is_enough(len(times_s), time.monotonic() - start_s):
        times_s.append(one(runs[len(times_s) % len(runs)]))
    return Timing(time_s=statistics.median(times_s), runs=len(times_s))


def _is_enough(runs: int, spent_s: float) -> bool:
    if not runs:
        return False
    return runs >= MOST_RUNS or spent_s >= ENOUGH_S or (runs >= FEWEST_RUNS and spent_s >= LEAST_S)


def _cpu_time_s(run: Callable[[], object]) -> float:
    """Return the CPU time of a run [s], which excludes other programs on the same core."""
    start_s = time.thread_time()
    run()
    return time.thread_time() - start_s


def _cuda_timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a timer that uses the device's clock; a flush keeps the device busy while the host launches the run."""
    filling = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch leaves it untyped
        for _ in range(2)
    )

    def time_s(run: Callable[[], object]) -> float:
        # Overwrite the caches, so that the data of the last run is gone, as in training.
        filling.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return time_s
