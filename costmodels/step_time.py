"""u: puts operator and collective times together to the time of one optimizer step (FlexParallel equation 1).

Per micro-batch each stage computes its layers and pays the exposed communication of tp, cp, up and ep; where the host
needs longer to launch all that, it waits for the host. The slowest stage sets the pace of the pipeline, the others make
the bubble; data parallel reduction and the optimizer close the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import reduce

import numpy as np

from costmodels.breakdown import BREAKDOWN, EXPOSED_PARTS
from costmodels.communication import Beside, BlockCommunication, block_communication
from costmodels.job import TrainingJob
from costmodels.kernels import CollectiveTime, KernelTime, collective_s, execution_s, kernel_s
from costmodels.launches import beyond_device_s, hops_launch_s, issue_s
from costmodels.memory import MemoryEstimate
from costmodels.operators import (
    BLOCKS,
    Block,
    FloatArray,
    Operator,
    OpKind,
    Phase,
    attention_core,
    is_core,
    is_recomputed,
    step_operators,
    unique_shapes,
    unique_tokens,
)
from costmodels.overheads import overhead_s
from costmodels.parallel import RECOMPUTE_MODES, ConfigGrid, IntArray
from costmodels.placement import (
    Groups,
    Pipeline,
    local_parameters,
    pipelines,
    place,
    place_on,
)
from costmodels.replicas import ReplicaRows, even_rows, replica_rows
from costmodels.residuals import layer_residual
from costmodels.runtime import RuntimeProfile
from costmodels.schedules import bubble_s
from costmodels.transfers import exposed_transfers_s
from costmodels.weight_passes import accumulation_s, optimizer_pass_s
from costmodels.weight_traffic import weight_traffic
from hardware.cluster import Cluster
from hardware.device import Device


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
    """Compute time of one block and micro-batch on one kind of device, each [len(BLOCKS), u].

    `backward` includes what recomputation runs again; `launches` counts operators of both passes. `products` are the
    matrix products of both passes, `weight_gradients` those that give the weights' gradients, `attention_core` the
    attention of both passes.
    """

    forward: FloatArray
    backward: FloatArray
    products: FloatArray
    weight_gradients: FloatArray
    attention_core: FloatArray
    launches: FloatArray


def block_times(
    job: TrainingJob, device: Device, runtime: RuntimeProfile, shapes: ConfigGrid, kernel_time: KernelTime
) -> BlockTimes:
    """Sums the operators of each block, for every shape row [u]."""
    tokens, token_of = unique_tokens(job, shapes)
    outside = [operator for operator in step_operators(job, runtime, tokens) if not is_core(operator)]
    both = (
        _summed(outside, job, device, runtime, tokens, kernel_time),
        _summed(attention_core(job, runtime, shapes), job, device, runtime, shapes, kernel_time),
    )
    sums = {f.name: [getattr(times, f.name) for times in both] for f in fields(BlockTimes)}
    return BlockTimes(**{name: rest[:, token_of] + core for name, (rest, core) in sums.items()})


def _summed(
    operators: Iterable[Operator],
    job: TrainingJob,
    device: Device,
    runtime: RuntimeProfile,
    shapes: ConfigGrid,
    kernel_time: KernelTime,
) -> BlockTimes:
    sums = BlockTimes(**{f.name: np.zeros((len(BLOCKS), len(shapes))) for f in fields(BlockTimes)})
    for operator in operators:
        block = BLOCKS.index(operator.block)
        seconds = execution_s(operator, device, job, runtime, shapes, kernel_time)
        if operator.phase == Phase.FORWARD:
            again = is_recomputed(job, operator, shapes)
            sums.forward[block] += seconds
            sums.backward[block] += np.where(again, seconds, 0.0)
            sums.launches[block] += 1.0 + again
        else:
            sums.backward[block] += seconds
            sums.launches[block] += 1.0
        if is_core(operator):
            sums.attention_core[block] += seconds
        elif operator.kind in (OpKind.MATMUL, OpKind.GROUPED_MATMUL):
            sums.products[block] += seconds
        if operator.name.endswith("weight_gradient"):
            sums.weight_gradients[block] += seconds
    return sums


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _BlockCosts:
    """What one block and micro-batch cost, for every shape row [u].

    Attributes:
        compute: Seconds of the forward and the backward pass on each kind of device [d, 2, len(BLOCKS), u].
        exposed: Exposed seconds of EXPOSED_PARTS beside the compute of each kind of device [d, 4, len(BLOCKS), u].
        host: Seconds to launch the operators, and the number of collectives [2, len(BLOCKS), u].
    """

    compute: FloatArray
    exposed: FloatArray
    host: FloatArray

    def beside(self, again: _BlockCosts) -> _BlockCosts:
        """These, and then those of blocks that run again in full."""
        pairs = {f.name: (getattr(self, f.name), getattr(again, f.name)) for f in fields(self)}
        return _BlockCosts(**{name: np.concatenate(pair, axis=-2) for name, pair in pairs.items()})

    def take(self, row: IntArray) -> _BlockCosts:
        """The costs of configurations whose shapes are those rows."""
        return _BlockCosts(**{f.name: getattr(self, f.name).take(row, axis=-1) for f in fields(self)})


def _block_costs(
    job: TrainingJob,
    cluster: Cluster,
    runtime: RuntimeProfile,
    shapes: ConfigGrid,
    kernel_time: KernelTime,
    collective_time: CollectiveTime,
) -> _BlockCosts:
    times = [block_times(job, device, runtime, shapes, kernel_time) for device in cluster.devices]
    groups = [place(cluster, shapes)]
    if len(cluster.devices) > 1:
        groups = [place_on(cluster, device, shapes) for device in cluster.devices]
    found = [
        block_communication(job, runtime, shapes, own, _beside(of_device), collective_time)
        for of_device, own in zip(times, groups, strict=True)
    ]
    issued = [found[0].collectives[block] for block in BLOCKS]
    return _BlockCosts(
        compute=np.array([(t.forward, t.backward) for t in times]),
        exposed=np.array([_exposed_parts(communication) for communication in found]),
        host=np.array([times[0].launches * runtime.launch_s, issued]),
    )


def _beside(times: BlockTimes) -> Beside:
    """The compute of one kind of device beside which communication may run."""
    return Beside(
        products=dict(zip(BLOCKS, times.products, strict=True)),
        weight_gradients=dict(zip(BLOCKS, times.weight_gradients, strict=True)),
        attention_core=times.attention_core.sum(axis=0),
    )


def _exposed_parts(found: BlockCommunication) -> list[list[FloatArray]]:
    """What blocks expose of EXPOSED_PARTS [4, len(BLOCKS), u]."""
    by_block: dict[str, dict[Block, FloatArray]] = {
        "tp": found.tp,
        "cp": {Block.ATTENTION: found.cp},
        "up": {Block.ATTENTION: found.up},
        "ep": {Block.MOE_MLP: found.ep},
    }
    none = np.zeros_like(found.cp)
    return [[by_block[part].get(block, none) for block in BLOCKS] for part in EXPOSED_PARTS]


def estimate_step(
    job: TrainingJob,
    cluster: Cluster,
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    *,
    kernel_time: KernelTime = kernel_s,
    collective_time: CollectiveTime = collective_s,
    memory: MemoryEstimate | None = None,
) -> StepEstimate:
    """Step time of every configuration and where it goes.

    Args:
        job: What is trained; its global batch is divisible by dp*mbs of every configuration.
        cluster: Where; every configuration occupies all of its devices.
        runtime: What overlaps with what, and the kernels' efficiency.
        grid: n configurations.
        memory: Memory of the same configurations, where it is known: what does not quite fit runs, but slowly.
        kernel_time: t_hat of one operator; a surrogate's draw or a hidden world replaces `kernel_s`.
        collective_time: The same of one collective.
    """
    prices = (kernel_time, collective_time)
    if grid.is_even:
        breakdown = _parts_s(job, cluster, runtime, grid, even_rows(job, grid), prices, memory)
        return StepEstimate(step_time_s=_sum(breakdown.values()), breakdown_s=breakdown)
    step_time_s, breakdown = np.zeros(len(grid)), {part: np.zeros(len(grid)) for part in BREAKDOWN}
    for hosts, at in grid.by_host_order():
        ordered = cluster.reordered(hosts)
        for rows in replica_rows(job, ordered, grid.take(at)):
            chosen = at[rows.at]
            of_chosen = None if memory is None else memory.take(chosen)
            parts = _parts_s(job, ordered, runtime, grid.take(chosen), rows, prices, of_chosen)
            seconds = _sum(parts.values())
            longer = seconds > step_time_s[chosen]
            step_time_s[chosen[longer]] = seconds[longer]
            for part, own in parts.items():
                breakdown[part][chosen[longer]] = own[longer]
    return StepEstimate(step_time_s=step_time_s, breakdown_s=breakdown)


def _parts_s(
    job: TrainingJob,
    cluster: Cluster,
    runtime: RuntimeProfile,
    grid: ConfigGrid,
    rows: ReplicaRows,
    prices: tuple[KernelTime, CollectiveTime],
    memory: MemoryEstimate | None,
) -> dict[str, FloatArray]:
    """The breakdown of configurations whose hosts stand in the order of the ranks, each as its replicas see it [n]."""
    kernel_time, collective_time = prices
    shapes, shape_of = unique_shapes(grid)
    costs = _block_costs(job, cluster, runtime, shapes, kernel_time, collective_time)
    if grid.has_recomputed:
        full = np.full(len(shapes), RECOMPUTE_MODES.index("full"))
        again = _block_costs(job, cluster, runtime, replace(shapes, recompute=full), kernel_time, collective_time)
        costs = costs.beside(again)
    layouts = pipelines(job, cluster, runtime, grid, rows.has_device)
    groups = place(cluster, layouts.weights)
    num_micro_batches = rows.num_micro_batches
    breakdown = {part: np.zeros(len(grid)) for part in BREAKDOWN}
    for pipeline in layouts.each:
        at = pipeline.at
        pricing = _Pricing(job, cluster, runtime, pipeline, groups.take(pipeline.weights_at), collective_time)
        parts = pricing.parts_s(costs.take(shape_of[at]), grid.vpp[at], num_micro_batches[at])
        for part, seconds in parts.items():
            breakdown[part][at] = seconds
    of_each = groups.take(layouts.weights_of)
    breakdown["pp"] += exposed_transfers_s(job, runtime, grid, of_each, num_micro_batches, collective_time)
    passes_s = _sum(seconds for part, seconds in breakdown.items() if part != "overhead")
    breakdown["overhead"] = overhead_s(job, cluster, runtime, grid, of_each.pp.hosts, memory, passes_s)
    if runtime.residuals:
        unexplained = np.exp(layer_residual(runtime.residuals, cluster.device_names, job, shapes))[shape_of]
        breakdown = {part: seconds * unexplained for part, seconds in breakdown.items()}
    return breakdown


def model_flops_utilisation(job: TrainingJob, cluster: Cluster, step_time_s: FloatArray) -> FloatArray:
    """MFU [n]: model FLOPs of a step over what all devices could do in its time; recomputed work does not count."""
    flop = job.tokens_per_step * job.model.model_flops_per_token(job.sequence_length)
    peak = sum(
        group.hosts * group.devices_per_host * group.device.peak_flop_per_s(job.precision) for group in cluster.groups
    )
    return np.asarray(flop / (peak * step_time_s))


class _Pricing:
    """The parts of configurations of one layout [k]; what their weights cost is computed once per row of them [w]."""

    def __init__(
        self,
        job: TrainingJob,
        cluster: Cluster,
        runtime: RuntimeProfile,
        pipeline: Pipeline,
        groups: Groups,
        collective_time: CollectiveTime,
    ) -> None:
        self.runtime, self.pp, self.stages, self.row = runtime, pipeline.pp, pipeline.stages, pipeline.weights_of
        self.layers = max(job.model.num_layers // self.pp, 1)
        weights = pipeline.weights
        local = local_parameters(job, weights, self.stages.blocks)
        bandwidth = self.stages.smallest([device.memory_bandwidth_bytes_per_s for device in cluster.devices])
        self.accumulate_s = accumulation_s(runtime, weights, local, bandwidth)
        self.optimizer_s = optimizer_pass_s(runtime, weights, local, bandwidth).max(axis=0)
        self.traffic = weight_traffic(job, runtime, weights, groups, local, collective_time)
        self.issue_s = issue_s(runtime, weights, groups)

    def parts_s(self, costs: _BlockCosts, vpp: IntArray, num_micro_batches: IntArray) -> dict[str, FloatArray]:
        """Parts of the step that depend on its stages, each [k]."""
        runtime, stages, row = self.runtime, self.stages, self.row
        of_devices = np.concatenate([stages.total(costs.compute), stages.total(costs.exposed)], axis=1)
        forward, backward, *exposed = stages.slowest(of_devices)
        backward = backward + self.accumulate_s.take(row, axis=1)
        parts = {"compute": forward + backward}
        parts |= dict(zip(EXPOSED_PARTS, exposed, strict=True))
        device_s = _sum(parts.values())
        if not runtime.captured_graph:
            parts["host"] = beyond_device_s(device_s, self._host_s(costs, vpp))
        # what a pass really takes, waits included, is the time beside which data parallel traffic can run
        pass_s = _sum(parts.values())
        both = parts["compute"]
        backward_s = pass_s * np.divide(backward, both, out=np.zeros_like(both), where=both > 0)
        forward_s = pass_s - backward_s
        traffic = self.traffic.take(row)
        parts["dp"] = traffic.per_micro_batch_s(runtime, forward_s, backward_s)
        stage_s = pass_s + parts["dp"]
        slowest = np.ravel_multi_index((stage_s.argmax(axis=0), np.arange(len(row))), stage_s.shape)
        parts = {part: num_micro_batches * seconds.take(slowest) for part, seconds in parts.items()}
        head_start = stages.before @ backward_s / vpp
        reduced_s, parts["pp"] = traffic.per_step_s(runtime, forward_s, backward_s, head_start, self.layers)
        parts["dp"] += reduced_s
        parts["bubble"] = bubble_s(stage_s, stages.count, vpp)
        parts["optimizer"] = self.optimizer_s[row]
        return parts

    def _host_s(self, costs: _BlockCosts, vpp: IntArray) -> FloatArray:
        """Host time to launch one micro-batch's operators and collectives on every kind of stage [c, k]."""
        launches, collectives = self.stages.total(costs.host)
        hops_s = hops_launch_s(self.runtime, self.pp, vpp)
        return np.asarray(launches + collectives * self.issue_s[self.row] + hops_s)


def _sum(terms: Iterable[FloatArray]) -> FloatArray:
    """The sum of arrays of one shape."""
    return reduce(np.add, terms)
