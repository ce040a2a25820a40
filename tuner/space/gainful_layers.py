"""Candidates with unequal layers on like hosts, where no study asks for them: those of the leaders that gain by it.

The first stage also holds the embedding and the last one the head, and unequal chunks may be cut in many ways. Only the
fastest configurations are planned, so that a study that does not ask waits no longer.
"""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.step_time import estimate_step

MOST_PLANNED = 16
"""Most configurations whose layers are planned: the fastest that fit."""
LEAST_GAIN = 0.005
"""Share of the step that unequal layers must save, so that they are a candidate."""


def gainful_layers(setting: Setting, grid: ConfigGrid, memory: MemoryEstimate, *, memory_headroom: float) -> ConfigGrid:
    """Return the leading configurations whose step is predicted to be shorter with unequal layers, cut like that.

    Args:
        setting: Job, runtime, and a cluster of like hosts.
        grid: Configurations with equal layers [n].
        memory: Their memory [n].
        memory_headroom: Fraction of the memory that must stay free.
    """
    from tuner.planners.pipeline.uneven import plan_layers  # noqa: PLC0415 # it imports planners

    at = np.flatnonzero((grid.pp > 1) & memory.fits(memory_headroom))
    if not len(at):
        return grid.take(at)
    seconds = estimate_step(setting, grid.take(at), memory=memory.take(at)).step_time_s
    fastest = np.argsort(seconds, kind="stable")[:MOST_PLANNED]
    found, after_s = plan_layers(setting, grid.take(at[fastest]), memory_headroom=memory_headroom)
    gains = (found.assignment > 0) & (after_s < (1 - LEAST_GAIN) * seconds[fastest])
    return found.take(gains)
