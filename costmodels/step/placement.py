"""Groups of ranks of each parallel dimension, and the share of the weights that one rank keeps.

Ranks are in Megatron-Core's order: tp fastest, then up and cp, then dp, then pp (megatron-core parallel_state.py,
order "tp-cp-ep-dp-pp"). A dimension's stride is the product of the faster degrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.step.pipeline.schedules import StageLayers, assign_layers
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster
from hardware.device import Device
from hardware.distinct import distinct_rows
from hardware.group_links import GroupLinks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """Links that each dimension's groups cross, for every configuration [n].

    Attributes:
        tp: Group of tensor parallelism.
        expert_tp: Group that splits an expert.
        up: Group of Ulysses attention.
        cp: Group of ring attention.
        ep: Group of expert parallelism.
        pp: Neighbouring stages of a pipeline.
        ends: Rank of the first stage and its counterpart on the last.
        weights: Group over which a dense weight is reduced (up, cp and dp together), or sharded if dp_shard splits it.
        weight_copies: Ranks that hold a copy of one shard of a dense weight.
        expert_weights: Group over which an expert's weight is reduced or sharded.
        expert_copies: Ranks that hold a copy of one shard of an expert's weight.
    """

    tp: GroupLinks
    expert_tp: GroupLinks
    up: GroupLinks
    cp: GroupLinks
    ep: GroupLinks
    pp: GroupLinks
    ends: GroupLinks
    weights: GroupLinks
    weight_copies: GroupLinks
    expert_weights: GroupLinks
    expert_copies: GroupLinks

    def take(self, index: IntArray) -> Groups:
        """Select the groups of the configurations at the positions `index`."""
        return Groups(**{f.name: getattr(self, f.name).take(index) for f in fields(self)})


def place(cluster: Cluster, grid: ConfigGrid) -> Groups:
    """Return the groups of every configuration on `cluster`, whose hosts are those of the configurations, in order.

    Every configuration occupies all of its devices.

    Experts are distributed over all ranks of a stage, neighbours first, as in Megatron-Core's expert groups (order
    "tp-ep-dp", with an expert tensor degree of its own). So are those of runtimes whose `ep` must divide dp.
    """
    # One call computes the links of all dimensions, from their concatenated strides and sizes.
    strides, sizes = zip(*extents(grid).values(), strict=True)
    links = cluster.group_links(np.concatenate(strides), np.concatenate(sizes)).split(len(strides))
    ends = cluster.end_links(grid.tp * grid.up * grid.cp * grid.dp)
    return Groups(ends=ends, **dict(zip(extents(grid), links, strict=True)))


def spanned_domains(cluster: Cluster, grid: ConfigGrid, dimension: str) -> IntArray:
    """Return the largest number of domains that a dimension's groups span, in each configuration's order of hosts [n].

    Args:
        cluster: Cluster with its hosts in their own order.
        grid: Configurations [n].
        dimension: A field of `Groups`.
    """
    found = np.empty(len(grid), dtype=np.int64)
    for hosts, at in grid.by_host_order():
        groups = place(cluster.reordered(hosts), grid.take(at))
        found[at] = getattr(groups, dimension).domains
    return found


def place_on(cluster: Cluster, device: Device, grid: ConfigGrid) -> Groups:
    """Return the groups as the ranks on one kind of device see them.

    Groups inside a stage cross only links of hosts with that device, if such hosts can hold all ranks of each group.
    """
    whole, part = place(cluster, grid), cluster.only(device)
    found = {}
    for name in ("tp", "expert_tp", "up", "cp", "ep"):
        stride, size = extents(grid)[name]
        # A group that does not fit on the hosts with this device spans other hosts too.
        fits = part.num_devices % (stride * size) == 0
        own = part.group_links(np.where(fits, stride, 1), np.where(fits, size, 1))
        found[name] = getattr(whole, name).where(fits, own)
    return replace(whole, **found)


def place_stages(cluster: Cluster, grid: ConfigGrid, groups: Groups, stages: Sequence[tuple[int, ...]]) -> Groups:
    """Return the groups with those over which weights are kept and reduced as each kind of stage sees them [c, n].

    Args:
        cluster: Cluster on which the configurations run.
        grid: Configurations of one pp [n].
        groups: Their groups.
        stages: Numbers of the stages of each kind [c].
    """
    length, of_grid = cluster.num_devices // int(grid.pp[0]), extents(grid)

    def links(name: str) -> GroupLinks:
        return cluster.links_of_stages(*of_grid[name], length, stages)

    return replace(
        groups,
        weights=links("weights"),
        weight_copies=links("weight_copies"),
        expert_weights=links("expert_weights"),
        expert_copies=links("expert_copies"),
    )


def place_replica(cluster: Cluster, grid: ConfigGrid, stage: int, replica: int) -> Groups:
    """Return the groups of the one configuration in `grid` as one replica of one stage sees them.

    Args:
        cluster: Cluster on which the configuration runs.
        grid: Grid of one configuration.
        stage: Number of the stage.
        replica: Number of the data parallel replica.
    """
    ranks = np.arange(cluster.num_devices)
    of_stage = ranks.reshape(int(grid.pp[0]), -1)[stage]
    of_replica = of_stage.reshape(int(grid.dp[0]), -1)[replica]
    of_pipeline = ranks.reshape(int(grid.pp[0]), int(grid.dp[0]), -1)[:, replica].ravel()
    # Groups of tp, expert_tp, up and cp lie inside the replica, those of pp along its pipeline, and all others span the
    # whole stage.
    inside = dict.fromkeys(("tp", "expert_tp", "up", "cp"), of_replica)
    entries = []
    for name, (stride, size) in extents(grid).items():
        members = inside.get(name, of_stage)
        if name == "pp":
            entries.append(of_pipeline.reshape(int(grid.pp[0]), -1).T)
        else:
            entries.append(members.reshape(-1, int(size[0]), int(stride[0])).swapaxes(1, 2).reshape(-1, int(size[0])))
    links = cluster.links_among(entries, of_stage).split(len(entries))
    # All ranks of the first and the last stage exchange gradients at once, whichever stage is asked about.
    stages = ranks.reshape(int(grid.pp[0]), -1)
    pairs = np.stack([stages[0], stages[-1]], axis=1)
    ends = cluster.links_among([pairs[:, : len(stages)]], pairs.ravel())
    return Groups(ends=ends, **dict(zip(extents(grid), links, strict=True)))


def extents(grid: ConfigGrid) -> dict[str, tuple[IntArray, IntArray]]:
    """Return stride and size of each dimension's groups [n].

    The keys are the fields of `Groups` except `ends`.
    """
    ones = np.ones_like(grid.tp)
    inner = grid.tp * grid.up * grid.cp
    shared = grid.up * grid.cp * grid.dp
    experts = grid.expert_tensor * grid.ep
    shards = expert_shards(grid)
    return {
        "tp": (ones, grid.tp),
        "expert_tp": (ones, grid.expert_tensor),
        "up": (grid.tp, grid.up),
        "cp": (grid.tp * grid.up, grid.cp),
        "ep": (grid.expert_tensor, grid.ep),
        "pp": (inner * grid.dp, grid.pp),
        "weights": (grid.tp, shared // grid.copies),
        "weight_copies": (grid.tp * shared // grid.copies, grid.copies),
        "expert_weights": (experts, shards),
        "expert_copies": (experts * shards, np.maximum(grid.tp * shared // (experts * shards), 1)),
    }


def expert_shards(grid: ConfigGrid) -> IntArray:
    """Return the number of ranks over which ZeRO shards an expert's states [n]: its ranks divided by its copies."""
    replicas = grid.tp * grid.dp * grid.cp * grid.up // (grid.expert_tensor * grid.ep)
    return np.maximum(replicas // grid.copies, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageKinds:
    """Kinds of stages of one pipeline [c]; stages of one kind hold the same layers on the same kinds of devices.

    Kinds are in the order of their first stages. A pipeline of many stages has few kinds: the first stage, the last
    stage, and one or two between them.

    Attributes:
        model: Model whose pieces they hold.
        pieces: Number of each piece that a stage of each kind holds [c, P].
        again: Number of layers among them that are always recomputed in full, whatever `recompute` says [c, P].
        has_device: Whether some ranks of the stage run on each of `cluster.devices` [c, d].
        count: Number of stages of each kind [c].
        first: Number of the first stage of each kind [c].
        before: Number of stages of each kind (column) before the first stage of another (row) [c, c].
        kind_of_stage: Kind of every stage [pp].
    """

    model: ModelSpec
    pieces: FloatArray
    again: FloatArray
    has_device: NDArray[np.bool_]
    count: IntArray
    first: IntArray
    before: IntArray
    kind_of_stage: IntArray

    def apart(self) -> StageKinds:
        """Return the same pipeline with every stage as a kind of its own [pp]."""
        kind, num_stages = self.kind_of_stage, len(self.kind_of_stage)
        return StageKinds(
            model=self.model,
            pieces=self.pieces[kind],
            again=self.again[kind],
            has_device=self.has_device[kind],
            count=np.ones(num_stages, dtype=np.int64),
            first=np.arange(num_stages),
            before=np.tri(num_stages, k=-1, dtype=np.int64),
            kind_of_stage=np.arange(num_stages),
        )

    @property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the stages of each kind; kinds that are alternatives of each other have one number each."""
        if not len(self.before):
            return tuple((number,) for number in self.first.tolist())
        return tuple(tuple(np.flatnonzero(self.kind_of_stage == kind).tolist()) for kind in range(len(self.first)))

    @property
    def layers(self) -> FloatArray:
        """Number of layers, prediction modules included, that a stage of each kind holds [c, 1]."""
        return (self.pieces @ self.model.is_layer_piece)[:, None].astype(np.float64)

    @property
    def layers_again(self) -> FloatArray:
        """Number of layers that are always recomputed in full [c, 1]."""
        return (self.again @ self.model.is_layer_piece)[:, None].astype(np.float64)

    @property
    def embeddings(self) -> FloatArray:
        """Number of embeddings that a stage of each kind holds [c, 1]."""
        return self.pieces[:, [-2]]

    @property
    def heads(self) -> FloatArray:
        """Number of output heads that a stage of each kind holds, those of prediction modules not counted [c, 1]."""
        return self.pieces[:, [-1]]

    def total(self, costs: FloatArray) -> FloatArray:
        """Add up the costs of single blocks for each kind of stage [..., c, k].

        Args:
            costs: Costs of every block [..., B, k]. If some layers are always recomputed, their costs with
                recomputation follow as further rows [..., 2 * B, k].
        """
        each = self.model.blocks_of_piece
        if costs.shape[-2] == each.shape[1]:
            return np.asarray((self.pieces @ each) @ costs)
        return np.asarray(np.concatenate([(self.pieces - self.again) @ each, self.again @ each], axis=1) @ costs)

    def slowest(self, seconds: FloatArray) -> FloatArray:
        """Return the parts of the time [p, c, k] on the slowest device of each kind of stage.

        The ranks of a stage wait for each other in every micro-batch, in collectives or at its end.

        Args:
            seconds: Parts of the time on each kind of device [d, p, c, k].
        """
        if len(seconds) == 1:
            return np.asarray(seconds[0])
        # The device with the longest total time sets the pace. The parts are those of that device, so that they add up.
        is_on = self.has_device.T[:, :, None]
        slowest = np.where(is_on, seconds.sum(axis=1), -np.inf).argmax(axis=0)
        return np.asarray(np.take_along_axis(seconds, slowest[None, None], axis=0)[0])

    def most(self, seconds: FloatArray) -> FloatArray:
        """Return the longest of times [d, p, c, k] of at least 0 on the devices of each kind of stage [p, c, k]."""
        if len(seconds) == 1:
            return np.asarray(seconds[0])
        return np.asarray(np.where(self.has_device.T[:, None, :, None], seconds, 0.0).max(axis=0))

    def longest(self, seconds: FloatArray) -> FloatArray:
        """Return the longest of the times of every stage [pp, k] over the stages of each kind [c, k]."""
        return np.stack([seconds[self.kind_of_stage == kind].max(axis=0) for kind in range(len(self.first))])

    def smallest(self, figures: Sequence[float]) -> FloatArray:
        """Return the smallest of `figures`, one for each cluster device, over the devices of each kind of stage [c]."""
        return np.asarray(np.where(self.has_device, figures, np.inf).min(axis=1))


def stage_kinds(stages: StageLayers, has_device: NDArray[np.bool_]) -> StageKinds:
    """Group stages into kinds.

    Args:
        stages: Pieces that each stage holds.
        has_device: Devices of each stage [pp, d].
    """
    numbers: dict[tuple[float, ...], int] = {}
    pieces, again = stages.held.astype(np.float64), stages.again.astype(np.float64)
    rows = np.concatenate([pieces, again, has_device], axis=1).tolist()
    kind = np.array([numbers.setdefault(tuple(row), len(numbers)) for row in rows])
    # Row k of the cumulative sum counts the stages of every kind up to stage k; subtracting is_kind leaves those before
    # it.
    is_kind = kind[:, None] == np.arange(len(numbers))
    first = is_kind.argmax(axis=0)
    return StageKinds(
        model=stages.model,
        pieces=pieces[first],
        again=again[first],
        has_device=has_device[first],
        count=is_kind.sum(axis=0),
        first=first,
        before=(np.cumsum(is_kind, axis=0) - is_kind)[first],
        kind_of_stage=kind,
    )


def alternatives(
    model: ModelSpec,
    pieces: FloatArray | IntArray,
    again: FloatArray | IntArray,
    has_device: NDArray[np.bool_],
    number: IntArray,
) -> StageKinds:
    """Return stages that are alternatives of each other, so that none comes before another.

    Args:
        model: Model whose pieces they hold.
        pieces: Pieces that each stage holds [c, P].
        again: Layers among them that run again in full [c, P].
        has_device: Devices of each stage [c, d].
        number: Number of each stage in the pipeline [c].
    """
    return StageKinds(
        model=model,
        pieces=np.asarray(pieces, dtype=np.float64),
        again=np.asarray(again, dtype=np.float64),
        has_device=has_device,
        count=np.ones(len(pieces), dtype=np.int64),
        first=number,
        before=np.zeros((0, 0), dtype=np.int64),
        kind_of_stage=number,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """Configurations [k] whose stages hold the same layers.

    Attributes:
        pp: Number of stages.
        stages: Kinds of the stages.
        at: Positions of the configurations in their grid [k].
        weights: Rows of the grid that differ in the way weights are kept and reduced [w].
        weights_at: Positions of these rows among those of all pipelines [w].
        weights_of: Row of `weights` that each configuration has [k].
        held: Parameters of every block for these rows [w].
    """

    pp: int
    stages: StageKinds
    at: IntArray
    weights: ConfigGrid
    weights_at: IntArray
    weights_of: IntArray
    held: BlockParameters


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipelines:
    """Grid [n] grouped by the layout of its stages.

    Attributes:
        each: Layouts, each with its configurations.
        weights: Rows of the grid that differ in the way weights are kept and reduced [w].
        weights_of: Row of `weights` that each configuration has [n].
    """

    each: tuple[Pipeline, ...]
    weights: ConfigGrid
    weights_of: IntArray


def pipelines(setting: Setting, grid: ConfigGrid, has_device: NDArray[np.bool_] | None = None) -> Pipelines:
    """Group the configurations by the layers that their stages hold.

    Configurations that differ in vpp alone share a layout if each stage holds the same layers.

    Args:
        setting: Job, cluster and runtime. The cluster's hosts are in the order of the ranks.
        grid: Configurations [n].
        has_device: Devices of each stage [pp, d], for configurations of one pp; None takes those of the cluster.
    """
    layouts, layout = _layouts(setting.job, setting.runtime, grid)
    replicas = grid.dp * grid.cp * grid.up
    # The layout is the first column, so that the rows of one layout follow each other.
    columns = [layout, grid.tp, replicas, grid.ep, grid.expert_tp, grid.zero_stage, grid.copies, grid.offload]
    kept, weights_of = distinct_rows(columns)
    weights = grid.take(kept)
    held = block_parameters(setting.job.model, weights)
    of_pp = cache(partial(stage_devices, setting.cluster))
    each = []
    for stages, at, weights_at in zip(layouts, _positions(layout), _positions(layout[kept]), strict=True):
        devices = of_pp(len(stages.held)) if has_device is None else has_device
        each.append(
            Pipeline(
                pp=len(stages.held),
                stages=stage_kinds(stages, devices),
                at=at,
                weights=weights.take(weights_at),
                weights_at=weights_at,
                weights_of=weights_of[at] - weights_at[0],
                held=held.take(weights_at),
            )
        )
    return Pipelines(each=tuple(each), weights=weights, weights_of=weights_of)


def _layouts(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> tuple[list[StageLayers], IntArray]:
    """Return the distinct layouts of layers over stages, and the number of each configuration's layout [n]."""
    # Layers depend on pp, vpp, the assignment and the recomputed layers alone: each combination is assigned once.
    first, cut = distinct_rows([grid.pp, grid.vpp, grid.assignment, grid.recompute_layers])
    found = []
    for at in first.tolist():
        assignment = grid.assignments[grid.assignment[at]]
        again = int(grid.recompute_layers[at])
        found.append(
            assign_layers(job.model, runtime, int(grid.pp[at]), int(grid.vpp[at]), assignment, recompute_layers=again)
        )
    # Different combinations may give the stages the same layers: equal layouts get one number.
    numbers: dict[bytes, int] = {}
    keys = [np.stack([own.held, own.again]).tobytes() for own in found]
    number = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    return list(dict(zip(number.tolist(), found, strict=True)).values()), number[cut]


def _positions(number: IntArray) -> list[IntArray]:
    """Return the positions at which each number occurs, from 0 on."""
    counts = np.bincount(number)
    # the sort is fast for short integers
    order = np.argsort(number.astype(np.min_scalar_type(len(counts))), kind="stable")
    return np.split(order, np.cumsum(counts)[:-1]) if len(counts) else []


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalParameters:
    """Parameters that one rank of each stage keeps before ZeRO shards them, each array [s, k].

    Attributes:
        dense: Weights that all ranks of the `weights` group share.
        expert: Weights that the `expert_weights` group shares.
        tied: Dense weights of which the stage at the pipeline's other end has a copy.
        tables: Tables of the embedding and the head among the dense weights [s, 1].
        is_first: Whether the stage is the first of its pipeline [s, 1].
        frozen: Further weights that no step changes; 0 in a model without towers.
    """

    dense: FloatArray
    expert: FloatArray
    tied: FloatArray
    tables: FloatArray
    is_first: NDArray[np.bool_]
    frozen: FloatArray | float = 0.0

    @property
    def total(self) -> FloatArray:
        """Weights of both kinds."""
        return self.dense + self.expert


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockParameters:
    """Parameters of every block of a model that one rank keeps before ZeRO shards them, each array [B, n].

    Attributes:
        dense: Weights that all ranks of the `weights` group share.
        expert: Weights that the `expert_weights` group shares.
        one_expert: Those of one expert.
    """

    dense: FloatArray
    expert: FloatArray
    one_expert: FloatArray

    def take(self, index: IntArray) -> BlockParameters:
        """Select the configurations at the positions `index`."""
        return BlockParameters(**{f.name: getattr(self, f.name).take(index, axis=1) for f in fields(self)})


def block_parameters(model: ModelSpec, grid: ConfigGrid) -> BlockParameters:
    """Compute the parameters of every block on one rank; see `AbstractBlock.held`."""
    found = BlockParameters(**{f.name: np.empty((len(model.blocks), len(grid))) for f in fields(BlockParameters)})
    for at, block in enumerate(model.blocks):
        own = block.held(grid)
        found.dense[at], found.expert[at], found.one_expert[at] = own.dense, own.expert, own.one_expert
    return found


def _frozen_parameters(model: ModelSpec, grid: ConfigGrid) -> FloatArray:
    """Return the parameters of every block that no step changes [B, n]."""
    return np.stack([np.broadcast_to(block.held(grid).frozen, (len(grid),)) for block in model.blocks])


def local_table(model: ModelSpec, grid: ConfigGrid) -> FloatArray:
    """Return the parameters of the embedding, or of the output head, on one rank [n]."""
    return model.embedding.table / grid.tp.astype(np.float64)


def local_parameters(
    job: TrainingJob, grid: ConfigGrid, pieces: FloatArray, each: BlockParameters | None = None
) -> LocalParameters:
    """Compute the parameters per rank of stages that hold `pieces` [s, P], for configurations [k].

    A tied head is a copy of the embedding on the last stage. With one stage it is the embedding itself and counts once.

    Args:
        job: Training job.
        grid: Configurations [k].
        pieces: Pieces that each stage holds [s, P].
        each: Parameters of every block of the same configurations, if they are known.
    """
    model = job.model
    each = block_parameters(model, grid) if each is None else each
    blocks = pieces @ model.blocks_of_piece
    tied = local_table(model, grid) * ((grid.pp > 1) & model.tied_embeddings)
    dense = each.dense.copy()
    dense[-1] += tied
    return LocalParameters(
        dense=blocks @ dense,
        expert=blocks @ each.expert,
        tied=np.outer(blocks[:, -2] + blocks[:, -1], tied),
        tables=pieces[:, [-2]] + pieces[:, [-1]] * (not model.tied_embeddings),
        is_first=pieces[:, [-2]] > 0,
        frozen=blocks @ _frozen_parameters(model, grid) if model.towers else 0.0,
    )


def sharded_parameters(grid: ConfigGrid, local: LocalParameters) -> FloatArray:
    """Return the number of parameters of each stage whose states one rank keeps if ZeRO shards them [s, k]."""
    dense = local.dense / (grid.dp * grid.cp * grid.up // grid.copies)
    return np.asarray(dense + local.expert / expert_shards(grid))


def stage_devices(cluster: Cluster, pp: int) -> NDArray[np.bool_]:
    """Return whether some ranks of each stage run on each of `cluster.devices` [pp, d]."""
    # Stages and host groups are intervals of ranks: a stage runs on a group if the intervals overlap.
    ends = np.cumsum([group.num_devices for group in cluster.groups])
    last = np.arange(1, pp + 1)[:, None] * (cluster.num_devices // pp)
    first = last - cluster.num_devices // pp
    on_group = (first < ends) & (last > np.concatenate([[0], ends[:-1]]))
    devices = cluster.devices
    is_device = np.array([[group.device == device for device in devices] for group in cluster.groups])
    return np.asarray(on_group @ is_device)
