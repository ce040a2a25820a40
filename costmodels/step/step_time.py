"""Time of one optimizer step: puts operator and collective times together (u in FlexParallel, equation 1).

Per micro-batch each stage computes its layers and pays the exposed communication of tp, cp, up and ep. If the host
needs longer to launch all that, the stage waits for the host. The slowest stage sets the pace of the pipeline and the
others make the bubble. Data parallel reduction and the optimizer close the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, KernelTime, collective_s, kernel_s
from costmodels.operators.layer_operators import BLOCKS, Block, unique_shapes
from costmodels.step.block_costs import BlockCosts, block_costs
from costmodels.step.breakdown import BREAKDOWN, EXPOSED_PARTS
from costmodels.step.launches import beyond_device_s, hops_launch_s, issue_s
from costmodels.step.layer_residuals import layer_residual
from costmodels.step.memory import MemoryEstimate
from costmodels.step.offload import HostRates, host_rates, optimizer_step_s
from costmodels.step.overheads import overhead_s
from costmodels.step.placement import Groups, Pipeline, local_parameters, pipelines, place, place_stages
from costmodels.step.replicas import ReplicaRows, even_rows, replica_rows
from costmodels.step.schedules import idle_time_s, of_round
from costmodels.step.transfers import Hops, hops_of
from costmodels.step.unlike_stages import UnlikePasses, timed_parts_s, unlike_passes
from costmodels.step.weight_passes import accumulation_s
from costmodels.step.weight_traffic import OuterPasses, weight_traffic
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster


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
    of_each = groups.take(layouts.weights_of)
    hops = hops_of(setting, grid, of_each, collective_time)
    num_micro_batches = rows.num_micro_batches
    breakdown = {part: np.zeros(len(grid)) for part in BREAKDOWN}
    unlike: list[UnlikePasses] = []
    # Stages of one layout are priced together. Rows that share shapes or weights are computed once and taken by index.
    for pipeline in layouts.each:
        at = pipeline.at
        pricing = StagePricing(setting, pipeline, groups.take(pipeline.weights_at), collective_time)
        own, vpp, own_hops = costs.take(shape_of[at]), grid.vpp[at], hops.take(at)
        passes = pricing.stage_parts_s(own, vpp)
        is_timed = pipeline.pp > 1 and (setting.cluster.has_unlike_links or not grid.is_even)
        parts = pricing.parts_s(passes, own, vpp, num_micro_batches[at], own_hops, is_timed=is_timed)
        for part, seconds in parts.items():
            breakdown[part][at] = seconds
        if is_timed:
            unlike += unlike_passes(
                setting, grid.take(at), pipeline.stages, own, own_hops, num_micro_batches[at], passes.whole_s(), at
            )
    for part, seconds in timed_parts_s(setting.runtime, unlike, len(grid)).items():
        breakdown[part] += seconds
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagePasses:
    """Time of one micro-batch on every kind of stage.

    Attributes:
        parts_s: Parts of both passes by BREAKDOWN [s], each [c, k].
        forward_s: Time of the forward pass without traffic of weights [s], [c, k].
        backward_s: Time of the backward pass without traffic of weights [s], [c, k].
    """

    parts_s: dict[str, FloatArray]
    forward_s: FloatArray
    backward_s: FloatArray

    def whole_s(self) -> tuple[FloatArray, FloatArray]:
        """Return the forward and the backward pass, which share the traffic of weights by their lengths [s], [c, k]."""
        both = self.forward_s + self.backward_s
        longer = np.divide(_sum(self.parts_s.values()), both, out=np.ones_like(both), where=both > 0)
        return self.forward_s * longer, self.backward_s * longer


class StagePricing:
    """Pricing of configurations of one layout [k]; costs of weights are computed once per row of weights [w]."""

    def __init__(self, setting: Setting, pipeline: Pipeline, groups: Groups, collective_time: CollectiveTime) -> None:
        runtime = setting.runtime
        self.runtime, self.pp, self.stages, self.row = runtime, pipeline.pp, pipeline.stages, pipeline.weights_of
        weights = pipeline.weights
        local = local_parameters(setting.job, weights, self.stages.blocks)
        # Shares of a stage's weights that its embedding and each of its layers hold.
        weights_of = np.maximum(local.total, 1.0)
        is_embedding = np.arange(len(BLOCKS)) == BLOCKS.index(Block.EMBEDDING)
        is_layer = ~is_embedding & (np.arange(len(BLOCKS)) != BLOCKS.index(Block.HEAD))
        blocks = self.stages.blocks
        layers = np.maximum(self.stages.held(Block.ATTENTION), 1.0)
        self.embedding_share, self.layer_share = (
            local_parameters(setting.job, weights, blocks * chosen).total / weights_of / number
            for chosen, number in ((is_embedding, 1.0), (is_layer, layers))
        )
        bandwidth = self.stages.smallest([device.memory_bandwidth_bytes_per_s for device in setting.cluster.devices])
        self.accumulate_s = accumulation_s(runtime, weights, local, bandwidth)
        rates = zip(*(host_rates(setting.cluster, device) for device in setting.cluster.devices), strict=True)
        slowest = HostRates(*map(self.stages.smallest, rates))
        self.optimizer_s = optimizer_step_s(setting.job, runtime, weights, local, bandwidth, slowest).max(axis=0)
        of_stages = groups
        if setting.cluster.has_unlike_links:
            of_stages = place_stages(setting.cluster, weights, groups, self.stages.numbers)
        self.traffic = weight_traffic(setting.job, runtime, weights, of_stages, local, collective_time)
        self.issue_s = issue_s(runtime, weights, groups)

    def parts_s(
        self,
        passes: StagePasses,
        costs: BlockCosts,
        vpp: IntArray,
        num_micro_batches: IntArray,
        hops: Hops,
        *,
        is_timed: bool,
    ) -> dict[str, FloatArray]:
        """Compute the parts of the step that depend on its stages, each [k].

        Args:
            passes: Result of `stage_parts_s`.
            costs: Costs of blocks of each configuration.
            vpp: Chunks per stage [k].
            num_micro_batches: Number of micro-batches of each configuration [k].
            hops: Messages between the stages of each configuration.
            is_timed: Whether the pipeline is timed pass by pass, which gives its bubble and waits; the bubble is then
                the stage's work, as what is to be subtracted.
        """
        runtime, stages, row = self.runtime, self.stages, self.row
        forward_s, backward_s, stage_s = passes.forward_s, passes.backward_s, _sum(passes.parts_s.values())
        kind, micro_batches = stages.kind_of_stage, num_micro_batches
        # Every stage's own time from the begin of the step to its end; without chunks, the first of its waits for
        # messages is part of its idle time.
        passes_s = (forward_s[kind], backward_s[kind])
        idle_s = idle_time_s(*passes_s, hops.between_s(self.pp), micro_batches, vpp)
        wait_s = hops.wait_s(runtime, self.pp, vpp, *passes_s) * (micro_batches - (vpp == 1))
        total_s = micro_batches * stage_s[kind] + wait_s + idle_s
        # The last stage to end sets the length of the step: its parts, times the number of micro-batches, are the parts
        # of the step.
        slowest, everyone = total_s.argmax(axis=0), np.arange(len(row))
        stage = kind[slowest]
        parts = {part: micro_batches * seconds[stage, everyone] for part, seconds in passes.parts_s.items()}
        traffic = self.traffic.take(row).changed(stages.total(costs.once_s))
        outer = OuterPasses(
            forward_s=forward_s,
            backward_s=backward_s,
            vpp=vpp,
            of_round=of_round(micro_batches, self.pp),
            embedding=self.embedding_share.take(row, axis=1),
            layer=self.layer_share.take(row, axis=1),
        )
        reduced_s, tied_s = traffic.per_step_s(runtime, outer, stages.before)
        parts["dp"] = parts["dp"] + reduced_s
        parts["optimizer"] = self.optimizer_s[row]
        if is_timed:
            return parts | {"pp": tied_s, "bubble": -micro_batches * stage_s[stage, everyone]}
        silent = (np.zeros((self.pp - 1, len(row))),) * 2
        parts["bubble"] = idle_time_s(*passes_s, silent, micro_batches, vpp)[slowest, everyone]
        messages_s = (wait_s + idle_s)[slowest, everyone] - parts["bubble"]
        parts["pp"] = tied_s + messages_s + hops.rings_s(runtime, self.pp, vpp, micro_batches, *passes_s)
        return parts

    def stage_parts_s(self, costs: BlockCosts, vpp: IntArray) -> StagePasses:
        """Compute the time of one micro-batch on every kind of stage."""
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
        return StagePasses(parts_s=parts, forward_s=forward_s, backward_s=backward_s)

    def _host_s(self, costs: BlockCosts, vpp: IntArray) -> FloatArray:
        """Compute the host time to launch one micro-batch's operators and collectives on every kind of stage [c, k]."""
        launches, collectives = self.stages.total(costs.host)
        hops_s = hops_launch_s(self.runtime, self.pp, vpp)
        return np.asarray(launches + collectives * self.issue_s[self.row] + hops_s)


def _sum(terms: Iterable[FloatArray]) -> FloatArray:
    return reduce(np.add, terms)
