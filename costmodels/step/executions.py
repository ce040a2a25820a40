"""Count the executions of each operator and each collective in one step, as a profile of one pipeline shows them.

The counts cover all stages of one pipeline and all micro-batches of one configuration. Shapes and counts are those of
one rank.

Letters: c kinds of stages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.blocks.operator import Operator, Phase
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import Collective, recomputed_share, step_operators
from costmodels.step.communication import layer_collectives, layer_uses
from costmodels.step.pipeline.schedules import assign_layers
from costmodels.step.pipeline.transfers import transfer_collectives, transfer_executions
from costmodels.step.placement import local_parameters, pipelines, place
from costmodels.step.weights.traffic import weight_collectives, weight_executions
from hardware.arrays import FloatArray


def operator_executions(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid
) -> tuple[tuple[Operator, FloatArray], ...]:
    """Return every operator of the one configuration in `grid` with its number of executions [1].

    Forward operators that recomputation repeats count as forward again.
    """
    assert len(grid) == 1, "executions are counted for one configuration"
    num_micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    flavours = _split_by_recomputation(job, runtime, grid)

    place = {name: at for at, name in enumerate(job.model.block_names)}

    def count(operator: Operator) -> FloatArray:
        executed = (
            blocks[place[operator.block]] * (1.0 + recomputed_share(job, runtime, operator, own))
            for own, blocks in flavours
        )
        return np.asarray(num_micro_batches * sum(executed), dtype=np.float64)

    return tuple((operator, count(operator)) for operator in step_operators(job, runtime, grid))


def collective_executions(setting: Setting, grid: ConfigGrid) -> tuple[tuple[Collective, Phase, FloatArray], ...]:
    """Return every collective of the one configuration in `grid`, its phase, and its count [1] or [c, 1].

    Collectives of groups of one rank, and those that the configuration does not use, are left out.
    """
    job, runtime = setting.job, setting.runtime
    assert len(grid) == 1, "executions are counted for one configuration"
    num_micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    groups = place(setting.cluster, grid)
    found: list[tuple[Collective, Phase, FloatArray]] = []
    in_layers = layer_collectives(job, runtime, grid, groups)
    # Blocks that recompute and blocks that do not call the same collectives: their counts are added up.
    counts: dict[tuple[str, Phase], FloatArray] = {}
    for own, blocks in _split_by_recomputation(job, runtime, grid):
        for use in layer_uses(job, runtime, own):
            count = counts.setdefault((use.site, use.phase), np.zeros(1))
            count += blocks[use.block] * num_micro_batches * use.count
    found += [(in_layers[site], phase, count) for (site, phase), count in counts.items()]
    # Collectives over weights differ from stage to stage: each has a row for every kind of stage, counted as often as
    # the pipeline has such stages.
    (pipeline,) = pipelines(setting, grid).each
    local = local_parameters(job, grid, pipeline.stages.pieces)
    of_weights = weight_collectives(job, runtime, grid, groups, local)
    for site, phase, count in weight_executions(runtime, grid, num_micro_batches):
        for name in [name for name in (site, f"expert_{site}") if name in of_weights]:
            sends = of_weights[name].wire_bytes > 0  # stages without experts send nothing
            found.append((of_weights[name], phase, pipeline.stages.count[:, None] * count * sends))
    between_stages = transfer_collectives(job, runtime, grid, groups)
    found += [
        (between_stages[site], phase, count)
        for site, phase, count in transfer_executions(runtime, grid, num_micro_batches)
        if site in between_stages
    ]
    return tuple(each for each in found if each[0].group.size[0] > 1 and each[2].any())


def _split_by_recomputation(
    job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid
) -> tuple[tuple[ConfigGrid, FloatArray], ...]:
    """Split the numbers of blocks [B] of the one configuration by recomputation.

    Return the configuration with the blocks that run as it says. If its assignment recomputes layers in full, return
    the configuration with full recomputation and these layers' blocks as well.
    """
    model = job.model
    assignment = grid.assignments[grid.assignment[0]]
    number = int(grid.recompute_layers[0])
    layers = assign_layers(model, runtime, int(grid.pp[0]), int(grid.vpp[0]), assignment, recompute_layers=number)
    # Blocks of all stages together: the profile is that of a whole pipeline.
    blocks, again = (pieces.sum(axis=0) @ model.blocks_of_piece for pieces in (layers.held, layers.again))
    if not grid.has_recomputed:
        return ((grid, blocks),)
    in_full = replace(grid, recompute=np.full_like(grid.recompute, RECOMPUTE_MODES.index("full")))
    return (grid, blocks - again), (in_full, again)
