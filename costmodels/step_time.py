"""u: puts operator and collective times together to the time of one optimizer step (FlexParallel equation 1).

Per micro-batch each stage computes its layers and pays the exposed communication of tp, cp, up and ep; where the host
needs longer to launch all that, it waits for the host. The slowest stage sets the pace of the pipeline, the others make
the bubble; data parallel reduction and the optimizer close the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from costmodels.communication import BlockCommunication, block_communication
from costmodels.job import TrainingJob
from costmodels.kernels import KernelTime, roofline_s
from costmodels.operators import (
    Block,
    FloatArray,
    Phase,
    is_recomputed,
    residual_tokens,
    step_operators,
    unique_shapes,
)
from costmodels.parallel import ConfigGrid, IntArray
from costmodels.placement import Groups, LocalParameters, local_parameters, pipelines, place, stage_devices
from costmodels.runtime import RuntimeProfile
from costmodels.schedules import StageLayers, assign_layers, bubble_s
from hardware.cluster import Cluster, GroupLinks
from hardware.collectives import all_gather_s, all_reduce_s, reduce_scatter_s, send_recv_s
from hardware.device import Device

BREAKDOWN = ("compute", "tp", "cp", "up", "ep", "dp", "pp", "host", "bubble", "optimizer")

OPTIMIZER_PASS_BYTES = 34
"""Bytes that an Adam step moves per parameter it owns: gradient, master weight and two moments read (16), the last
three written with the 16-bit weight (14), and the gradient read once more for its norm (4)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepEstimate:
    """Step time of n configurations.

    Attributes:
        step_time_s: Wall clock of one optimizer step [n].
        breakdown_s: Its exposed parts by BREAKDOWN, each [n]; they sum to `step_time_s`.
    """

    step_time_s: FloatArray
    breakdown_s: dict[str, FloatArray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockTimes:
    """Compute time of one block and micro-batch on one kind of device, by block, each [u].

    `backward` includes what recomputation runs again; `launches` counts operators of both passes.
    """

    forward: dict[Block, FloatArray]
    backward: dict[Block, FloatArray]
    attention_core: FloatArray
    launches: dict[Block, FloatArray]


def block_times(
    job: TrainingJob, device: Device, runtime: RuntimeProfile, shapes: ConfigGrid, kernel_time: KernelTime
) -> BlockTimes:
    """Sums the operators of each block, for every shape row [u]."""
    forward = {block: np.zeros(len(shapes)) for block in Block}
    backward = {block: np.zeros(len(shapes)) for block in Block}
    launches = {block: np.zeros(len(shapes)) for block in Block}
    core = np.zeros(len(shapes))
    for operator in step_operators(job, shapes):
        seconds = kernel_time(operator, device, job, runtime)
        if operator.phase == Phase.FORWARD:
            forward[operator.block] += seconds
            again = is_recomputed(operator, shapes)
            backward[operator.block] += np.where(again, seconds, 0.0)
            launches[operator.block] += 1.0 + again
        else:
            backward[operator.block] += seconds
            launches[operator.block] += 1.0
        if operator.name.startswith("attention.core"):
            core += seconds
    return BlockTimes(forward=forward, backward=backward, attention_core=core, launches=launches)


def estimate_step(
    job: TrainingJob,
    cluster: Cluster,
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    *,
    kernel_time: KernelTime = roofline_s,
) -> StepEstimate:
    """Step time of every configuration and where it goes.

    Args:
        job: What is trained; its global batch is divisible by dp*mbs of every configuration.
        cluster: Where; every configuration occupies all of its devices.
        runtime: What overlaps with what, and the kernels' efficiency.
        grid: n configurations.
        kernel_time: t_hat of one operator; a surrogate's draw or a hidden world replaces the roofline.
    """
    shapes, shape_of = unique_shapes(grid)
    times = [block_times(job, device, runtime, shapes, kernel_time) for device in cluster.devices]
    slowest_core = np.max([t.attention_core for t in times], axis=0)[shape_of]
    groups = place(cluster, grid)
    exposed = block_communication(job, runtime, grid, groups, slowest_core)
    hop = _pipeline_hop_s(job, runtime, grid, groups)
    hop_latency = send_recv_s(0.0, groups.pp)
    num_micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    breakdown = {part: np.zeros(len(grid)) for part in BREAKDOWN}
    for pp, vpp, at in pipelines(grid):
        chosen = grid.take(at)
        stages = assign_layers(job.model, runtime, pp, vpp)
        kinds = stage_devices(cluster, pp)
        forward = _stage_compute([t.forward for t in times], shape_of[at], stages, kinds)
        backward = _stage_compute([t.backward for t in times], shape_of[at], stages, kinds)
        parts = {"compute": forward + backward} | _stage_communication(exposed, at, stages)
        local = local_parameters(job, chosen, stages)
        device_s = np.sum(list(parts.values()), axis=0)
        parts["host"] = np.maximum(_stage_host_s(runtime, times[0], exposed, shape_of[at], at, stages) - device_s, 0.0)
        reduction = _Reduction(job, runtime, chosen, groups, at, local)
        # what a pass really takes, waits included, is the time beside which data parallel traffic can run
        both = forward + backward
        backward_share = np.divide(backward, both, out=np.zeros_like(both), where=both > 0)
        pass_s = np.sum(list(parts.values()), axis=0)
        forward_s, backward_s = pass_s * (1 - backward_share), pass_s * backward_share
        parts["dp"] = reduction.per_micro_batch_s(forward_s, backward_s)
        stage_s = np.sum(list(parts.values()), axis=0)
        slowest = np.argmax(stage_s, axis=1)
        rows = np.arange(len(at))
        m = num_micro_batches[at]
        for part, seconds in parts.items():
            breakdown[part][at] = m * seconds[rows, slowest]
        breakdown["bubble"][at] = bubble_s(stage_s, vpp)
        if pp > 1:
            breakdown["pp"][at] = 2 * hop[at] * (m + pp - 1) * vpp
            if vpp > 1 and runtime.overlaps_p2p:
                # beside compute in the steady state, where each chunk still waits for its message to begin
                breakdown["pp"][at] = 2 * (hop[at] * (pp - 1) + hop_latency[at] * m * vpp)
        breakdown["dp"][at] += reduction.per_step_s(forward_s, backward_s, vpp)
        bandwidth = np.array(
            [min(cluster.devices[kind].memory_bandwidth_bytes_per_s for kind in stage) for stage in kinds]
        )
        passes_s = OPTIMIZER_PASS_BYTES * reduction.owned_parameters() / (bandwidth * runtime.memory_efficiency)
        breakdown["optimizer"][at] = passes_s.max(axis=1)
    return StepEstimate(step_time_s=np.sum(list(breakdown.values()), axis=0), breakdown_s=breakdown)


def model_flops_utilisation(job: TrainingJob, cluster: Cluster, step_time_s: FloatArray) -> FloatArray:
    """MFU [n]: model FLOPs of a step over what all devices could do in its time; recomputed work does not count."""
    flop = job.tokens_per_step * job.model.model_flops_per_token(job.sequence_length)
    peak = sum(
        group.hosts * group.devices_per_host * group.device.peak_flop_per_s(job.precision) for group in cluster.groups
    )
    return np.asarray(flop / (peak * step_time_s))


def _stage_compute(
    block_seconds: list[dict[Block, FloatArray]], row: IntArray, stages: StageLayers, kinds: list[list[int]]
) -> FloatArray:
    """Compute time of one micro-batch on every stage [k, pp]; the slowest kind of device of a stage decides."""
    per_kind = []
    for seconds in block_seconds:
        by_block = {block: values[row][:, None] for block, values in seconds.items()}
        stage_s = (
            (stages.dense + stages.moe) * by_block[Block.ATTENTION]
            + stages.dense * by_block[Block.DENSE_MLP]
            + stages.moe * by_block[Block.MOE_MLP]
        )
        stage_s[:, 0] += by_block[Block.EMBEDDING][:, 0]
        stage_s[:, -1] += by_block[Block.HEAD][:, 0]
        per_kind.append(stage_s)
    if len(per_kind) == 1:
        return per_kind[0]
    columns = [np.max([per_kind[kind][:, stage] for kind in present], axis=0) for stage, present in enumerate(kinds)]
    return np.stack(columns, axis=1)


def _stage_communication(exposed: BlockCommunication, at: IntArray, stages: StageLayers) -> dict[str, FloatArray]:
    """Exposed communication of one micro-batch on every stage, by dimension, each [k, pp]."""
    layers = stages.dense + stages.moe
    by_block = {block: seconds[at][:, None] for block, seconds in exposed.tp.items()}
    tp = (
        layers * by_block[Block.ATTENTION]
        + stages.dense * by_block[Block.DENSE_MLP]
        + stages.moe * by_block[Block.MOE_MLP]
    )
    tp[:, 0] += by_block[Block.EMBEDDING][:, 0]
    tp[:, -1] += by_block[Block.HEAD][:, 0]
    return {
        "tp": tp,
        "cp": layers * exposed.cp[at][:, None],
        "up": layers * exposed.up[at][:, None],
        "ep": stages.moe * exposed.ep[at][:, None],
    }


def _stage_host_s(
    runtime: RuntimeProfile,
    times: BlockTimes,
    exposed: BlockCommunication,
    row: IntArray,
    at: IntArray,
    stages: StageLayers,
) -> FloatArray:
    """Host time to launch one micro-batch's operators and collectives on every stage [k, pp].

    Launches run ahead of the device, so a stage takes the longer of host and device time (Megatron-Core's and
    PyTorch's guides call a step that the host sets the pace of launch-bound).
    """
    launches = {block: count[row][:, None] * runtime.launch_s for block, count in times.launches.items()}
    issued = {block: count[at][:, None] * runtime.collective_launch_s for block, count in exposed.collectives.items()}
    by_block = {block: launches[block] + issued[block] for block in Block}
    host = (
        (stages.dense + stages.moe) * by_block[Block.ATTENTION]
        + stages.dense * by_block[Block.DENSE_MLP]
        + stages.moe * by_block[Block.MOE_MLP]
    )
    host[:, 0] += by_block[Block.EMBEDDING][:, 0]
    host[:, -1] += by_block[Block.HEAD][:, 0]
    return np.asarray(host)


def _pipeline_hop_s(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid, groups: Groups) -> FloatArray:
    """Time to hand one micro-batch's activations to the next stage [n].

    With sequence parallelism each tp rank sends its own share (Narayanan et al. 2021, section 4.1, scatter/gather).
    """
    message = job.element_bytes * residual_tokens(job, grid) * job.model.hidden_size
    return send_recv_s(message / runtime.network_efficiency, groups.pp)


class _Reduction:
    """Data parallel traffic of configurations [k] that share one pipeline."""

    def __init__(
        self,
        job: TrainingJob,
        runtime: RuntimeProfile,
        grid: ConfigGrid,
        groups: Groups,
        at: IntArray,
        local: LocalParameters,
    ) -> None:
        self.job, self.runtime, self.grid, self.local = job, runtime, grid, local
        num_stages = local.dense.shape[1]
        repeated = np.repeat(at, num_stages)
        self.dense_links = groups.weights.take(repeated)
        self.expert_links = groups.expert_weights.take(repeated)
        self.shape = local.dense.shape

    def per_micro_batch_s(self, forward: FloatArray, backward: FloatArray) -> FloatArray:
        """ZeRO-3's gathers before both passes and its scatter after the second, where compute does not hide them."""
        zero3 = (self.grid.zero_stage == 3)[:, None]
        if not zero3.any():
            return np.zeros(self.shape)
        gather, scatter = self._gather_s(), self._time(reduce_scatter_s, self.runtime.gradient_message_bytes)
        if self.runtime.overlaps_weight_gather:
            exposed = np.maximum(gather - forward, 0) + np.maximum(gather + scatter - backward, 0)
        else:
            exposed = 2 * gather + scatter
        return np.asarray(np.where(zero3, exposed, 0.0))

    def per_step_s(self, forward: FloatArray, backward: FloatArray, vpp: int) -> FloatArray:
        """Exposed reduction of the gradients and gathering of the weights once per step [k].

        Gradients leave bucket by bucket beside the last micro-batch's backward pass, the last bucket after it (Li et
        al. 2020, PyTorch Distributed, section 3.2.3); a later stage ends its last backward pass earlier, by the
        backward time of the stages before it. ZeRO 1 and 2 scatter the gradients and gather the weights (ZeRO,
        section 7.2).
        """
        width = self.runtime.gradient_message_bytes
        whole = self._time(all_reduce_s, width)
        scattered = self._time(reduce_scatter_s, width)
        stage = self.grid.zero_stage[:, None]
        reduction = np.select([stage == 0, stage < 3], [whole, scattered], 0.0)
        gathered = self._gather_s()
        gather = np.where((stage == 1) | (stage == 2), gathered, 0.0)
        head_start = (np.cumsum(backward, axis=1) - backward) / vpp
        layers = max(self.job.model.num_layers // self.shape[1], 1)
        if self.runtime.overlaps_gradients:
            reduction = np.maximum(reduction - backward, reduction / layers)
        if self.runtime.overlaps_weight_gather:
            # ZeRO 3 pays per micro-batch; of a step's first gather and last scatter one layer's stays exposed
            first_layer = np.where(stage == 3, (gathered + scattered) / layers, 0.0)
            gather = np.maximum(gather - forward, first_layer)
        return np.asarray(np.maximum(reduction - head_start, 0.0).max(axis=1) + gather.max(axis=1))

    def owned_parameters(self) -> FloatArray:
        """Parameters that one rank of each stage updates [k, pp]."""
        replicas = (self.grid.dp * self.grid.cp * self.grid.up)[:, None]
        sharded = (self.grid.zero_stage >= 1)[:, None]
        expert_replicas = np.maximum(replicas / self.grid.ep[:, None], 1.0)
        owned = self.local.dense / replicas + self.local.expert / expert_replicas
        return np.asarray(np.where(sharded, owned, self.local.dense + self.local.expert))

    def _gather_s(self) -> FloatArray:
        return self._time(all_gather_s, self.job.element_bytes)

    def _time(self, collective: Callable[[FloatArray, GroupLinks], FloatArray], width: int) -> FloatArray:
        scale = width / self.runtime.network_efficiency
        seconds = collective(self.local.dense.ravel() * scale, self.dense_links)
        if self.job.model.is_moe:
            seconds = seconds + collective(self.local.expert.ravel() * scale, self.expert_links)
        return np.asarray(seconds.reshape(self.shape))
