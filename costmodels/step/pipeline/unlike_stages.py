"""Pipelines whose stages are unlike: the passes and messages of all their chunks, timed pass by pass.

Letters: n configurations of a grid, k of one layout, c kinds of stages, v virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.step.block_costs import BlockCosts
from costmodels.step.pipeline.beside_passes import BesidePasses
from costmodels.step.pipeline.pass_by_pass import ChunkTimes, join_times, pipeline_time_s
from costmodels.step.pipeline.schedules import StageLayers, assign_layers
from costmodels.step.pipeline.stage_pricing import StageTimes
from costmodels.step.pipeline.transfers import Hops
from costmodels.step.placement import StageKinds, alternatives
from hardware.arrays import FloatArray, IntArray
from hardware.distinct import distinct_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnlikePasses:
    """Passes of some configurations with the same degrees of the pipeline.

    Attributes:
        pp: Number of stages.
        vpp: Chunks per stage.
        num_micro_batches: Number of micro-batches.
        at: Positions of the configurations in their grid [k].
        times: Passes and messages.
    """

    pp: int
    vpp: int
    num_micro_batches: int
    at: IntArray
    times: ChunkTimes


def unlike_passes(
    setting: Setting,
    grid: ConfigGrid,
    stages: StageKinds,
    costs: BlockCosts,
    hops: Hops,
    num_micro_batches: IntArray,
    stage_times: StageTimes,
    at: IntArray,
) -> Iterator[UnlikePasses]:
    """Yield the passes of configurations of one layout [k], by their degrees.

    Args:
        setting: Job, cluster and runtime.
        grid: The configurations [k].
        stages: Kinds of their stages.
        costs: Costs of their blocks.
        hops: Messages between their stages.
        num_micro_batches: Number of micro-batches of each configuration [k].
        stage_times: Times of the kinds of stages.
        at: Positions of the configurations in the grid of all [k].
    """
    pp = len(stages.kind_of_stage)
    first, row = distinct_rows([grid.vpp, num_micro_batches, grid.assignment, grid.recompute_layers])
    for number, one in enumerate(first.tolist()):
        chosen = np.flatnonzero(row == number)
        vpp, assignment = int(grid.vpp[one]), grid.assignments[grid.assignment[one]]
        times = stage_times.take(chosen)
        whole = [passes[stages.kind_of_stage] for passes in times.whole_s()]
        held = assign_layers(
            setting.job.model,
            setting.runtime,
            pp,
            vpp,
            replace(assignment, hosts=(), micro_batches=()),
            recompute_layers=int(grid.recompute_layers[one]),
            by_chunk=True,
        )
        if vpp > 1:
            whole = _of_chunks(stages, held, costs.take(chosen), whole)
        layers = held.layers[:, None].astype(np.float64)
        own_hops = hops.take(chosen)
        hop_s, hop_leaves_domain = own_hops.ring_hops(pp)
        timed = ChunkTimes(
            forward_s=whole[0],
            backward_s=whole[1],
            hop_s=hop_s,
            hop_leaves_domain=hop_leaves_domain,
            begin_s=own_hops.begin_s / 2,
            beside=_beside_passes(setting.runtime, times, layers, vpp),
        )
        of_one = int(num_micro_batches[one])
        yield UnlikePasses(pp=pp, vpp=vpp, num_micro_batches=of_one, at=at[chosen], times=timed)


def _beside_passes(runtime: RuntimeProfile, times: StageTimes, layers: FloatArray, vpp: int) -> BesidePasses:
    """Divide the traffic of the weights of every stage among its chunks.

    Args:
        runtime: Profile of the runtime.
        times: Times of the kinds of stages.
        layers: Layers that each virtual stage holds [v, 1].
        vpp: Chunks per stage.
    """
    kind = times.kind_of_stage
    pp, num_virtual = len(kind), len(layers)
    stage, virtual = np.arange(num_virtual) % pp, np.arange(num_virtual)[:, None]
    is_first, is_last = virtual == 0, virtual == num_virtual - 1
    # A stage's weights are its layers, and those of the embedding or the head.
    layer, embedding = times.layer[kind][stage], np.where(is_first, times.embedding[kind][stage], 0.0)
    of_stage = layers.reshape(vpp, pp, 1).sum(axis=0)[stage]
    rest = np.maximum(1.0 - layer * of_stage - embedding, 0.0)
    share = layers * layer + embedding + np.where(is_last, rest, 0.0)
    total = share.reshape(vpp, pp, -1).sum(axis=0)[stage]
    share = np.divide(share, total, out=np.zeros_like(share), where=total > 0)
    first = np.divide(np.where(is_first, embedding, layer), share, out=np.ones_like(share), where=share > 0)
    traffic, gathers, reduces = times.traffic, runtime.overlaps_weight_gather, runtime.overlaps_gradients
    once_reduce = traffic.once_reduce[kind]
    return BesidePasses(
        gather_s=share * traffic.once_gather[kind][stage] * gathers,
        reduce_s=share * once_reduce[stage] * reduces,
        first_share=np.minimum(first, 1.0),
        piece_share=np.broadcast_to(1.0 / np.maximum(layers + is_first + is_last, 1.0), share.shape),
        slowing=np.maximum(1.0 - runtime.overlap_efficiency, times.link_use[kind]),
        leaves_domain=times.weights_leave_domain[kind],
        first_layer_s=traffic.one_layer[kind] * gathers,
        after_s=traffic.once_more[kind] + once_reduce * (not reduces),
        tied_s=traffic.once_tied.max(axis=0),
    )


def _of_chunks(
    stages: StageKinds, held: StageLayers, costs: BlockCosts, of_stages: Sequence[FloatArray]
) -> list[FloatArray]:
    """Divide the passes of every stage [pp, k] among its chunks [v, k], in proportion to what their blocks cost."""
    pp, num_virtual = len(stages.kind_of_stage), len(held.held)
    stage = np.arange(num_virtual) % pp
    chunks = alternatives(held.model, held.held, held.again, stages.has_device[stages.kind_of_stage[stage]], stage)
    of_devices = np.concatenate([chunks.total(costs.compute), chunks.total(costs.exposed)], axis=1)
    forward, backward, *exposed = chunks.slowest(of_devices)
    # Both passes share what is exposed in proportion to their compute.
    compute = forward + backward
    longer = np.divide(compute + np.sum(exposed, axis=0), compute, out=np.ones_like(compute), where=compute > 0)
    found = []
    for of_stage, own in zip(of_stages, (forward * longer, backward * longer), strict=True):
        total = own.reshape(num_virtual // pp, pp, -1).sum(axis=0)
        found.append(own * np.divide(of_stage, total, out=np.zeros_like(total), where=total > 0)[stage])
    return found


def timed_parts_s(runtime: RuntimeProfile, unlike: Sequence[UnlikePasses], number: int) -> dict[str, FloatArray]:
    """Time the passes, and return the parts of the step that this gives, each [n].

    `bubble` is the time of all passes with nothing else, `pp` what messages and the exchange of a tied table add, and
    `dp` what other traffic of weights adds.
    """
    parts = {part: np.zeros(number) for part in ("bubble", "pp", "dp")}
    batches: dict[tuple[int, int, int], list[UnlikePasses]] = {}
    for one in unlike:
        batches.setdefault((one.pp, one.vpp, one.num_micro_batches), []).append(one)
    for (pp, vpp, num_micro_batches), batch in batches.items():
        whole = join_times([one.times for one in batch])
        at = np.concatenate([one.at for one in batch])
        plain = whole.without_weights()
        each = join_times([whole, plain, plain.silent()])
        overlaps = runtime.overlaps_p2p and vpp > 1
        ends_s, tied_s = pipeline_time_s(pp, vpp, num_micro_batches, each, overlaps_messages=overlaps)
        whole_s, plain_s, silent_s = np.split(ends_s, 3)
        parts["bubble"][at], parts["dp"][at] = silent_s, whole_s - plain_s
        parts["pp"][at] = plain_s - silent_s + np.split(tied_s, 3)[0]
    return parts
