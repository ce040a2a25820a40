"""Time of one optimizer step: puts operator and collective times together (u in FlexParallel, equation 1).

Per micro-batch each stage computes its layers and pays the exposed communication of tp, cp, up and ep. If the host
needs longer to launch all that, the stage waits for the host. The slowest stage sets the pace of the pipeline and the
others make the bubble. Data parallel reduction and the optimizer close the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, KernelTime, collective_s, kernel_s
from costmodels.operators.layer_operators import unique_shapes
from costmodels.step.block_costs import BlockCosts, block_costs
from costmodels.step.breakdown import BREAKDOWN, EXPOSED_PARTS
from costmodels.step.launches import beyond_device_s, hops_launch_s, issue_s
from costmodels.step.layer_residuals import layer_residual
from costmodels.step.memory import MemoryEstimate
from costmodels.step.offload import HostRates, host_rates, optimizer_step_s
from costmodels.step.overheads import overhead_s
from costmodels.step.placement import Groups, Pipeline, local_parameters, pipelines, place
from costmodels.step.replicas import ReplicaRows, even_rows, replica_rows
from costmodels.step.schedules import bubble_s
from costmodels.step.transfers import exposed_transfers_s
from costmodels.step.weight_passes import accumulation_s
from costmodels.step.weight_traffic import weight_traffic
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster

CHUNK_LAG = 0.6
"""Share of the longest possible wait for unlike chunks that the interleaved schedule pays. Stages of equal work still
wait for each other if their chunks are unlike, between not at all and for the longest chunk of every round. The event
simulator shows shares of 0.4 to 0.8 (42 uneven configurations of H100 beside A100)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepEstimate:
    """Step time of n configurations.

    Attributes:
        step_time_s: Wall clock of one optimizer step [s], [n].
        breakdown_s: Exposed parts of the step by BREAKDOWN [s], each [n]; they sum to `step_time_s`.
    """

    step_time_s: FloatArray
    breakdown_s: dict[str, FloatArray]


def estimate_step(
    setting: Setting,
    grid: ConfigGrid,
    *,
    kernel_time: KernelTime = kernel_s,
    collective_time: CollectiveTime = collective_s,
    memory: MemoryEstimate | None = None,
) -> StepEstimate:
    """Estimate the step time of every configuration and its parts.

    Args:
        setting: Job, cluster and runtime. Every configuration's dp*mbs divides the job's global batch.
        grid: Configurations [n]; each occupies all devices of the cluster.
        kernel_time: Model of an operator's time, t_hat. A surrogate's draw or a hidden world replaces `kernel_s`.
        collective_time: Model of a collective's time.
        memory: Memory of the same configurations, if it is known: a configuration that does not quite fit runs slowly.
    """
    prices = (kernel_time, collective_time)
    if grid.is_even:
        breakdown = _parts_s(setting, grid, even_rows(setting.job, grid), prices, memory)
        return StepEstimate(step_time_s=_sum(breakdown.values()), breakdown_s=breakdown)
    step_time_s, breakdown = np.zeros(len(grid)), {part: np.zeros(len(grid)) for part in BREAKDOWN}
    # A step of unequal replicas takes as long as its slowest kind of replicas: each kind is estimated, and the longest
    # estimate stays.
    for hosts, at in grid.by_host_order():
        ordered = setting.cluster.reordered(hosts)
        for rows in replica_rows(setting.job, ordered, grid.take(at)):
            chosen = at[rows.at]
            of_chosen = None if memory is None else memory.take(chosen)
            parts = _parts_s(replace(setting, cluster=ordered), grid.take(chosen), rows, prices, of_chosen)
            seconds = _sum(parts.values())
            longer = seconds > step_time_s[chosen]
            step_time_s[chosen[longer]] = seconds[longer]
            for part, own in parts.items():
                breakdown[part][chosen[longer]] = own[longer]
    return StepEstimate(step_time_s=step_time_s, breakdown_s=breakdown)


def _parts_s(
    setting: Setting,
    grid: ConfigGrid,
    rows: ReplicaRows,
    prices: tuple[KernelTime, CollectiveTime],
    memory: MemoryEstimate | None,
) -> dict[str, FloatArray]:
    """Compute the breakdown of configurations as their replicas see them, each [n].

    The cluster's hosts must stand in the order of the ranks.
    """
    kernel_time, collective_time = prices
    shapes, shape_of = unique_shapes(grid)
    costs = block_costs(setting, shapes, kernel_time, collective_time)
    if grid.has_recomputed:
        # Uneven work may recompute single layers in full, whatever the configuration says: these get costs of their
        # own.
        full = np.full(len(shapes), RECOMPUTE_MODES.index("full"))
        again = block_costs(setting, replace(shapes, recompute=full), kernel_time, collective_time)
        costs = costs.beside(again)
    layouts = pipelines(setting, grid, rows.has_device)
    groups = place(setting.cluster, layouts.weights)
    num_micro_batches = rows.num_micro_batches
    breakdown = {part: np.zeros(len(grid)) for part in BREAKDOWN}
    # Stages of one layout are priced together. Rows that share shapes or weights are computed once and taken by index.
    for pipeline in layouts.each:
        at = pipeline.at
        pricing = StagePricing(setting, pipeline, groups.take(pipeline.weights_at), collective_time)
        chunks = [grid.assignments[code].layers for code in grid.assignment[at].tolist()] if not grid.is_even else ()
        parts = pricing.parts_s(costs.take(shape_of[at]), grid.vpp[at], num_micro_batches[at], chunks)
        for part, seconds in parts.items():
            breakdown[part][at] = seconds
    of_each = groups.take(layouts.weights_of)
    breakdown["pp"] += exposed_transfers_s(
        setting.job, setting.runtime, grid, of_each, num_micro_batches, collective_time
    )
    # Stragglers delay everything that the step does, so overheads are computed last.
    passes_s = _sum(seconds for part, seconds in breakdown.items() if part != "overhead")
    breakdown["overhead"] = overhead_s(setting, grid, of_each.pp.hosts, memory, passes_s)
    if setting.runtime.residuals:
        # The residual of a layer's shape scales all parts alike, so that they still add up to the step.
        unexplained = np.exp(
            layer_residual(setting.runtime.residuals, setting.cluster.device_names, setting.job, shapes)
        )[shape_of]
        breakdown = {part: seconds * unexplained for part, seconds in breakdown.items()}
    return breakdown


def model_flops_utilisation(job: TrainingJob, cluster: Cluster, step_time_s: FloatArray) -> FloatArray:
    """Compute MFU [n]: model FLOPs of a step over the FLOPs that all devices could do in its time.

    Recomputed work does not count.
    """
    flop = job.tokens_per_step * job.model.model_flops_per_token(job.sequence_length)
    peak = sum(
        group.hosts * group.devices_per_host * group.device.peak_flop_per_s(job.precision) for group in cluster.groups
    )
    return np.asarray(flop / (peak * step_time_s))


class StagePricing:
    """Pricing of configurations of one layout [k]; costs of weights are computed once per row of weights [w]."""

    def __init__(self, setting: Setting, pipeline: Pipeline, groups: Groups, collective_time: CollectiveTime) -> None:
        runtime = setting.runtime
        self.runtime, self.pp, self.stages, self.row = runtime, pipeline.pp, pipeline.stages, pipeline.weights_of
        self.layers = max(setting.job.model.num_layers // self.pp, 1)
        weights = pipeline.weights
        local = local_parameters(setting.job, weights, self.stages.blocks)
        bandwidth = self.stages.smallest([device.memory_bandwidth_bytes_per_s for device in setting.cluster.devices])
        self.accumulate_s = accumulation_s(runtime, weights, local, bandwidth)
        rates = zip(*(host_rates(setting.cluster, device) for device in setting.cluster.devices), strict=True)
        slowest = HostRates(*map(self.stages.smallest, rates))
        self.optimizer_s = optimizer_step_s(setting.job, runtime, weights, local, bandwidth, slowest).max(axis=0)
        self.traffic = weight_traffic(setting.job, runtime, weights, groups, local, collective_time)
        self.issue_s = issue_s(runtime, weights, groups)

    def parts_s(
        self, costs: BlockCosts, vpp: IntArray, num_micro_batches: IntArray, chunks: Sequence[tuple[int, ...]] = ()
    ) -> dict[str, FloatArray]:
        """Compute the parts of the step that depend on its stages, each [k].

        Args:
            costs: Costs of blocks of each configuration.
            vpp: Chunks per stage [k].
            num_micro_batches: Number of micro-batches of each configuration [k].
            chunks: Layers of all chunks of each configuration, if given.
        """
        runtime, stages, row = self.runtime, self.stages, self.row
        parts, forward_s, backward_s = self.stage_parts_s(costs, vpp)
        stage_s = _sum(parts.values())
        # The slowest stage sets the pace: its parts, times the number of micro-batches, are the parts of the step.
        slowest = np.ravel_multi_index((stage_s.argmax(axis=0), np.arange(len(row))), stage_s.shape)
        parts = {part: num_micro_batches * seconds.take(slowest) for part, seconds in parts.items()}
        # Later stages end their last backward pass earlier, by the backward passes of all stages before them.
        head_start = stages.before @ backward_s / vpp
        traffic = self.traffic.take(row).changed(stages.total(costs.once_s))
        reduced_s, parts["pp"] = traffic.per_step_s(runtime, forward_s, backward_s, head_start, self.layers)
        parts["dp"] = parts["dp"] + reduced_s
        parts["bubble"] = bubble_s(stage_s, stages.count, vpp)
        if any(chunks):
            parts["bubble"] += num_micro_batches * self._lag_s(stage_s, vpp, chunks)
        parts["optimizer"] = self.optimizer_s[row]
        return parts

    def _lag_s(self, stage_s: FloatArray, vpp: IntArray, chunks: Sequence[tuple[int, ...]]) -> FloatArray:
        """Compute each micro-batch's wait for chunks that take longer than those of other stages beside them [k]."""
        lag_s = np.zeros(len(chunks))
        kind_of_stage = self.stages.kind_of_stage
        for at, layers in enumerate(chunks):
            if layers and vpp[at] > 1:
                # Longest wait: every round lasts as long as its longest chunk, instead of the pace of the busiest
                # stage.
                held = np.array(layers, dtype=np.float64).reshape(-1, self.pp)
                each_s = stage_s[kind_of_stage, at] * held / np.maximum(held.sum(axis=0), 1.0)
                lag_s[at] = CHUNK_LAG * (each_s.max(axis=1).sum() - each_s.sum(axis=0).max())
        return lag_s

    def stage_parts_s(self, costs: BlockCosts, vpp: IntArray) -> tuple[dict[str, FloatArray], FloatArray, FloatArray]:
        """Compute one micro-batch's time on every kind of stage by part, and its two passes, each [c, k].

        The passes are those without traffic of weights.
        """
        runtime, stages, row = self.runtime, self.stages, self.row
        of_devices = np.concatenate([stages.total(costs.compute), stages.total(costs.exposed)], axis=1)
        forward, backward, *exposed = stages.slowest(of_devices)
        backward = backward + self.accumulate_s.take(row, axis=1)
        parts = {"compute": forward + backward}
        parts |= dict(zip(EXPOSED_PARTS, exposed, strict=True))
        # The host's launches are compared with the device's whole time, exposed collectives included.
        device_s = _sum(parts.values())
        if not runtime.captured_graph:
            parts["host"] = beyond_device_s(device_s, self._host_s(costs, vpp))
        # Data parallel traffic can run beside a whole pass, including its waits. The passes share the waits in
        # proportion to their compute.
        pass_s = _sum(parts.values())
        both = parts["compute"]
        backward_s = pass_s * np.divide(backward, both, out=np.zeros_like(both), where=both > 0)
        forward_s = pass_s - backward_s
        parts["dp"] = self.traffic.take(row).per_micro_batch_s(runtime, forward_s, backward_s)
        return parts, forward_s, backward_s

    def _host_s(self, costs: BlockCosts, vpp: IntArray) -> FloatArray:
        """Compute the host time to launch one micro-batch's operators and collectives on every kind of stage [c, k]."""
        launches, collectives = self.stages.total(costs.host)
        hops_s = hops_launch_s(self.runtime, self.pp, vpp)
        return np.asarray(launches + collectives * self.issue_s[self.row] + hops_s)


def _sum(terms: Iterable[FloatArray]) -> FloatArray:
    return reduce(np.add, terms)
