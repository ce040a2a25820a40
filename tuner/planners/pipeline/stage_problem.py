"""The pipeline problem of one configuration: what the cost model says of its layers, as stages.py takes it.

Branch and bound on it proves the best cut into stages, the best recomputation, and the best kind of hosts for each
stage. A stage's time is not quite the sum of its layers', because a host's launches are hidden in part; the problem
takes the slope of a stage of average size, and what is found is priced anew.

Source: BMPipe, as ManuMatic's Table 3 has it, chooses layers and recomputation per stage together under the memory
limit; "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", section 3.2, which
device runs what.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.uneven_work import Assignment
from costmodels.operators.layer_operators import BLOCKS, Block
from costmodels.step.placement import stage_devices
from costmodels.step.schedules import moe_layers, stage_in_flight
from costmodels.step.stage_tables import alternatives, stage_figures
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Limits, Outcome
from tuner.planners.pipeline.stage_search import StagesProblem
from tuner.planners.pipeline.stages import Pipeline, StagePlan


def best_stages(
    setting: Setting,
    config: ParallelConfig,
    *,
    memory_headroom: float,
    may_recompute: bool = True,
    may_reorder: bool = True,
    limits: Limits | None = None,
) -> tuple[ParallelConfig, Outcome[StagePlan]]:
    """The configuration with the best layers, recomputation and hosts of its stages, and how far that is proven.

    Args:
        setting: Job, cluster and runtime.
        config: A configuration with more than one stage; its own assignment counts for nothing.
        memory_headroom: Share of the memory that must stay free.
        may_recompute: Whether layers may be recomputed in full, stage by stage.
        may_reorder: Whether hosts may serve other stages than their order says, where each stage is on whole hosts.
        limits: When to stop before the best is proven.
    """
    even = replace(config, assignment=Assignment())
    supply = _supply(setting.cluster, config) if may_reorder else None
    problem = pipeline_of(setting, even, memory_headroom=memory_headroom, may_recompute=may_recompute, supply=supply)
    outcome = branch_and_bound(StagesProblem(problem), limits=limits or Limits())
    if outcome.best is None:
        return even, outcome
    stages = outcome.best.solution.stages
    hosts = _hosts(setting.cluster, config, [stage.kind for stage in stages]) if supply is not None else ()
    recomputed = np.array([stage.num_recomputed for stage in stages])
    assignment = Assignment(
        layers=over_chunks(np.array([stage.num_layers for stage in stages]), config.vpp),
        recomputed=over_chunks(recomputed, config.vpp) if recomputed.any() else (),
        hosts=() if hosts == tuple(range(setting.cluster.num_hosts)) else hosts,
    )
    return replace(config, assignment=assignment), outcome


def over_chunks(of_stage: IntArray, vpp: int) -> tuple[int, ...]:
    """What the virtual stages get of each stage's number, in equal shares; the first ones get what is left over."""
    chunks = np.arange(vpp)[:, None]
    return tuple(int(number) for number in (of_stage // vpp + (chunks < of_stage % vpp)).ravel())


def pipeline_of(
    setting: Setting,
    config: ParallelConfig,
    *,
    memory_headroom: float,
    may_recompute: bool,
    supply: tuple[int, ...] | None = None,
) -> Pipeline:
    """The pipeline problem of a configuration.

    Args:
        setting: Job, cluster and runtime.
        config: The configuration, its work in equal shares.
        memory_headroom: Share of the memory that must stay free.
        may_recompute: Whether layers may be recomputed in full.
        supply: Stages that each kind of device can serve; None leaves hosts in their order, and a stage that stands on
            several kinds at the pace of the first.
    """
    figures = _Figures(setting, config)
    in_flight = stage_in_flight(
        np.arange(config.pp), config.pp, config.vpp, np.array(setting.job.global_batch_size // (config.dp * config.mbs))
    )
    kept, recomputed = figures.in_flight_bytes(in_flight, again=False), figures.in_flight_bytes(in_flight, again=True)
    is_moe = moe_layers(setting.job.model)
    types = np.unique(is_moe)
    on_stage = stage_devices(setting.cluster, config.pp)
    num_kinds = len(setting.cluster.devices)
    return Pipeline(
        layer_type=np.searchsorted(types, is_moe),
        layer_s=figures.layer_s[:, types.astype(np.int64)],
        recompute_s=figures.recompute_s[:, types.astype(np.int64)],
        first_s=figures.first_s,
        last_s=figures.last_s,
        stage_s=figures.stage_s,
        hop_s=np.zeros((num_kinds, num_kinds)),  # the same whatever is cut
        state_bytes=(figures.layer_bytes[0] - in_flight[0] * kept)[types.astype(np.int64)],
        kept_bytes=kept[types.astype(np.int64)],
        recomputed_bytes=(recomputed if may_recompute else kept)[types.astype(np.int64)],
        first_bytes=figures.first_bytes,
        last_bytes=figures.last_bytes,
        working_bytes=figures.working_bytes + (figures.again_once_bytes(in_flight) if may_recompute else 0.0),
        capacity_bytes=(1 - memory_headroom)
        * np.array([float(device.memory_bytes) for device in setting.cluster.devices]),
        supply=np.full(num_kinds, config.pp) if supply is None else np.array(supply),
        in_flight=in_flight,
        num_micro_batches=setting.job.global_batch_size // (config.dp * config.mbs),
        vpp=config.vpp,
        kinds=tuple(on_stage.argmax(axis=1).tolist()) if supply is None else None,
    )


class _Figures:
    """Times and memory of one layer, of the embedding and of the head, as differences between stages of average size.

    Attributes:
        layer_s: Of a dense layer and one with experts on each kind [d, 2]; `recompute_s` is what recomputing adds.
        first_s, last_s, stage_s: Of the embedding, the head, and a stage without layers [d].
        layer_bytes: What one more layer needs on the first stage, and on the last [2, 2].
    """

    def __init__(self, setting: Setting, config: ParallelConfig) -> None:
        model, num_kinds = setting.job.model, len(setting.cluster.devices)
        moe = model.num_moe_layers / model.num_layers
        mean = _row({Block.ATTENTION: 1.0, Block.DENSE_MLP: 1.0 - moe, Block.MOE_MLP: moe})
        self.size = max(round(model.num_layers / config.pp), 1)
        layers = [_row({Block.ATTENTION: 1.0, mlp: 1.0}) for mlp in (Block.DENSE_MLP, Block.MOE_MLP)]
        base, none = self.size * mean, np.zeros(len(BLOCKS))
        rows = [(base, none), *((base + layer, none) for layer in layers), *((base + layer, layer) for layer in layers)]
        rows += [(base + _row({Block.EMBEDDING: 1.0}), none), (base + _row({Block.HEAD: 1.0}), none)]
        blocks, again = (np.stack(column) for column in zip(*rows, strict=True))
        # every kind of device, as the first stage and as the last, each with all rows: [d, 2, rows]
        shape = (num_kinds, 2, len(rows))
        kind, end, row = (index.ravel() for index in np.indices(shape))
        has_device = np.arange(num_kinds) == kind[:, None]
        stages = alternatives(blocks[row], again[row], has_device, end * (config.pp - 1))
        times, needed = stage_figures(setting, ConfigGrid.from_configs([config]), stages)
        # what a stage takes is the same at both ends, and what it needs the same on all kinds
        seconds, needed_bytes = times.reshape(shape)[:, 1], needed.reshape(shape)[0]
        self.layer_s = seconds[:, 1:3] - seconds[:, :1]
        self.recompute_s = seconds[:, 3:5] - seconds[:, 1:3]
        self.first_s, self.last_s = seconds[:, 5] - seconds[:, 0], seconds[:, 6] - seconds[:, 0]
        shares = np.array([1.0 - moe, moe])
        self.stage_s = seconds[:, 0] - self.size * self.layer_s @ shares
        self.layer_bytes = needed_bytes[:, 1:3] - needed_bytes[:, :1]
        self.again_bytes = needed_bytes[:, 3:5] - needed_bytes[:, :1]
        self.first_bytes = float(needed_bytes[0, 5] - needed_bytes[0, 0])
        self.last_bytes = float(needed_bytes[1, 6] - needed_bytes[1, 0])
        self.working_bytes = float((needed_bytes[:, 0] - self.size * self.layer_bytes @ shares).max())

    def in_flight_bytes(self, in_flight: FloatArray, *, again: bool) -> FloatArray:
        """What a layer of each type keeps of one micro-batch in flight [2]."""
        needed = self.again_bytes if again else self.layer_bytes
        if in_flight[0] == in_flight[-1]:
            # nothing tells weights and activations apart, and nothing needs to
            kept = self.layer_bytes[0] / in_flight[0]
            saved = np.maximum(self.layer_bytes[0] - self.again_bytes[0], 0.0) / in_flight[0]
            return np.asarray(kept - saved if again else kept)
        return np.asarray((needed[0] - needed[1]) / (in_flight[0] - in_flight[-1]))

    def again_once_bytes(self, in_flight: FloatArray) -> float:
        """What a stage that recomputes any layer needs once: that layer's activations, as it runs again."""
        kept, recomputed = (self.in_flight_bytes(in_flight, again=again) for again in (False, True))
        states = self.layer_bytes[0] - in_flight[0] * kept
        return float(np.max(self.again_bytes[0] - states - in_flight[0] * recomputed, initial=0.0))


def _row(held: dict[Block, float]) -> FloatArray:
    return np.array([held.get(block, 0.0) for block in BLOCKS])


def _supply(cluster: Cluster, config: ParallelConfig) -> tuple[int, ...] | None:
    """Stages that the hosts of each kind of device can serve; None where a stage would share a host or a kind."""
    of_stage = config.num_devices // config.pp
    found = dict.fromkeys(cluster.devices, 0)
    for group in cluster.groups:
        if of_stage % group.devices_per_host or group.num_devices % of_stage:
            return None
        found[group.device] += group.num_devices // of_stage
    return tuple(found.values())


def _hosts(cluster: Cluster, config: ParallelConfig, kinds: list[int]) -> tuple[int, ...]:
    """Hosts in the order of the stages that they serve."""
    host_devices = [group.device for group in cluster.groups for _ in range(group.hosts)]
    sizes = [group.devices_per_host for group in cluster.groups for _ in range(group.hosts)]
    left = {device: [at for at, own in enumerate(host_devices) if own == device] for device in cluster.devices}
    of_stage = config.num_devices // config.pp
    order: list[int] = []
    for kind in kinds:
        devices = 0
        while devices < of_stage:
            order.append(left[cluster.devices[kind]].pop(0))
            devices += sizes[order[-1]]
    return tuple(order)
