"""Count predictions per second on the two grids of Pangu-135B, before anything is pruned by memory.

    python -m benchmarks.speed.predictions [--repeats 15] [--json]

A prediction is the step time of one configuration with its breakdown, and its peak memory by part. Target: 500,000 per
second on two cores on the 58,205 configurations for 6,144 devices.

Each core runs a process with one thread. With two cores, each predicts one half of the grid at the same time, and the
time ends with the answer of the slower one. The computed arrays stay in the processes. The time excludes the start of
the processes, the enumeration of the grid, and the first call, which looks up groups of ranks that later calls reuse
(`first_s`). Figures are medians of the repeats. `per_cpu_second` suffers less from other load on the machine.

Published tools, in configurations per CPU second on such a machine: llm-analysis 3,200 (without a pipeline's bubble),
Calculon 72 to 475, SimuMax 4 to 24.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.support.timing import arguments, publish
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from tuner.space.enumeration import enumerate_space
from tuner.study_file.config import load_study

STUDIES = Path(__file__).parents[2] / "configs" / "studies" / "flexparallel"
NAMES = ("pangu-135b-6144", "pangu-135b-8192")

_share: tuple[Setting, ConfigGrid] | None = None
"""Part of the grid that this process predicts, with its setting."""


def take_share(name: str, part: int, parts: int) -> None:
    """Give this process one of `parts` equal parts of a study's grid."""
    global _share  # noqa: PLW0603 # a process's initializer has no other place to leave it
    threadpool_limits(limits=1)
    config = load_study(STUDIES / f"{name}.yaml")
    grid, _ = enumerate_space(config.problem.setting, config.problem.options)
    _share = config.problem.setting, grid.take(np.array_split(np.arange(len(grid)), parts)[part])


def predict() -> tuple[int, float]:
    """Predict this process's share; return its number of configurations and the CPU time [s]."""
    assert _share is not None, "a share is taken before it is predicted"
    setting, grid = _share
    start = time.process_time()
    memory = estimate_memory(setting, grid)
    estimate_step(setting, grid, memory=memory)
    return len(grid), time.process_time() - start


def timed(pools: list[ProcessPoolExecutor]) -> tuple[int, float, float]:
    """Let all processes predict; return the number of configurations, the wall time [s] and the CPU time [s]."""
    start = time.perf_counter()
    answers = [answer.result() for answer in [pool.submit(predict) for pool in pools]]
    seconds = time.perf_counter() - start
    return sum(number for number, _ in answers), seconds, sum(cpu_s for _, cpu_s in answers)


def row_of(name: str, cores: int, repeats: int) -> dict[str, Any]:
    """Time one study on a number of cores."""
    pools = [
        ProcessPoolExecutor(1, get_context("spawn"), initializer=take_share, initargs=(name, part, cores))
        for part in range(cores)
    ]
    try:
        for started in [pool.submit(int) for pool in pools]:
            started.result()
        # The first call fills the caches and is reported separately.
        number, first_s, _ = timed(pools)
        times = [timed(pools) for _ in range(repeats)]
    finally:
        for pool in pools:
            pool.shutdown()
    seconds = median(wall_s for _, wall_s, _ in times)
    return {
        "study": name,
        "configurations": number,
        "cores": cores,
        "first_s": first_s,
        "seconds": seconds,
        "per_second": round(number / seconds),
        "per_cpu_second": round(number / median(cpu_s for _, _, cpu_s in times)),
    }


def main() -> None:
    """Time both studies on one core and on two."""
    options = arguments(__doc__ or "", repeats=15)
    rows = [row_of(name, cores, options.repeats) for name in NAMES for cores in (1, 2)]
    publish(rows, as_json=options.json)


if __name__ == "__main__":
    main()
