"""Tensor degrees for the stages on each of two kinds of hosts: pairs of degrees, and the layers that belong to them.

Fast devices with much memory may want a smaller tensor degree than slow ones with little memory, or than those with
slow links inside their hosts. Candidates here have one degree on all stages of the one kind of hosts and another on all
stages of the other kind. Every stage is on hosts of one kind, and there is no virtual pipeline.

A pair consists of two configurations of the grid that pass on the same micro-batches and differ in tp alone: tp*dp and
dp*mbs are equal. Both obey the rules, since they are in the grid. The layers of all pairs are cut together by tables
whose rows come from the one or the other (see `uneven`).

Letters: p stages, L layers, r configurations of one pp, k pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.job.parallel_config import DEGREES, ENUMERATED_DIMENSIONS, ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.uneven_work import Assignment
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.pipeline.stage_degrees import stage_tp_error
from costmodels.step.pipeline.stage_tables import StageTables, stage_tables
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster
from tuner.planners.pipeline.uneven import cut_layers

MOST_ROWS = 200
"""Most configurations whose pairs are looked at: those fastest with one degree on all stages, and their partners."""
MOST_PRICED = 120
"""Most configurations that the cost model prices: those fastest by the tables of their stages."""
SAME = tuple(name for name in (*DEGREES, *ENUMERATED_DIMENSIONS) if name not in ("tp", "dp", "mbs"))
"""Dimensions in which both configurations of a pair are equal."""


def plan_stage_degrees(
    setting: Setting, grid: ConfigGrid, parts: Sequence[str], *, memory_headroom: float
) -> ConfigGrid:
    """Return the configurations with two tensor degrees that fit and are predicted to be fast, in no order.

    Args:
        setting: Job, cluster and runtime.
        grid: Configurations with even work [n].
        parts: Parts of the work that may be uneven: with `layers` layers are cut, with `hosts` either kind may be
            first.
        memory_headroom: Fraction of the memory that must stay free, where that is possible.
    """
    none = grid.take(np.zeros(0, dtype=np.int64))
    if len(set(setting.cluster.host_kinds)) != 2 or setting.job.model.is_moe:
        return none
    rows = np.flatnonzero(
        (grid.vpp == 1) & (grid.pp > 1) & (grid.dp_shard == 0) & grid.sequence_parallel & (grid.assignment == 0)
    )
    found: list[tuple[float, ParallelConfig]] = []
    for pp in np.unique(grid.pp[rows]).tolist():
        own = grid.take(rows[grid.pp[rows] == pp])
        pairs = _pairs(own, _fastest(setting, own))
        for hosts in _orders(setting.cluster, "hosts" in parts):
            ordered = replace(setting, cluster=setting.cluster.reordered(hosts))
            border = _border(ordered.cluster, pp)
            if border is not None and len(pairs):
                found += _configs(ordered, own, pairs, border, hosts, "layers" in parts, memory_headroom)
    if not found:
        return none
    found.sort(key=lambda one: one[0])
    every = ConfigGrid.from_configs([config for _, config in found[:MOST_PRICED]], grid.opened)
    return every.take(np.flatnonzero(estimate_memory(setting, every).fits(memory_headroom)))


def _fastest(setting: Setting, own: ConfigGrid) -> IntArray:
    """Return the positions of the fastest configurations with one degree on all stages, whether they fit or not."""
    return np.argsort(estimate_step(setting, own).step_time_s)[:MOST_ROWS]


def _pairs(own: ConfigGrid, wanted: IntArray) -> IntArray:
    """Return the positions of both configurations of all pairs with at least one wanted configuration [k, 2]."""
    keys = [tuple(row) for row in own.matrix(SAME).tolist()]
    flow = zip((own.tp * own.dp).tolist(), (own.dp * own.mbs).tolist(), strict=True)
    alike: dict[tuple[int, ...], list[int]] = {}
    for at, (key, both) in enumerate(zip(keys, flow, strict=True)):
        alike.setdefault((*key, *both), []).append(at)
    is_wanted = set(wanted.tolist())
    found = [
        pair
        for members in alike.values()
        for pair in itertools.permutations(members, 2)
        if is_wanted & set(pair) and own.tp[pair[0]] != own.tp[pair[1]]
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _orders(cluster: Cluster, may_reorder: bool) -> Iterator[tuple[int, ...]]:
    """Yield orders in which the hosts of one kind stand before those of the other; () is the cluster's own order."""
    kind = np.repeat(cluster.host_kinds, [group.hosts for group in cluster.groups])
    first, second = (np.flatnonzero(kind == one).tolist() for one in dict.fromkeys(kind.tolist()))
    own = list(range(cluster.num_hosts))
    for order in ((*first, *second), (*second, *first)):
        if list(order) == own:
            yield ()
        elif may_reorder:
            yield order


def _border(cluster: Cluster, pp: int) -> int | None:
    """Return the number of stages on the first kind of hosts; None where a stage would be on both kinds."""
    kind = cluster.rank_host_kind()
    of_first, of_stage = int((kind == kind[0]).sum()), cluster.num_devices // pp
    return of_first // of_stage if of_first % of_stage == 0 else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cuts:
    """Layers of each pair, and the step time by the tables.

    Attributes:
        layers: Layers of each stage [p, k]; they do not add up to L where they do not fit.
        step_s: Time of a step without what happens once [s], [k].
    """

    layers: IntArray
    step_s: FloatArray


def _configs(
    setting: Setting,
    own: ConfigGrid,
    pairs: IntArray,
    border: int,
    hosts: tuple[int, ...],
    may_cut: bool,
    memory_headroom: float,
) -> list[tuple[float, ParallelConfig]]:
    """Return the configurations of the pairs that are fastest by their tables, with their step times by these [s]."""
    cuts = _cut(setting, own, pairs, border, may_cut, memory_headroom)
    num_layers = setting.job.model.num_layers
    found = []
    for at in np.argsort(cuts.step_s)[:MOST_PRICED].tolist():
        layers = tuple(cuts.layers[:, at].tolist())
        if not np.isfinite(cuts.step_s[at]) or 0 in layers or sum(layers) != num_layers:
            continue
        first, second = (own.config(position) for position in pairs[at].tolist())
        degrees = (first.tp,) * border + (second.tp,) * (first.pp - border)
        assignment = Assignment(layers=layers if may_cut else (), stage_tp=degrees, hosts=hosts)
        config = replace(first, assignment=assignment)
        if stage_tp_error(setting.job, config) is None:
            found.append((float(cuts.step_s[at]), config))
    return found


def _cut(
    setting: Setting, own: ConfigGrid, pairs: IntArray, border: int, may_cut: bool, memory_headroom: float
) -> _Cuts:
    """Cut the layers of all pairs, or share them equally."""
    used, place = np.unique(pairs, return_inverse=True)
    place = place.reshape(pairs.shape)
    tables = stage_tables(setting, own.take(used))
    is_first = (np.arange(tables.time_s.shape[0]) < border)[:, None, None]

    def joined(values: FloatArray) -> FloatArray:
        return np.where(is_first, values[:, :, place[:, 0]], values[:, :, place[:, 1]])

    both = StageTables(
        time_s=joined(tables.time_s),
        again_s=joined(tables.again_s),
        needed_bytes=joined(tables.needed_bytes),
        again_bytes=joined(tables.again_bytes),
        capacity_bytes=tables.capacity_bytes,
    )
    num_micro_batches = setting.job.global_batch_size // (own.dp * own.mbs)[pairs[:, 0]]
    if may_cut:
        layers = cut_layers(both, num_micro_batches, 1, 1 - memory_headroom, may_recompute=False).layers
    else:
        num_layers, pp = setting.job.model.num_layers, len(is_first)
        each = [num_layers // pp + (stage < num_layers % pp) for stage in range(pp)]
        layers = np.repeat(np.array(each)[:, None], len(pairs), axis=1)
    times_s = np.take_along_axis(both.time_s, layers[:, None], axis=1)[:, 0]
    step_s = (num_micro_batches - 1) * times_s.max(axis=0) + times_s.sum(axis=0)
    return _Cuts(layers=layers, step_s=np.where(layers.min(axis=0) > 0, step_s, np.inf))
