"""What bounds a predicted step: the shares of its time, put together from the parts of the cost model.

`compute` contains the time of every operator as if memory were infinitely fast. What the traffic of memory adds to it,
and the pass of the optimizer over the weights, is `memory traffic`. `network` is all communication that no computation
hides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from costmodels.blocks.operator import Operator
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import kernel_s
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.step_time import StepEstimate, estimate_step
from hardware.arrays import FloatArray
from hardware.device import Device
from tuner.subject.ability import Ability
from tuner.subject.problem import Problem

NETWORK = ("tp", "cp", "up", "ep", "dp", "pp")
"""Parts of a step that are communication."""

PARTS = {
    "compute": ("compute",),
    "memory traffic": ("optimizer",),
    "network": NETWORK,
    "host": ("host",),
    "bubble": ("bubble", "imbalance"),
    "overhead": ("overhead",),
}
"""Parts of the breakdown behind each bound."""


def shares_of(
    problem: Problem, grid: ConfigGrid, estimate: StepEstimate, memory: MemoryEstimate
) -> list[dict[str, float]]:
    """Return the share of the predicted step that each bound takes, the largest first, for each configuration [n].

    Args:
        problem: Problem of the study.
        grid: Configurations [n].
        estimate: Predicted steps of all of them.
        memory: Predicted memory of all of them.
    """
    seconds = {bound: sum_parts(estimate.breakdown_s, parts) for bound, parts in PARTS.items()}
    if problem.subject.has(Ability.LAYERS):
        unhindered = estimate_step(problem.setting, grid, kernel_time=_fast_memory_s, memory=memory)
        waits_s = np.maximum(estimate.breakdown_s["compute"] - unhindered.breakdown_s["compute"], 0.0)
        seconds["compute"] = seconds["compute"] - waits_s
        seconds["memory traffic"] = seconds["memory traffic"] + waits_s
    found = []
    for at in range(len(grid)):
        shares = {bound: float(each[at] / estimate.step_time_s[at]) for bound, each in seconds.items()}
        found.append(dict(sorted(shares.items(), key=lambda one: -one[1])))
    return found


def sum_parts(breakdown_s: Mapping[str, FloatArray], parts: tuple[str, ...]) -> FloatArray:
    """Return the sum of some parts of a breakdown [s], [n]."""
    return np.asarray(np.sum([breakdown_s[part] for part in parts], axis=0))


def _fast_memory_s(operator: Operator, device: Device, job: TrainingJob, runtime: RuntimeProfile) -> FloatArray:
    """Return the time of an operator on a device whose memory is infinitely fast [s], [u]."""
    return kernel_s(operator, replace(device, memory_bandwidth_bytes_per_s=math.inf), job, runtime)
