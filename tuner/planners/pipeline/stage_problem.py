"""Pipeline problem of one configuration, with times and memory from the cost model in the form of `stages.Pipeline`.

Branch and bound on it proves the best cut into stages, the best recomputation, and the best kind of hosts for each
stage. The time of a stage is not quite the sum of its layers' times, because a part of the host's launches is hidden.
The problem takes the slope at a stage of average size, and the result is priced anew by the cost model.

Source: BMPipe, in ManuMatic's Table 3, chooses layers and recomputation per stage together under the memory limit.
"Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", section 3.2, chooses the
device of each stage.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.uneven_work import Assignment
from costmodels.step.pipeline.schedules import stage_in_flight
from costmodels.step.pipeline.stage_tables import stage_figures
from costmodels.step.placement import alternatives, stage_devices
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
    """Return the configuration with the best layers, recomputation and hosts of its stages, and the search's outcome.

    Args:
        setting: Job, cluster and runtime.
        config: Configuration with more than one stage; its own uneven work is ignored.
        memory_headroom: Fraction of the memory that must stay free.
        may_recompute: Whether layers may be recomputed in full, stage by stage.
        may_reorder: Whether hosts may serve other stages than in their order, if every stage is on whole hosts.
        limits: Limits of the search; None to go on until the best is proven.
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
    layers = over_chunks(np.array([stage.num_layers for stage in stages]), config.vpp, _ends_in_layers(problem))
    # Parts of the work that are as without an assignment stay empty.
    assignment = Assignment(
        layers=layers,
        recomputed=within_chunks(recomputed, layers) if recomputed.any() else (),
        hosts=() if hosts == tuple(range(setting.cluster.num_hosts)) else hosts,
    )
    return replace(config, assignment=assignment), outcome


def over_chunks(of_stage: IntArray, vpp: int, ends: tuple[float, float] = (0.0, 0.0)) -> tuple[int, ...]:
    """Divide each stage's layers into shares of equal time for its virtual stages; the first ones get the rest.

    The first virtual stage also holds the embedding and the last one the head, so that they get fewer layers.

    Args:
        of_stage: Layers of each stage [p].
        vpp: Virtual stages of each stage.
        ends: Number of layers that take as long as the embedding, and as the head.
    """
    pp = len(of_stage)
    if vpp == 1 or pp == 1:
        chunks = np.arange(vpp)[:, None]
        return tuple(int(number) for number in (of_stage // vpp + (chunks < of_stage % vpp)).ravel())
    held = np.zeros((vpp, pp), dtype=np.int64)
    for stage, whole in enumerate(of_stage.tolist()):
        own = {0: (0, ends[0]), pp - 1: (vpp - 1, ends[1])}.get(stage)
        others = [chunk for chunk in range(vpp) if own is None or chunk != own[0]]
        left = whole
        if own is not None:
            share = min(int(np.floor((whole + own[1]) / vpp - own[1] + 0.5)), whole // vpp)
            # no other chunk of the stage stays empty for the one at the end
            held[own[0], stage] = min(max(share, 0), max(whole - len(others), 0))
            left -= held[own[0], stage]
        each, more = divmod(left, len(others))
        held[others, stage] = each + (np.arange(len(others)) < more)
    return tuple(held.ravel().tolist())


def within_chunks(of_stage: IntArray, held: tuple[int, ...]) -> tuple[int, ...]:
    """Divide each stage's number among its virtual stages, in proportion to what each of these holds [pp * vpp]."""
    of_chunk = np.array(held).reshape(-1, len(of_stage))
    ends = np.cumsum(of_chunk, axis=0)
    upto = of_stage * ends // np.maximum(ends[-1], 1)
    return tuple(np.diff(upto, axis=0, prepend=0).ravel().tolist())


def _ends_in_layers(problem: Pipeline) -> tuple[float, float]:
    """Return the number of mean layers that take as long as the embedding, and as the head."""
    each = problem.layer_s[:, problem.layer_type].mean()
    return float(problem.first_s.mean() / each), float(problem.last_s.mean() / each)


def pipeline_of(
    setting: Setting,
    config: ParallelConfig,
    *,
    memory_headroom: float,
    may_recompute: bool,
    supply: tuple[int, ...] | None = None,
) -> Pipeline:
    """Build the pipeline problem of a configuration.

    Args:
        setting: Job, cluster and runtime.
        config: Configuration with its work in equal shares.
        memory_headroom: Fraction of the memory that must stay free.
        may_recompute: Whether layers may be recomputed in full.
        supply: Number of stages that each kind of device can serve. None keeps hosts in their order; a stage on several
            kinds then has the pace of the first.
    """
    figures = _Figures(setting, config)
    in_flight = stage_in_flight(
        np.arange(config.pp), config.pp, config.vpp, np.array(setting.job.global_batch_size // (config.dp * config.mbs))
    )
    # Weights and other states are what a layer needs beyond its activations in flight.
    kept, recomputed = figures.in_flight_bytes(in_flight, again=False), figures.in_flight_bytes(in_flight, again=True)
    on_stage = stage_devices(setting.cluster, config.pp)
    num_kinds = len(setting.cluster.devices)
    return Pipeline(
        layer_type=setting.job.model.piece_of_layer,
        layer_s=figures.layer_s,
        recompute_s=figures.recompute_s,
        first_s=figures.first_s,
        last_s=figures.last_s,
        stage_s=figures.stage_s,
        hop_s=np.zeros((num_kinds, num_kinds)),  # the same whatever is cut
        state_bytes=figures.layer_bytes[0] - in_flight[0] * kept,
        kept_bytes=kept,
        recomputed_bytes=recomputed if may_recompute else kept,
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
    """Times and memory of a layer, of the embedding and of the head, as differences between stages of average size.

    Letters: d kinds of devices, t kinds of layers. Pairs [2] are the first and the last stage.

    Attributes:
        layer_s: Time of a layer of each kind on each kind of device [d, t].
        recompute_s: Time that recomputing such a layer adds [d, t].
        first_s: Time of the embedding, and of towers beside it [d].
        last_s: Time of the head, and of prediction modules before it [d].
        stage_s: Time of a stage without layers [d].
        layer_bytes: Memory that one more layer needs on the first stage and on the last [2, t].
        again_bytes: Memory that one more recomputed layer needs there [2, t].
        first_bytes: Memory of the embedding and of towers.
        last_bytes: Memory of the head.
        working_bytes: Memory of a stage without layers.
    """

    def __init__(self, setting: Setting, config: ParallelConfig) -> None:
        """Price stages with one part more than the average stage, all in one call."""
        model, num_kinds = setting.job.model, len(setting.cluster.devices)
        number, num_pieces = len(np.unique(model.piece_of_layer)), len(model.pieces)
        one = np.eye(num_pieces)
        self.size = max(round(model.num_layers / config.pp), 1)
        # Rows: the average stage; with a layer of each kind more; with that layer recomputed; with what the first
        # stage holds beside layers; with the head. Differences from the first row are the figures of one part.
        base, none = self.size * model.mean_layer, np.zeros(num_pieces)
        head = one[-1] + (model.num_mtp_layers * one[-3] if model.num_mtp_layers else 0.0)
        rows = [(base, none), *((base + one[at], none) for at in range(number))]
        rows += [(base + one[at], one[at]) for at in range(number)]
        first = one[-2] + one[model.tower_pieces].sum(axis=0)
        rows += [(base + first, none), (base + head, none)]
        pieces, again = (np.stack(column) for column in zip(*rows, strict=True))
        # every kind of device, as the first stage and as the last, each with all rows: [d, 2, rows]
        shape = (num_kinds, 2, len(rows))
        kind, end, row = (index.ravel() for index in np.indices(shape))
        has_device = np.arange(num_kinds) == kind[:, None]
        stages = alternatives(model, pieces[row], again[row], has_device, end * (config.pp - 1))
        times, needed = stage_figures(setting, ConfigGrid.from_configs([config]), stages)
        # what a stage takes is the same at both ends, and what it needs the same on all kinds
        seconds, needed_bytes = times.reshape(shape)[:, 1], needed.reshape(shape)[0]
        plain, again_rows = slice(1, 1 + number), slice(1 + number, 1 + 2 * number)
        self.layer_s = seconds[:, plain] - seconds[:, :1]
        self.recompute_s = seconds[:, again_rows] - seconds[:, plain]
        self.first_s, self.last_s = seconds[:, -2] - seconds[:, 0], seconds[:, -1] - seconds[:, 0]
        shares = model.mean_layer[:number]
        self.stage_s = seconds[:, 0] - self.size * self.layer_s @ shares
        self.layer_bytes = needed_bytes[:, plain] - needed_bytes[:, :1]
        self.again_bytes = needed_bytes[:, again_rows] - needed_bytes[:, :1]
        self.first_bytes = float(needed_bytes[0, -2] - needed_bytes[0, 0])
        self.last_bytes = float(needed_bytes[1, -1] - needed_bytes[1, 0])
        self.working_bytes = float((needed_bytes[:, 0] - self.size * self.layer_bytes @ shares).max())

    def in_flight_bytes(self, in_flight: FloatArray, *, again: bool) -> FloatArray:
        """Return the activations that a layer of each kind keeps for one micro-batch in flight [t]."""
        # The first and the last stage have a different number of micro-batches in flight, but the same weights. The
        # difference of their memory is therefore due to activations.
        needed = self.again_bytes if again else self.layer_bytes
        if in_flight[0] == in_flight[-1]:
            # nothing tells weights and activations apart, and nothing needs to
            kept = self.layer_bytes[0] / in_flight[0]
            saved = np.maximum(self.layer_bytes[0] - self.again_bytes[0], 0.0) / in_flight[0]
            return np.asarray(kept - saved if again else kept)
        return np.asarray((needed[0] - needed[1]) / (in_flight[0] - in_flight[-1]))

    def again_once_bytes(self, in_flight: FloatArray) -> float:
        """Return the memory that any recomputation needs once per stage: activations of the layer that runs again."""
        kept, recomputed = (self.in_flight_bytes(in_flight, again=again) for again in (False, True))
        # The increase for a recomputed layer, less its states and what it keeps in flight, is needed once.
        states = self.layer_bytes[0] - in_flight[0] * kept
        return float(np.max(self.again_bytes[0] - states - in_flight[0] * recomputed, initial=0.0))


def _supply(cluster: Cluster, config: ParallelConfig) -> tuple[int, ...] | None:
    """Return the stages that hosts of each kind can serve; None where a stage would share a host or mix kinds."""
    of_stage = config.num_devices // config.pp
    found = dict.fromkeys(cluster.devices, 0)
    for group in cluster.groups:
        if of_stage % group.devices_per_host or group.num_devices % of_stage:
            return None
        found[group.device] += group.num_devices // of_stage
    return tuple(found.values())


def _hosts(cluster: Cluster, config: ParallelConfig, kinds: list[int]) -> tuple[int, ...]:
    """Return the hosts in the order of the stages that they serve."""
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
