"""Baseline of a study: the configuration that an engineer would write by hand, where no current one is named.

The rule. Of the candidates that are predicted to fit with the study's headroom, without context parallelism, uneven
work or a changed further dimension as long as any such fits:

1. the smallest product of tp and pp;
2. of these the largest tp that stays within a host, and the rest by pp, in plain 1F1B;
3. the smallest ep, and the smallest micro-batch;
4. dp takes the rest of the devices.

Guides to Megatron-LM and similar frameworks advise the same: model parallelism only as far as memory needs it, tensor
parallelism within a host first, then the pipeline (Narayanan et al. 2021, arXiv 2104.04473, takeaways 1 and 2).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import DIMENSIONS, ConfigGrid, Value
from hardware.arrays import IntArray


def baseline_position(
    grid: ConfigGrid, fits: NDArray[np.bool_], *, devices_per_domain: int, defaults: Mapping[str, Value]
) -> int | None:
    """Return the position of the baseline among the candidates [n]; None where none of them `fits` in memory [n].

    `devices_per_domain` is that of the cluster. The defaults are those of further dimensions that nobody opens.
    """
    if not fits.any():
        return None
    # the last key weighs most
    order = np.lexsort(
        (
            grid.mbs,
            grid.ep,
            grid.vpp,
            grid.pp,
            grid.tp * grid.pp,
            grid.tp > devices_per_domain,
            _count_changed(grid, defaults),
            grid.assignment != 0,
            grid.cp * grid.up,
            ~fits,
        )
    )
    return int(order[0])


def _count_changed(grid: ConfigGrid, defaults: Mapping[str, Value]) -> IntArray:
    """Return how many opened dimensions of each candidate differ from the study's defaults [n].

    Without tensor parallelism there is nothing that sequence parallelism could split, and without replicas every ZeRO
    stage is the same: such candidates have the one value that stands for all.
    """
    count = np.zeros(len(grid), dtype=np.int64)
    for name in grid.opened:
        if name == "assignment":
            continue
        # 1 where the candidate has another value than the study's job
        differs = getattr(grid, name).astype(np.int64) != DIMENSIONS[name].code_of(defaults[name])
        if name == "sequence_parallel":
            differs &= grid.tp > 1
        if name == "zero_stage":
            differs &= grid.dp * grid.cp * grid.up > 1
        count += differs
    return count
