"""t_hat_i: the simulated time of one operator on one device; the prior that a surrogate corrects (FlexParallel 3.1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.job import TrainingJob
from costmodels.operators import FloatArray, Operator, OpKind
from costmodels.runtime import RuntimeProfile
from hardware.device import Device

KernelTime = Callable[[Operator, Device, TrainingJob, RuntimeProfile], FloatArray]
"""Seconds of one operator for every shape row [u]: `roofline_s`, or anything that corrects it."""


def roofline_s(operator: Operator, device: Device, job: TrainingJob, runtime: RuntimeProfile) -> FloatArray:
    """Time of one operator on the device [u]: the slower of compute and memory traffic.

    Source: roofline model (Williams et al. 2009), each roof lowered by the runtime's efficiency for the kind.
    Attention runs in 16 bits also where matrix products run in fp8. What the host needs to launch operators is counted
    per stage (see step_time.py), because launches run ahead of the device.
    """
    efficiency = {
        OpKind.MATMUL: runtime.matmul_efficiency,
        OpKind.GROUPED_MATMUL: runtime.grouped_matmul_efficiency,
        OpKind.ATTENTION: runtime.attention_efficiency,
    }.get(operator.kind, 1.0)
    precision = "bf16" if operator.kind == OpKind.ATTENTION and job.precision == "fp8" else job.precision
    compute_s = operator.flop / (device.peak_flop_per_s(precision) * efficiency)
    memory_s = operator.moved_bytes / (device.memory_bandwidth_bytes_per_s * runtime.memory_efficiency)
    return np.asarray(np.maximum(compute_s, memory_s))
