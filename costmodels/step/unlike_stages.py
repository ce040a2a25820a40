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
from costmodels.job.uneven_work import Assignment
from costmodels.step.block_costs import BlockCosts
from costmodels.step.pipeline_time import ChunkTimes, join_times, pipeline_time_s
from costmodels.step.placement import StageKinds, alternatives
from costmodels.step.schedules import assign_layers
from costmodels.step.transfers import Hops
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
    passes_s: tuple[FloatArray, FloatArray],
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
        passes_s: Time of one micro-batch on each kind of stage, forward and backward [s], each [c, k].
        at: Positions of the configurations in the grid of all [k].
    """
    pp = len(stages.kind_of_stage)
    first, row = distinct_rows([grid.vpp, num_micro_batches, grid.assignment])
    for number, one in enumerate(first.tolist()):
        chosen = np.flatnonzero(row == number)
        vpp, assignment = int(grid.vpp[one]), grid.assignments[grid.assignment[one]]
        whole = [passes[:, chosen][stages.kind_of_stage] for passes in passes_s]
        if vpp > 1:
            whole = _of_chunks(setting, stages, costs.take(chosen), whole, vpp, assignment)
        yield passes_of(pp, vpp, int(num_micro_batches[one]), at[chosen], whole, hops.take(chosen))


def passes_of(
    pp: int, vpp: int, num_micro_batches: int, at: IntArray, passes_s: Sequence[FloatArray], hops: Hops
) -> UnlikePasses:
    """Put the passes of configurations together with their messages.

    Args:
        pp: Number of stages.
        vpp: Chunks per stage.
        num_micro_batches: Number of micro-batches.
        at: Positions of the configurations in the grid of all [k].
        passes_s: Time of one micro-batch on each virtual stage, forward and backward [s], each [v, k].
        hops: Messages between the stages.
    """
    forward_s, backward_s = passes_s
    forward_hop_s, backward_hop_s = hops.ring_hops_s(pp)
    times = ChunkTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        forward_hop_s=forward_hop_s,
        backward_hop_s=backward_hop_s,
        begin_s=hops.begin_s / 2,
    )
    return UnlikePasses(pp=pp, vpp=vpp, num_micro_batches=num_micro_batches, at=at, times=times)


def _of_chunks(
    setting: Setting,
    stages: StageKinds,
    costs: BlockCosts,
    of_stages: Sequence[FloatArray],
    vpp: int,
    assignment: Assignment,
) -> list[FloatArray]:
    """Divide the passes of every stage [pp, k] among its chunks [v, k], in proportion to what their blocks cost."""
    pp = len(stages.kind_of_stage)
    stage = np.arange(pp * vpp) % pp
    held = assign_layers(
        setting.job.model, setting.runtime, pp * vpp, 1, replace(assignment, hosts=(), micro_batches=())
    )
    chunks = alternatives(held.blocks, held.again, stages.has_device[stages.kind_of_stage[stage]], stage)
    of_devices = np.concatenate([chunks.total(costs.compute), chunks.total(costs.exposed)], axis=1)
    forward, backward, *exposed = chunks.slowest(of_devices)
    # Both passes share what is exposed in proportion to their compute.
    compute = forward + backward
    longer = np.divide(compute + np.sum(exposed, axis=0), compute, out=np.ones_like(compute), where=compute > 0)
    found = []
    for of_stage, own in zip(of_stages, (forward * longer, backward * longer), strict=True):
        total = own.reshape(vpp, pp, -1).sum(axis=0)
        found.append(own * np.divide(of_stage, total, out=np.zeros_like(total), where=total > 0)[stage])
    return found


def timed_parts_s(runtime: RuntimeProfile, unlike: Sequence[UnlikePasses], number: int) -> dict[str, FloatArray]:
    """Time the passes; return the time of all of them without messages as bubble, and what messages add as pp [n]."""
    parts = {part: np.zeros(number) for part in ("bubble", "pp")}
    batches: dict[tuple[int, int, int], list[UnlikePasses]] = {}
    for one in unlike:
        batches.setdefault((one.pp, one.vpp, one.num_micro_batches), []).append(one)
    for (pp, vpp, num_micro_batches), batch in batches.items():
        times = join_times([one.times for one in batch])
        at = np.concatenate([one.at for one in batch])
        both = join_times([times, times.silent()])
        overlaps = runtime.overlaps_p2p and vpp > 1
        whole, silent = np.split(pipeline_time_s(pp, vpp, num_micro_batches, both, overlaps_messages=overlaps), 2)
        parts["bubble"][at], parts["pp"][at] = silent, whole - silent
    return parts
