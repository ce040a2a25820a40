"""How long a call takes: its warmed-up median on a CPU core or a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from trials.torch_training.benchmarks.messages import Timing

FEWEST_RUNS, MOST_RUNS = 5, 1000
LEAST_S = 0.02
"""Runs go on until they are FEWEST_RUNS and have taken so long: the median of five that scatter by 10% is known to 6%,
and that of short ones, of which there are many, better."""

ENOUGH_S = 2.0
"""Runs that have taken so long are enough, however few."""

FLUSHED_BYTES = 2**28
"""What is overwritten between two runs on a GPU: several times the level 2 cache of any (H200: 50 MB)."""


def time_runs(runs: Sequence[Callable[[], object]], device: torch.device) -> Timing:
    """The time of one run.

    Args:
        runs: The same call on one or several sets of data, which take turns.
        device: Where they run.
    """
    one = _cuda_timer(device) if device.type == "cuda" else _cpu_time_s
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
    """Time that the core worked for it: other programs that share the core are none of the operator's time."""
    start_s = time.thread_time()
    run()
    return time.thread_time() - start_s


def _cuda_timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Times by the device's own clock; the flush keeps the device busy while the host launches what is timed."""
    filling = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch leaves it untyped
        for _ in range(2)
    )

    def time_s(run: Callable[[], object]) -> float:
        filling.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return time_s
