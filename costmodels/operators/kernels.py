"""Simulated time t_hat_i of one operator on one device, the prior that a surrogate corrects (FlexParallel 3.1).

The time has two factors: the time of the kernel alone on the device, as a benchmark of that kernel would measure it,
and the share of that speed which the runtime reaches inside a training step. The first is a formula per kind of
operator with constants per device, corrected by tables of measured kernels where they exist (catalog/kernels). The
second is part of the runtime's profile. Collectives are operators too, with the times of hardware/collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.blocks.operator import Operator, OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import NARROW_BYTES, TrainingJob
from costmodels.operators.attention import attention_alone_s
from costmodels.operators.kernel_catalog import kernel_constants, matmul_table
from costmodels.operators.layer_operators import Collective
from costmodels.operators.matmul import matmul_alone_s
from hardware.arrays import FloatArray
from hardware.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s, send_recv_s
from hardware.device import Device
from hardware.group_links import GroupLinks

ALIGNMENT = 8
MISALIGNED_TIME = 2.7
"""Factor on the time of a misaligned product. Tensor cores read 16 bytes at once: a product whose rows in memory are
no multiple of 8 elements falls back to slower kernels (NVIDIA, Matrix Multiplication Background, section 2.3).
Measured: 2.7 times in vTrain's output heads, A100."""

KernelTime = Callable[[Operator, Device, TrainingJob, RuntimeProfile], FloatArray]
"""Function that returns the time of one operator for every shape row [s], [u]: `kernel_s`, or a correction of it."""

CollectiveTime = Callable[[Collective], FloatArray]
"""Function that returns the time of one collective with all its messages [s], [..., g]: `collective_s`, or a
correction of it."""


def kernel_s(
    operator: Operator,
    device: Device,
    job: TrainingJob,  # noqa: ARG001 # part of KernelTime: a synthetic world may need it
    runtime: RuntimeProfile,
) -> FloatArray:
    """Return the time of one operator of the job inside a training step [s], [u].

    The host's time to launch operators is counted per stage (see step_time.py), because launches run ahead of the
    device.
    """
    return alone_s(operator, device, is_flash2=runtime.flash2_attention) / share_in_training(operator.kind, runtime)


def cached_kernel_s() -> KernelTime:
    """Return a `kernel_s` that caches the times of operators alone, for profiles that differ in constants only."""
    alone: dict[tuple[object, ...], FloatArray] = {}

    def time_s(operator: Operator, device: Device, job: TrainingJob, runtime: RuntimeProfile) -> FloatArray:  # noqa: ARG001 # as in kernel_s
        arrays = (operator.shape, operator.flop, operator.moved_bytes)
        what = (operator.name, operator.kind, operator.phase, operator.precision, runtime.flash2_attention)
        # arrays hash by their bytes: equal operators of several profiles then share one time
        key = (device.name, *what, *(array.tobytes() for array in arrays))
        if key not in alone:
            alone[key] = alone_s(operator, device, is_flash2=runtime.flash2_attention)
        return alone[key] / share_in_training(operator.kind, runtime)

    return time_s


def execution_s(
    operator: Operator,
    device: Device,
    job: TrainingJob,
    runtime: RuntimeProfile,
    shapes: ConfigGrid,
    kernel_time: KernelTime = kernel_s,
) -> FloatArray:
    """Return the time of one execution on the rank with the most work, for every shape row [s], [u]."""
    seconds = kernel_time(operator, device, job, runtime) / runtime.speed_of(device.name)
    if operator.kind == OpKind.GROUPED_MATMUL:
        # the step waits for the rank whose experts got the most tokens
        seconds = seconds * np.where(shapes.ep > 1, 1.0 + runtime.expert_imbalance, 1.0)
    return np.asarray(seconds)


def collective_s(collective: Collective) -> FloatArray:
    """Return the time of one collective inside a training step, nothing hidden [s], [..., g]."""
    alone = _COLLECTIVE_ALONE[collective.kind]
    seconds = alone(collective.wire_bytes, collective.group)
    if collective.further_messages is None:
        return seconds
    return np.asarray(seconds + collective.further_messages * alone(np.zeros(1), collective.group))


def collective_latency_s(collective: Collective) -> FloatArray:
    """Return the latency in `collective_s`: the time of its messages if they had no bytes [s], [..., g]."""
    return np.asarray(_COLLECTIVE_ALONE[collective.kind](np.zeros(1), collective.group) * collective.messages)


def share_in_training(kind: OpKind, runtime: RuntimeProfile) -> float:
    """Return the share of their speed alone that operators of a kind reach inside the runtime's steps."""
    return {
        OpKind.MATMUL: runtime.matmul_efficiency,
        OpKind.GROUPED_MATMUL: runtime.grouped_matmul_efficiency,
        OpKind.ATTENTION: runtime.attention_efficiency,
        OpKind.SCAN: runtime.attention_efficiency,
    }.get(kind, runtime.memory_efficiency)


def collective_alone_s(kind: OpKind, message_bytes: FloatArray, group: GroupLinks) -> FloatArray:
    """Return the time of one collective alone on its links, as a benchmark would measure it [s], [g]."""
    return np.asarray(_COLLECTIVE_ALONE[kind](message_bytes, group))


def alone_s(operator: Operator, device: Device, *, is_flash2: bool = False) -> FloatArray:
    """Return the time of one operator alone on the device, as a benchmark would measure it [s], [u].

    Attention runs on the device's fastest flash kernels, or on those of FlashAttention-2.
    """
    if operator.kind == OpKind.ATTENTION:
        return _attention_s(operator, device, is_flash2=is_flash2)
    return _TIME_ALONE[operator.kind](operator, device)


def _matmul_s(operator: Operator, device: Device) -> FloatArray:
    m, k, n = operator.shape.T
    seconds = _products_s(operator, device, np.ones_like(m), m, k, n)
    if device.num_sms and operator.precision in ("bf16", "fp16"):
        # the rows of both operands in memory are k or n elements long
        misaligned = (k % ALIGNMENT != 0) | (n % ALIGNMENT != 0)
        seconds = np.where(misaligned, MISALIGNED_TIME * seconds, seconds)
    table = kernel_constants(device.name).table
    if table and operator.precision in ("bf16", "fp16"):
        seconds = seconds * matmul_table(table).correction(m, k, n)
    return seconds


def _grouped_matmul_s(operator: Operator, device: Device) -> FloatArray:
    """Return the time of a grouped product; the tokens of all experts are its rows, or a weight gradient's sums."""
    groups, m, k, n = operator.shape.T
    # each group has an equal share of the tokens, which are the sums' length in a weight gradient and rows otherwise
    if operator.name.endswith("weight_gradient"):
        k = k / groups
    else:
        m = m / groups
    return _products_s(operator, device, groups, m, k, n)


def _products_s(
    operator: Operator, device: Device, groups: FloatArray, m: FloatArray, k: FloatArray, n: FloatArray
) -> FloatArray:
    # narrow types keep an efficiency of their own; ramps take as long as in bf16
    constants = kernel_constants(device.name).matmul
    peak = device.peak_flop_per_s(operator.precision)
    return matmul_alone_s(
        constants,
        groups=groups,
        m=m,
        k=k,
        n=n,
        moved_bytes=operator.moved_bytes,
        peak_flop_per_s=peak * (constants.fp8_share if operator.precision in NARROW_BYTES else 1.0),
        ramp_scale=peak / device.peak_flop_per_s("bf16"),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=device.num_sms,
    )


def _attention_s(operator: Operator, device: Device, *, is_flash2: bool) -> FloatArray:
    is_forward = operator.phase == Phase.FORWARD
    batch, heads, queries, _, head_size = operator.shape.T
    return attention_alone_s(
        kernel_constants(device.name).attention(is_forward=is_forward, is_flash2=is_flash2),
        batch=batch,
        heads=heads,
        queries=queries,
        head_size=head_size,
        flop=operator.flop,
        moved_bytes=operator.moved_bytes,
        peak_flop_per_s=device.peak_flop_per_s(operator.precision),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=device.num_sms,
    )


SCAN_SHARE = 0.06
"""Share of the peak in 16 bits that the products of a chunked scan reach alone.

Triton's gated delta rule takes 1.954 ms for 8 heads of 128 and 65,536 tokens on H100 (flashinfer pull request 3866),
which is 0.05 of the peak. Mamba 2's scan overtakes FlashAttention-2 at 2,048 tokens on A100 (Dao and Gu 2024, section
1), which
is 0.07 if that reaches 110 TFLOP/s in both passes.
"""


def _scan_s(operator: Operator, device: Device) -> FloatArray:
    """Return the time of a scan's products, whose small chunks leave most of the device idle."""
    compute_s = operator.flop / (device.peak_flop_per_s(operator.precision) * SCAN_SHARE)
    return np.maximum(compute_s, _memory_bound_s(operator, device))


def _memory_bound_s(operator: Operator, device: Device) -> FloatArray:
    """Return the latency plus the time of the bytes; small operators are slow because of the latency alone."""
    memory = kernel_constants(device.name).memory
    share = memory.norm_share if operator.kind == OpKind.NORM else memory.elementwise_share
    latency_s = np.where(operator.moved_bytes > 0, memory.latency_s, 0.0)  # what moves nothing does not run
    return np.asarray(latency_s + operator.moved_bytes / (device.memory_bandwidth_bytes_per_s * share))


_TIME_ALONE: dict[OpKind, Callable[[Operator, Device], FloatArray]] = {
    OpKind.MATMUL: _matmul_s,
    OpKind.GROUPED_MATMUL: _grouped_matmul_s,
    OpKind.SCAN: _scan_s,
    OpKind.NORM: _memory_bound_s,
    OpKind.ELEMENTWISE: _memory_bound_s,
}

_COLLECTIVE_ALONE: dict[OpKind, Callable[[FloatArray, GroupLinks], FloatArray]] = {
    OpKind.ALL_REDUCE: all_reduce_s,
    OpKind.ALL_GATHER: all_gather_s,
    OpKind.REDUCE_SCATTER: reduce_scatter_s,
    OpKind.ALL_TO_ALL: all_to_all_s,
    OpKind.SEND_RECV: send_recv_s,
}
