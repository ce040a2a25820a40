"""Figures of every stage of one configuration: parameters, memory, times, and the collectives of its ranks in a step.

They are those that a rehearsal of the program shows for the first rank of each stage, so that both can be compared.

Letters: s stages, B blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.operators.kernels import collective_s, kernel_s
from costmodels.operators.layer_operators import Collective, unique_shapes
from costmodels.step.block_costs import shape_costs
from costmodels.step.communication import ISSUED, layer_collectives, layer_uses
from costmodels.step.memory.peak import MemoryEstimate, busiest_micro_batches, stage_memory
from costmodels.step.pipeline.schedules import StageLayers, assign_layers
from costmodels.step.pipeline.stage_pricing import StagePricing
from costmodels.step.pipeline.transfers import hop_collectives, transfer_collectives
from costmodels.step.placement import LocalParameters, extents, local_parameters, pipelines, place
from costmodels.step.weights.buckets import WHOLE_RULE_SETS
from costmodels.step.weights.traffic import weight_collectives, weight_executions
from hardware.arrays import FloatArray

_GROUPS = {
    "weights": "weights",
    "copies": "weight_copies",
    "expert_weights": "expert_weights",
    "expert_copies": "expert_copies",
}
"""Fields of `Groups` of the collectives that are not named after them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCollective:
    """Collectives of one call site on a rank of a stage in one step.

    Attributes:
        name: Call site, such as `tp.all_gather`.
        kind: Kind of collective.
        phase: Forward or backward pass; what recomputation repeats counts as forward again.
        size_bytes: Mean size of one message, gathered as `hardware/collectives.py` defines it [bytes].
        ranks: Ranks of the group of the stage's first rank; of a message, this rank and the other one.
        count: Number of messages.
    """

    name: str
    kind: OpKind
    phase: Phase
    size_bytes: int
    ranks: tuple[int, ...]
    count: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageFigures:
    """Figures of all stages of one configuration.

    Attributes:
        parameters: Parameters on one rank, before ZeRO shards them [s].
        memory: Memory of one rank [s].
        forward_s: Forward pass of one micro-batch, with what is exposed of its collectives [s], [s].
        backward_s: Its backward pass [s], [s].
        optimizer_s: Step of the optimizer [s], [s].
        num_micro_batches: Micro-batches of a step; of unequal replicas, those of the busiest.
        collectives: Collectives in one step, by stage.
    """

    parameters: FloatArray
    memory: MemoryEstimate
    forward_s: FloatArray
    backward_s: FloatArray
    optimizer_s: FloatArray
    num_micro_batches: int
    collectives: tuple[tuple[StageCollective, ...], ...]


def stage_figures(setting: Setting, config: ParallelConfig) -> StageFigures:
    """Return the figures of every stage of one configuration."""
    grid = ConfigGrid.from_configs([config])
    ordered = replace(setting, cluster=setting.cluster.reordered(config.assignment.hosts))
    layouts = pipelines(ordered, grid)
    (pipeline,) = layouts.each
    pipeline = replace(pipeline, stages=pipeline.stages.apart())
    local = local_parameters(setting.job, pipeline.weights, pipeline.stages.pieces, pipeline.held)
    groups = place(ordered.cluster, layouts.weights)
    shapes, shape_of = unique_shapes(grid)
    costs = shape_costs(ordered, shapes, (kernel_s, collective_s), has_recomputed=grid.has_recomputed)
    times = StagePricing(ordered, pipeline, groups, collective_s).times(costs.take(shape_of), grid.vpp)
    number = int(busiest_micro_batches(setting.job, grid)[0])
    return StageFigures(
        parameters=local.total[:, 0],
        memory=stage_memory(setting, config),
        forward_s=times.forward_s[:, 0],
        backward_s=times.backward_s[:, 0],
        optimizer_s=times.optimizer_s[:, 0],
        num_micro_batches=number,
        collectives=_stage_collectives(ordered, grid, local, number),
    )


def _stage_collectives(
    setting: Setting, grid: ConfigGrid, local: LocalParameters, num_micro_batches: int
) -> tuple[tuple[StageCollective, ...], ...]:
    """Return the collectives of the one configuration in `grid`, by stage.

    Args:
        setting: Job, cluster with its hosts in the order of the ranks, and runtime.
        grid: One configuration.
        local: Parameters on one rank of every stage [s, 1].
        num_micro_batches: Micro-batches of a step.
    """
    job, runtime, groups = setting.job, setting.runtime, place(setting.cluster, grid)
    pp, vpp = int(grid.pp[0]), int(grid.vpp[0])
    layers = assign_layers(
        job.model,
        runtime,
        pp,
        vpp,
        grid.assignments[grid.assignment[0]],
        recompute_layers=int(grid.recompute_layers[0]),
    )
    balanced = replace(runtime, expert_imbalance=0.0)  # what is sent if every expert gets as many tokens
    of_layers = layer_collectives(job, balanced, grid, groups)
    of_weights = weight_collectives(job, runtime, grid, groups, local)
    hops = transfer_collectives(job, runtime, grid, groups)
    used = _layer_executions(setting, grid, layers)
    by_chunk = runtime.rule_set in WHOLE_RULE_SETS and int(grid.zero_stage[0]) < 3
    found = []
    for stage in range(pp):
        own = [(of_layers[site], phase, count[stage] * num_micro_batches, 0) for (site, phase), count in used.items()]
        for site, phase, each in weight_executions(runtime, grid, np.array([num_micro_batches])):
            if site != "tied.all_reduce" or stage in (0, pp - 1):
                names = [name for name in (site, f"expert_{site}") if name in of_weights]
                own += [(of_weights[name], phase, float(each[0]), stage) for name in names]
        for phase in Phase:
            for name, each in hop_collectives(runtime, grid, phase) if pp > 1 else ():
                is_receiver = name == "pp.all_gather"  # it gathers what has come, and others send what goes
                own.append(
                    (hops[name], phase, _hops(stage, pp, vpp, phase, is_receiver) * num_micro_batches * each[0], 0)
                )
        found.append(tuple(_collectives_of(grid, stage, own, vpp if by_chunk else 1)))
    return tuple(found)


def _layer_executions(setting: Setting, grid: ConfigGrid, layers: StageLayers) -> dict[tuple[str, Phase], FloatArray]:
    """Count the executions of the layers' collectives by one micro-batch on every stage [s]."""
    blocks = [pieces @ setting.job.model.blocks_of_piece for pieces in (layers.held - layers.again, layers.again)]
    in_full = replace(grid, recompute=np.full_like(grid.recompute, RECOMPUTE_MODES.index("full")))
    counts: dict[tuple[str, Phase], FloatArray] = {}
    for own, held in zip((grid, in_full), blocks, strict=True):
        for use in layer_uses(setting.job, setting.runtime, own):
            executed = held[:, use.block] * float(use.count[0])
            counts[use.site, use.phase] = counts.get((use.site, use.phase), np.zeros(len(held))) + executed
    return counts


def _hops(stage: int, pp: int, vpp: int, phase: Phase, is_receiver: bool) -> int:
    """Return how often a stage sends, or receives, one micro-batch or its gradients."""
    is_end = stage == (0 if is_receiver == (phase == Phase.FORWARD) else pp - 1)
    return vpp - is_end


def _collectives_of(
    grid: ConfigGrid, stage: int, executed: list[tuple[Collective, Phase, float, int]], chunks: int
) -> Iterator[StageCollective]:
    """Yield what is executed, with the ranks of the stage's first rank.

    Args:
        grid: One configuration.
        stage: Number of the stage.
        executed: Collectives, their phases, number of executions, and rows of their shapes.
        chunks: Chunks whose weights are messages of their own, all but the first of them in one bucket.
    """
    per_stage = int(grid.tp[0] * grid.up[0] * grid.cp[0] * grid.dp[0])
    first, world, of_grid = stage * per_stage, per_stage * int(grid.pp[0]), extents(grid)
    for collective, phase, count, wanted in executed:
        messages = np.broadcast_to(collective.messages, collective.wire_bytes.shape)
        shape = collective.shape.reshape(-1, 3)
        row = min(wanted, len(shape) - 1)
        size, prefix, each = int(shape[row, 1]), collective.name.split(".")[0], float(messages.reshape(-1)[row])
        whole_bytes = count * float(shape[row, 0]) * each
        if chunks > 1 and prefix in _GROUPS:
            each = max(math.ceil(each / chunks), 1) + chunks - 1
        number = round(count * each * ISSUED.get(collective.name, 1.0))
        if not number or size < 2 or not whole_bytes:
            continue
        ranks: tuple[int, ...]
        if prefix == "tied":
            ranks = (first % per_stage, first % per_stage + world - per_stage)
        elif prefix == "pp" and collective.kind == OpKind.SEND_RECV:
            ranks = (first, (first + (per_stage if phase == Phase.FORWARD else -per_stage)) % world)
        else:
            stride, _ = of_grid["tp" if prefix == "pp" else _GROUPS.get(prefix, prefix)]
            ranks = tuple(first + int(stride[0]) * place for place in range(size))
        yield StageCollective(
            name=collective.name,
            kind=collective.kind,
            phase=phase,
            size_bytes=round(whole_bytes / number),
            ranks=ranks,
            count=number,
        )
