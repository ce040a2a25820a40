"""Optimizer's step of states that are kept on the host: gradients go down, the update runs there, weights come back.

Copies and update run beside each other, tensor by tensor, so that the longer of the two takes the time. Megatron-LM
does so with --overlap-cpu-optimizer-d2h-h2d. ZeRO-Offload (Ren et al. 2021, sections 4.1 and 5.1) copies gradients
during the backward pass, and weights while Adam works on the next ones.

Checked against Megatron-Bridge's figures for Qwen3-30B-A3B with tp 2, pp 2 and ep 4 on two DGX H100 hosts
(skills/nemo-mbridge-perf-cpu-offloading/card.yaml): offloading all states adds 2.88 s to a step of 1.00 s.

Letters: c kinds of stages, d kinds of devices, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.optimizers.contract import Widths
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.step.placement import LocalParameters, sharded_parameters
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.device import Device

HOST_BYTES = 4
"""Size of what the host keeps of a parameter: its gradient, the weight and each state [bytes]. Adam reads the four of
them (16) and writes the last three (12)."""

HOST_BYTES_PER_S = 130e9
"""Memory traffic of Adam on the processors of one host [bytes/s]. Measured: 109e9 to 130e9 on a DGX-2 (ZeRO-Offload,
table 4, CPU-Adam: 0.22 s for 1 and 2.57 s for 10 billion parameters) and 149e9 on a DGX H100 (Megatron-Bridge, the card
above: 2.88 s for 15.3 billion). A superchip has a processor of its own, to which the same figure is given (assumed)."""

COPY_EFFICIENCY = 0.77
"""Share of a host link's bandwidth that copies of pinned memory reach. Measured on PCIe 3: 12.36 of 16 GB/s (README of
NVIDIA/nvbandwidth); assumed for other links."""

USUAL_LINK_BYTES_PER_S = 32e9
"""Bandwidth to the host of a device whose link is not in the catalog: PCIe 4 with 16 lanes (assumed) [bytes/s]."""

SUPERCHIP_LINK = "nvlink-c2c"
"""Kind of host link by which a device shares its module with a processor of its own."""


class HostRates(NamedTuple):
    """Rates that one device gets of its host while all devices of the host are at work, each [c], or one number.

    Attributes:
        copy_bytes_per_s: Rate of copies to or from the host [bytes/s].
        adam_bytes_per_s: Memory traffic of Adam on the host [bytes/s].
    """

    copy_bytes_per_s: FloatArray | float
    adam_bytes_per_s: FloatArray | float


def host_rates(cluster: Cluster, device: Device) -> HostRates:
    """Return the rates of one device of the cluster; its hosts' processors are shared by all of their devices."""
    link = device.host_link
    has_own = link is not None and link.kind == SUPERCHIP_LINK
    sharers = max(group.devices_per_host for group in cluster.groups if group.device == device)
    return HostRates(
        copy_bytes_per_s=COPY_EFFICIENCY * (link.bandwidth_bytes_per_s if link else USUAL_LINK_BYTES_PER_S),
        adam_bytes_per_s=HOST_BYTES_PER_S / (1 if has_own else sharers),
    )


def optimizer_step_s(
    job: TrainingJob,
    runtime: RuntimeProfile,
    weights: ConfigGrid,
    local: LocalParameters,
    rates: HostRates,
    passes_s: FloatArray,
    products_s: FloatArray | float = 0.0,
) -> FloatArray:
    """Compute the time of the optimizer's step on each stage, on the device or on the host [s], [c, w].

    Matrix products stay on the device wherever the states are (DeepSpeed stage_1_and_2.py,
    _apply_muon_updates_cpu_offload).

    Args:
        job: Training job.
        runtime: Runtime profile; it says how wide gradients are.
        weights: Rows of weights [w].
        local: Parameters on one rank.
        rates: Rates of the slowest host of each kind of stage.
        passes_s: Time of the passes on the device if no states are on the host [s], [c, w].
        products_s: Time of the update's matrix products [s], [c, w].
    """
    if not weights.is_offloaded.any():
        return passes_s + products_s
    share = runtime.offload_share
    partly = share * _on_host_s(job, runtime, weights, local, rates) + (1 - share) * passes_s
    return np.where(weights.is_offloaded, partly, passes_s) + products_s


def _on_host_s(
    job: TrainingJob, runtime: RuntimeProfile, weights: ConfigGrid, local: LocalParameters, rates: HostRates
) -> FloatArray:
    """Compute the longer of copies and update [s], [c, w]; gradients go down as wide as they are, weights come back.

    Megatron-LM copies fp32 gradients and 16-bit weights (hybrid_optimizer.py), ZeRO-Offload 16 bits of both (Ren et al.
    2021, section 3.3).
    """
    copied = max(runtime.gradient_bytes, job.element_bytes) + job.element_bytes
    owned = sharded_parameters(weights, local)
    copy, adam = (np.reshape(rate, (-1, 1)) for rate in rates)
    states = OPTIMIZERS[job.optimizer].state_bytes("matrix", Widths(HOST_BYTES, HOST_BYTES, HOST_BYTES))
    moved = 3 * HOST_BYTES + 2 * states
    return np.asarray(owned * np.maximum(copied / copy, moved / adam))
