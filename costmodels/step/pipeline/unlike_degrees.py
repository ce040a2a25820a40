"""Step time of configurations whose stages have tensor degrees of their own (see stage_degrees.py).

Each stage has the times that it has in its variant, and the pipeline of these stages is timed pass by pass.

Letters: n configurations, p stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.operators.kernels import CollectiveTime, KernelTime
from costmodels.operators.layer_operators import Block, unique_shapes
from costmodels.step.block_costs import BlockCosts, shape_costs
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.layer_residuals import layer_residual
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.overheads import overhead_s
from costmodels.step.pipeline.stage_degrees import (
    by_stage,
    most_slices,
    stage_variants,
    traffic_by_stage,
    variants_of_stages,
)
from costmodels.step.pipeline.stage_pricing import StagePricing, StageTimes, step_parts_s, sum_of
from costmodels.step.pipeline.transfers import hops_of, transfer_collectives
from costmodels.step.pipeline.unequal_micro_batches import excess_of
from costmodels.step.pipeline.unlike_stages import UnlikePasses, beside_passes, passes_of, timed_parts_s
from costmodels.step.placement import pipelines, place
from hardware.arrays import FloatArray


def unlike_parts_s(
    setting: Setting, grid: ConfigGrid, prices: tuple[KernelTime, CollectiveTime], memory: MemoryEstimate | None
) -> dict[str, FloatArray]:
    """Compute the breakdown of configurations whose stages have tensor degrees of their own, each [n].

    The cluster's hosts must stand in the order of the ranks.
    """
    job, runtime = setting.job, setting.runtime
    configs = [grid.config(position) for position in range(len(grid))]
    variants = [list(stage_variants(config).values()) for config in configs]
    # The blocks of all variants are priced together.
    shapes, shape_of = unique_shapes(ConfigGrid.from_configs([one for own in variants for one in own]))
    costs = shape_costs(setting, shapes, prices, has_recomputed=grid.has_recomputed)
    log_residual = layer_residual(runtime.residuals, setting.cluster.device_names, job, shapes)
    num_micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    excess = excess_of(job, runtime, grid)
    groups = place(setting.cluster, grid)
    hops = hops_of(setting, grid, groups, prices[1])
    # Each slice beyond the first costs every message between unlike stages a latency.
    further = np.array([most_slices(config) - 1 for config in configs])
    slices_s = further * prices[1](transfer_collectives(job, runtime, grid, groups)["pp.start"])
    hops = replace(hops, forward_s=hops.forward_s + slices_s, backward_s=hops.backward_s + slices_s)
    breakdown = {part: np.zeros(len(grid)) for part in BREAKDOWN}
    unexplained, unlike = np.zeros(len(grid)), list[UnlikePasses]()
    row = 0
    for number, (config, own) in enumerate(zip(configs, variants, strict=True)):
        rows = [shape_of[[row + variant]] for variant in range(len(own))]
        row += len(own)
        of_stages = variants_of_stages(config)
        times = _times_by_stage(
            [_apart(setting, one, costs.take(shape), prices[1]) for one, shape in zip(own, rows, strict=True)],
            of_stages,
        )
        at = np.array([number])
        micro_batches, own_hops = num_micro_batches[at], hops.take(at)
        own_excess = None if excess is None else excess.take(at)
        is_timed = np.ones(1, dtype=np.bool_)
        parts = step_parts_s(runtime, times, grid.vpp[at], micro_batches, own_hops, own_excess, is_timed=is_timed)
        for part, seconds in parts.items():
            breakdown[part][number] = seconds[0]
        layers = pipelines(setting, ConfigGrid.from_configs([config])).each[0].stages.apart().held(Block.ATTENTION)
        beside = beside_passes(runtime, times, layers, 1)
        unlike.append(passes_of(config.pp, 1, int(micro_batches[0]), at, times.whole_s(), own_hops, beside))
        # The residual of a pipeline is the mean of its stages' (assumed).
        unexplained[number] = np.mean([log_residual[rows[variant][0]] for variant in of_stages])
    for part, seconds in timed_parts_s(runtime, unlike, len(grid)).items():
        breakdown[part] += seconds
    passes_s = sum_of(seconds for part, seconds in breakdown.items() if part != "overhead")
    breakdown["overhead"] = overhead_s(setting, grid, groups.pp.hosts, memory, passes_s)
    return {part: seconds * np.exp(unexplained) for part, seconds in breakdown.items()}


def _apart(setting: Setting, config: ParallelConfig, costs: BlockCosts, collective_time: CollectiveTime) -> StageTimes:
    """Price one configuration with every stage as a kind of its own."""
    grid = ConfigGrid.from_configs([config])
    (pipeline,) = pipelines(setting, grid).each
    apart = replace(pipeline, stages=pipeline.stages.apart())
    return StagePricing(setting, apart, place(setting.cluster, grid), collective_time).times(costs, grid.vpp)


def _times_by_stage(every: Sequence[StageTimes], variant_of: tuple[int, ...]) -> StageTimes:
    """Take each stage's times from those of its variant."""
    of_first = every[0]

    def chosen(arrays: Sequence[FloatArray]) -> FloatArray:
        return by_stage(list(arrays), variant_of)

    return StageTimes(
        parts_s={part: chosen([one.parts_s[part] for one in every]) for part in of_first.parts_s},
        core_s=chosen([one.core_s for one in every]),
        forward_s=chosen([one.forward_s for one in every]),
        backward_s=chosen([one.backward_s for one in every]),
        traffic=traffic_by_stage([one.traffic for one in every], variant_of),
        optimizer_s=chosen([one.optimizer_s for one in every]),
        embedding=chosen([one.embedding for one in every]),
        layer=chosen([one.layer for one in every]),
        weights_leave_host=by_stage([one.weights_leave_host for one in every], variant_of),
        link_use=chosen([one.link_use for one in every]),
        kind_of_stage=of_first.kind_of_stage,
        before=of_first.before,
    )
