"""Time of one optimizer step: puts operator and collective times together (u in FlexParallel, equation 1).

Per micro-batch each stage computes its layers and pays the exposed communication of tp, cp, up and ep. If the host
needs longer to launch all that, the stage waits for the host. The slowest stage sets the pace of the pipeline and the
others make the bubble. Data parallel reduction and the optimizer close the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import CollectiveTime, KernelTime, collective_s, kernel_s
from costmodels.operators.layer_operators import unique_shapes
from costmodels.step.block_costs import shape_costs
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.layer_residuals import layer_residual
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.overheads import overhead_s
from costmodels.step.pipeline.stage_pricing import StagePricing, step_parts_s, sum_of
from costmodels.step.pipeline.transfers import hops_of
from costmodels.step.pipeline.unequal_micro_batches import excess_of
from costmodels.step.pipeline.unlike_stages import UnlikePasses, timed_parts_s, unlike_passes
from costmodels.step.placement import pipelines, place
from costmodels.step.replicas import ReplicaRows, even_rows, replica_rows
from hardware.arrays import FloatArray
from hardware.cluster import Cluster

NEARLY_EQUAL = 1.1
"""Layers of the longest stage over those of the mean one, up to which stages with several chunks count as equal."""


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
        return StepEstimate(step_time_s=sum_of(breakdown.values()), breakdown_s=breakdown)
    step_time_s, breakdown = np.zeros(len(grid)), {part: np.zeros(len(grid)) for part in BREAKDOWN}
    # A step of unequal replicas takes as long as its slowest kind of replicas: each kind is estimated, and the longest
    # estimate stays.
    for hosts, at in grid.by_host_order():
        ordered = setting.cluster.reordered(hosts)
        for rows in replica_rows(setting.job, ordered, grid.take(at)):
            chosen = at[rows.at]
            of_chosen = None if memory is None else memory.take(chosen)
            parts = _parts_s(replace(setting, cluster=ordered), grid.take(chosen), rows, prices, of_chosen)
            seconds = sum_of(parts.values())
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
    collective_time = prices[1]
    shapes, shape_of = unique_shapes(grid)
    costs = shape_costs(setting, shapes, prices, has_recomputed=grid.has_recomputed)
    layouts = pipelines(setting, grid, rows.has_device)
    groups = place(setting.cluster, layouts.weights)
    of_each = groups.take(layouts.weights_of)
    hops = hops_of(setting, grid, of_each, collective_time)
    num_micro_batches = rows.num_micro_batches
    excess = excess_of(setting.job, setting.runtime, grid)
    breakdown = {part: np.zeros(len(grid)) for part in BREAKDOWN}
    unlike: list[UnlikePasses] = []
    # Pipelines with unlike stages or links are timed pass by pass.
    is_unlike = _have_unlike_stages(grid) | setting.cluster.has_unlike_links
    # Stages of one layout are priced together. Rows that share shapes or weights are computed once and taken by index.
    for pipeline in layouts.each:
        at = pipeline.at
        pricing = StagePricing(setting, pipeline, groups.take(pipeline.weights_at), collective_time)
        own, vpp, own_hops = costs.take(shape_of[at]), grid.vpp[at], hops.take(at)
        times = pricing.times(own, vpp)
        is_timed = np.broadcast_to(pipeline.pp > 1, len(at)) & is_unlike[at]
        own_excess = None if excess is None else excess.take(at)
        parts = step_parts_s(
            setting.runtime, times, vpp, num_micro_batches[at], own_hops, own_excess, is_timed=is_timed
        )
        for part, seconds in parts.items():
            breakdown[part][at] = seconds
        if is_timed.any():
            timed = np.flatnonzero(is_timed)
            unlike += unlike_passes(
                setting,
                grid.take(at[timed]),
                pipeline.stages,
                own.take(timed),
                own_hops.take(timed),
                num_micro_batches[at[timed]],
                times.take(timed),
                at[timed],
            )
    for part, seconds in timed_parts_s(setting.runtime, unlike, len(grid)).items():
        breakdown[part] += seconds
    # A slow first stage can work throughout: what rounding leaves of its bubble is none.
    breakdown["bubble"] = np.maximum(breakdown["bubble"], 0.0)
    # Stragglers delay everything that the step does, so overheads are computed last.
    passes_s = sum_of(seconds for part, seconds in breakdown.items() if part != "overhead")
    breakdown["overhead"] = overhead_s(setting, grid, of_each.pp.domains, memory, passes_s)
    if setting.runtime.residuals:
        # The residual of a layer's shape scales all parts alike, so that they still add up to the step.
        unexplained = np.exp(
            layer_residual(setting.runtime.residuals, setting.cluster.device_names, setting.job, shapes)
        )[shape_of]
        breakdown = {part: seconds * unexplained for part, seconds in breakdown.items()}
    return breakdown


def _have_unlike_stages(grid: ConfigGrid) -> NDArray[np.bool_]:
    """Return whether stages have unequal layers that the closed form does not cover [n].

    With several chunks it is as near to the time pass by pass where stages are nearly equal as where they are equal,
    0.1 to 1.2% below it, and far quicker.
    """
    found = np.zeros(len(grid), dtype=np.bool_)
    for code, one in enumerate(grid.assignments):
        if len(set(one.layers)) > 1:
            for at in np.flatnonzero(grid.assignment == code).tolist():
                of_stage = np.reshape(one.layers, (-1, int(grid.pp[at]))).sum(axis=0)
                found[at] = grid.vpp[at] == 1 or of_stage.max() > NEARLY_EQUAL * of_stage.mean()
    return found


def model_flops_utilisation(job: TrainingJob, cluster: Cluster, step_time_s: FloatArray) -> FloatArray:
    """Compute MFU [n]: model FLOPs of a step over the FLOPs that all devices could do in its time.

    Recomputed work and padding do not count.
    """
    flop = job.model_flops_per_step
    peak = sum(
        group.hosts * group.devices_per_host * group.device.peak_flop_per_s(job.precision) for group in cluster.groups
    )
    return np.asarray(flop / (peak * step_time_s))
