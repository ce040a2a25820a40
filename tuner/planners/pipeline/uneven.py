"""Uneven work for many configurations at once: layers per stage, micro-batches per replica, and the order of hosts.

Stages and replicas on faster devices get more work. Stages at the ends of a pipeline get fewer layers, because they
also hold the embedding or the head. A plan here is the best of a few cuts, found for thousands of candidates at once.
Branch and bound proves the best cut for a single configuration (`stage_problem`).

A cut is found by bisection. For a given time z of the slowest stage, every stage takes as many layers as it can in z.
The least z at which all layers are taken is bisected (Pinar and Aykanat 2004, Fast optimal load balancing algorithms
for 1D partitioning, section 3.3, whose probe this is). Layers that are taken beyond the model's number are returned by
the stages where they cost most.

Letters: p stages, L layers, k configurations of one pp and vpp.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import Assignment
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.pipeline.schedules import chunk_of_layer
from costmodels.step.pipeline.stage_tables import StageTables, plain_and_again, stage_tables
from costmodels.step.replicas import ReplicaKind, replica_kinds
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray, IntArray
from hardware.cluster import Cluster
from tuner.planners.engine.outcome import Limits
from tuner.planners.pipeline.stage_problem import best_stages, over_chunks, within_chunks

PARTS = ("layers", "recomputed", "micro_batches", "hosts")
"""Parts of the work that may be uneven, by the fields of `Assignment`."""

MOST_ORDERS = 6
"""Most orders of host groups that are tried; more than three groups have more orders than that."""
PROOF_NODES = 2_000
"""Nodes that branch and bound may expand for one configuration.

Nodes are limited instead of time, so that every machine finds the same stages.
"""
TABLE_NUMBERS = 4_000_000
"""Most numbers of a table that are held at once: some tens of megabytes."""
BISECTIONS = 40
"""Number of bisections; the result is precise to 1e-12 of the first interval."""
SLACKS = (1.0, 1.01, 1.03, 1.1, 1.25, 1.5, 2.0, 4.0, 1e9)
"""Multiples of the least time of the slowest stage that are tried.

With few micro-batches a longer slowest stage may pay off.
"""


def plan_uneven_work(setting: Setting, grid: ConfigGrid, parts: Sequence[str], *, memory_headroom: float) -> ConfigGrid:
    """Return every configuration with the uneven work that is predicted to be the fastest for it, or with its own [n].

    Args:
        setting: Job, cluster and runtime.
        grid: Configurations with even work [n].
        parts: Parts of the work that may be uneven, of PARTS.
        memory_headroom: Fraction of the memory that must stay free, where that is possible.
    """
    best = [grid.config(position) for position in range(len(grid))]
    variants = [ConfigGrid.from_configs(best, grid.opened)]
    for hosts in host_orders(setting.cluster) if "hosts" in parts else ((),):
        ordered = replace(setting, cluster=setting.cluster.reordered(hosts))
        found = list(best)
        if hosts:
            found = [replace(config, assignment=Assignment(hosts=hosts)) for config in best]
            variants.append(ConfigGrid.from_configs(found, grid.opened))
        if "layers" in parts:
            found = _with_layers(ordered, found, "recomputed" in parts, memory_headroom)
            variants.append(ConfigGrid.from_configs(found, grid.opened))
        if "micro_batches" in parts:
            found = _with_shares(ordered, found)
            variants.append(ConfigGrid.from_configs(found, grid.opened))
    # All variants of all configurations are predicted, and the fastest is taken for each configuration.
    seconds = np.stack([_predict_s(setting, variant, memory_headroom) for variant in variants])
    chosen = seconds.argmin(axis=0)
    return ConfigGrid.from_configs(
        [variants[number].config(position) for position, number in enumerate(chosen.tolist())], grid.opened
    )


def plan_layers(setting: Setting, grid: ConfigGrid, *, memory_headroom: float) -> tuple[ConfigGrid, FloatArray]:
    """Return every configuration with its layers cut for the stages [n], and its predicted step time [s], [n].

    A cut that is the framework's own is no plan: the configuration then stays as it is.

    Args:
        setting: Job, runtime, and a cluster of like hosts.
        grid: Configurations with even work [n].
        memory_headroom: Fraction of the memory that must stay free.
    """
    even = [grid.config(position) for position in range(len(grid))]
    cut = _with_layers(setting, even, False, memory_headroom)
    model, runtime = setting.job.model, setting.runtime
    for at, config in enumerate(cut):
        chunks = chunk_of_layer(model, runtime, config.pp, config.vpp)
        own = np.bincount(chunks, minlength=config.pp * config.vpp)
        if config.assignment.layers == tuple(own.tolist()):
            cut[at] = even[at]
    found = ConfigGrid.from_configs(cut, grid.opened)
    return found, _predict_s(setting, found, memory_headroom)


def refine_stages(setting: Setting, grid: ConfigGrid, parts: Sequence[str], *, memory_headroom: float) -> ConfigGrid:
    """Return the configurations with stages from branch and bound, where these are predicted to be faster [n].

    With unlike layers, or stages of which some recompute, a cut by the bisection need not be the best.

    Args:
        setting: Job, cluster and runtime.
        grid: Configurations with the work of `plan_uneven_work` [n].
        parts: Parts of the work that may be uneven, of PARTS.
        memory_headroom: Fraction of the memory that must stay free, where that is possible.
    """
    if "layers" not in parts:
        return grid
    found = []
    for config in (grid.config(position) for position in range(len(grid))):
        best = config
        if 1 < config.pp * config.vpp <= setting.job.model.num_layers and not config.assignment.micro_batches:
            cut, _ = best_stages(
                setting,
                config,
                memory_headroom=memory_headroom,
                may_recompute="recomputed" in parts,
                may_reorder="hosts" in parts,
                limits=Limits(nodes=PROOF_NODES),
            )
            best = cut if _is_filled(setting, cut.assignment.layers) else config
        found.append(best)
    # Branch and bound works with approximate times, so that the cost model decides between both.
    proven = ConfigGrid.from_configs(found, grid.opened)
    seconds = np.stack([_predict_s(setting, each, memory_headroom) for each in (grid, proven)])
    is_better = seconds[1] < seconds[0]
    return ConfigGrid.from_configs(
        [(proven if better else grid).config(at) for at, better in enumerate(is_better.tolist())], grid.opened
    )


def host_orders(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return orders of the hosts worth trying; () is the cluster's own order.

    Putting group after group places unlike devices on different stages. Interleaving the hosts of all groups places
    them on different replicas.
    """
    groups = cluster.groups
    ends = list(itertools.accumulate((group.hosts for group in groups), initial=0))
    hosts = [range(start, end) for start, end in itertools.pairwise(ends)]
    permutations = itertools.islice(itertools.permutations(hosts), 1, MOST_ORDERS)
    found = [tuple(itertools.chain(*order)) for order in permutations]
    if len(groups) > 1:
        # A host's place is its relative position inside its group, so that the groups interleave evenly.
        place = [
            ((at + 0.5) / len(own), number, host) for number, own in enumerate(hosts) for at, host in enumerate(own)
        ]
        found.append(tuple(host for _, _, host in sorted(place)))
    own = tuple(range(cluster.num_hosts))
    return ((), *dict.fromkeys(order for order in found if order != own))


def _predict_s(setting: Setting, grid: ConfigGrid, memory_headroom: float) -> FloatArray:
    """Predict step times [n].

    Configurations that do not fit come after all that do, the least overfull first.
    """
    memory = estimate_memory(setting, grid)
    seconds = estimate_step(setting, grid, memory=memory).step_time_s
    overfull = memory.needed_bytes / memory.capacity_bytes
    return np.where(memory.fits(memory_headroom), seconds, 1e12 * overfull)


def _with_layers(
    setting: Setting, configs: Sequence[ParallelConfig], may_recompute: bool, memory_headroom: float
) -> list[ParallelConfig]:
    """Return the configurations with their layers cut, on hosts in the order of the ranks.

    A configuration with a single stage has nothing to cut.
    """
    found = list(configs)
    in_shares = ConfigGrid.from_configs([replace(config, assignment=Assignment()) for config in configs])
    costs = plain_and_again(setting, in_shares)  # a layer costs the same in all pipelines
    for positions in _batches(configs, setting.job.model.num_layers):
        rows = np.array(positions)
        even = [in_shares.config(at) for at in positions]
        tables = stage_tables(setting, in_shares.take(rows), costs=costs.take(rows))
        micro_batches = np.array([setting.job.global_batch_size // (config.dp * config.mbs) for config in even])
        least = np.full(even[0].pp, even[0].vpp)
        if setting.runtime.may_leave_ends_empty:
            least[[0, -1]] -= 1
        cut = cut_layers(tables, micro_batches, even[0].vpp, (1 - memory_headroom), least, may_recompute=may_recompute)
        ends = _ends_in_layers(tables)
        for column, at in enumerate(positions):
            layers = over_chunks(cut.layers[:, column], even[0].vpp, (ends[0, column], ends[1, column]))
            again = cut.recomputed[:, column]
            # A cut that leaves a stage empty, or layers over, is no plan.
            if _is_filled(setting, layers) and sum(layers) == setting.job.model.num_layers:
                own = replace(
                    configs[at].assignment,
                    layers=layers,
                    recomputed=within_chunks(again, layers) if again.any() else (),
                )
                found[at] = replace(configs[at], assignment=own)
    return found


def _is_filled(setting: Setting, layers: tuple[int, ...]) -> bool:
    """Return whether each virtual stage holds a layer, except at the ends where the framework allows it."""
    return all(layers[1:-1] if setting.runtime.may_leave_ends_empty else layers)


def _ends_in_layers(tables: StageTables) -> FloatArray:
    """Return the number of layers that take as long as the embedding, and as the head [2, k]."""
    ends = tables.time_s[[0, -1]]
    each = (ends[:, -1] - ends[:, 0]) / (tables.time_s.shape[1] - 1)
    return np.asarray(ends[:, 0] / each)


def _batches(configs: Sequence[ParallelConfig], num_layers: int) -> Iterator[list[int]]:
    """Yield positions of configurations of one pp and vpp, few enough to be cut together."""
    alike: dict[tuple[int, int], list[int]] = {}
    for at, config in enumerate(configs):
        if config.pp > 1 and config.pp * config.vpp <= num_layers + 2:
            alike.setdefault((config.pp, config.vpp), []).append(at)
    for (pp, _), positions in alike.items():
        step = max(1, TABLE_NUMBERS // (pp * (num_layers + 1)))
        for start in range(0, len(positions), step):
            yield positions[start : start + step]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cut:
    """Layers of every stage.

    Attributes:
        layers: Number of layers [p, k]; they add up to less than L where not all of them fit.
        recomputed: Number of these layers that are recomputed [p, k].
    """

    layers: IntArray
    recomputed: IntArray


def cut_layers(
    tables: StageTables,
    num_micro_batches: IntArray,
    vpp: int,
    usable_share: float,
    least: IntArray,
    *,
    may_recompute: bool,
) -> Cut:
    """Cut the layers of configurations into stages.

    Args:
        tables: Time and memory of each stage for each number of layers.
        num_micro_batches: Micro-batches of each configuration [k].
        vpp: Chunks per stage of all these configurations.
        usable_share: Fraction of the memory that may be used.
        least: Least number of layers of each stage [p], so that no chunk stays empty.
        may_recompute: Whether stages may recompute layers that do not fit otherwise.
    """
    cost_s, again = _costs_s(tables, usable_share, may_recompute=may_recompute)
    num_layers = cost_s.shape[1] - 1
    # Bisect the time of the slowest stage, for all configurations at once.
    low, high = np.zeros(cost_s.shape[2]), np.where(np.isfinite(cost_s), cost_s, 0.0).max(axis=(0, 1))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = _take_layers(cost_s, middle, least).sum(axis=0) >= num_layers
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    best_s, best = np.full(len(low), np.inf), np.zeros(cost_s.shape[::2], dtype=np.int64)
    for slack in SLACKS:
        layers = _give_back(cost_s, _take_layers(cost_s, slack * high, least), num_layers, least)
        times_s = np.take_along_axis(cost_s, layers[:, None], axis=1)[:, 0]
        fits = np.isfinite(times_s).all(axis=0) & (layers.sum(axis=0) == num_layers)
        # Step time as in `stages.Pipeline.weights`: (m - 1/v) times the slowest stage, plus the sum of all over v.
        times_s = np.where(fits, times_s, 0.0)
        step_s = (num_micro_batches - 1 / vpp) * times_s.max(axis=0) + times_s.sum(axis=0) / vpp
        better = fits & (step_s < best_s)
        best_s, best = np.where(better, step_s, best_s), np.where(better, layers, best)
    return Cut(layers=best, recomputed=np.take_along_axis(again, best[:, None], axis=1)[:, 0])


def _costs_s(tables: StageTables, usable_share: float, *, may_recompute: bool) -> tuple[FloatArray, IntArray]:
    """Compute the time of each number of layers on a stage, and how many of them are recomputed [p, L + 1, k].

    No more layers are recomputed than must be. The time is inf where the layers do not fit.
    """
    usable = usable_share * tables.capacity_bytes[:, None, None]
    over = tables.needed_bytes > usable
    numbers = np.arange(tables.time_s.shape[1])[:, None]
    # The first recomputed layer saves less than the others, because a layer that runs again needs memory of its own.
    # The others are the bytes still in excess over the bytes that each of them saves, rounded up.
    saved = np.maximum(tables.first_bytes - tables.again_bytes, 0.0)
    each_saves = np.divide(saved, numbers - 1, out=np.zeros_like(saved), where=numbers > 1)
    excess = np.maximum(tables.first_bytes - usable, 0.0)
    others = np.divide(excess, each_saves, out=np.where(excess > 0, np.inf, 0.0), where=each_saves > 0)
    again = np.where(over, 1.0 + np.ceil(others), 0.0)
    # More recomputed layers than the stage has means that it does not fit.
    again = np.where(again <= (numbers if may_recompute else 0), again, np.inf)
    share = np.divide(again, numbers, out=np.where(again > 0, np.inf, 0.0), where=numbers > 0)
    fits = np.isfinite(share)
    cost_s = np.where(fits, tables.time_s + (tables.again_s - tables.time_s) * np.where(fits, share, 0.0), np.inf)
    # where a number of layers does not fit, no larger one does
    return np.maximum.accumulate(cost_s, axis=1), np.where(fits, again, 0.0).astype(np.int64)


def _take_layers(cost_s: FloatArray, limit_s: FloatArray, least: IntArray) -> IntArray:
    """Return the layers that every stage takes in a time [k], at least `least` [p] where so many fit [p, k]."""
    taken = (cost_s <= limit_s).sum(axis=1) - 1
    fits = np.isfinite(cost_s[np.arange(len(least)), least])
    return np.asarray(np.where(fits, np.maximum(taken, least[:, None]), taken))


def _give_back(cost_s: FloatArray, layers: IntArray, num_layers: int, least: IntArray) -> IntArray:
    """Return the layers without those beyond `num_layers`, each taken from the stage where it costs most [p, k]."""
    layers = layers.copy()
    columns = np.arange(layers.shape[1])
    while (too_many := layers.sum(axis=0) > num_layers).any():
        above = np.take_along_axis(cost_s, layers[:, None], axis=1)[:, 0]
        below = np.take_along_axis(cost_s, np.maximum(layers - 1, 0)[:, None], axis=1)[:, 0]
        # a number of layers that does not fit is the first to go
        saves_s = np.where(layers > least[:, None], np.where(np.isfinite(above), above, 1e30) - below, -np.inf)
        stage = saves_s.argmax(axis=0)
        too_many &= np.isfinite(saves_s[stage, columns])
        if not too_many.any():
            break
        layers[stage[too_many], columns[too_many]] -= 1
    return layers


def _with_shares(setting: Setting, configs: Sequence[ParallelConfig]) -> list[ParallelConfig]:
    """Return the configurations with micro-batches shared among unlike replicas by pace, on hosts in rank order."""
    found = list(configs)
    alike: dict[tuple[object, ...], list[tuple[int, tuple[ReplicaKind, ...]]]] = {}
    for at, config in enumerate(configs):
        even = setting.job.global_batch_size // (config.dp * config.mbs)
        kinds = replica_kinds(setting.cluster, config, np.full(config.dp, even))
        devices = tuple(kind.devices for kind in kinds)
        if len(set(devices)) > 1:
            alike.setdefault((config.pp, config.vpp, devices), []).append((at, kinds))
    for members in alike.values():
        chosen = [configs[at] for at, _ in members]
        pace_s, fill_s = _paces_s(setting, chosen, members[0][1])
        for column, (at, kinds) in enumerate(members):
            config = configs[at]
            # The interleaved schedule works in rounds of pp micro-batches.
            unit = config.pp if config.vpp > 1 else 1
            rounds = setting.job.global_batch_size // config.mbs // unit
            shares = share_micro_batches(pace_s[:, column], fill_s[:, column], kinds, rounds, unit)
            if shares is not None:
                found[at] = replace(config, assignment=replace(config.assignment, micro_batches=shares))
    return found


def _paces_s(
    setting: Setting, configs: Sequence[ParallelConfig], kinds: Sequence[ReplicaKind]
) -> tuple[FloatArray, FloatArray]:
    """Return a micro-batch's time on the slowest stage of each kind of replica, and on the others [kinds, k]."""
    layers = np.array([config.assignment.layers or _even_layers(setting.job, config) for config in configs])
    layers = layers.reshape(len(configs), configs[0].vpp, configs[0].pp).sum(axis=1).T
    grid = ConfigGrid.from_configs([replace(config, assignment=Assignment()) for config in configs])
    pace_s, fill_s = [], []
    for kind in kinds:
        # A stage of a replica may stand on several kinds of devices, of which the slowest sets its time.
        has_device = np.array(
            [[number in own for number in range(len(setting.cluster.devices))] for own in kind.devices]
        )
        times_s = stage_tables(setting, grid, has_device).time_s
        of_stage = np.take_along_axis(times_s, layers[:, None], axis=1)[:, 0]
        pace_s.append(of_stage.max(axis=0))
        fill_s.append((of_stage.sum(axis=0) - of_stage.max(axis=0)) / configs[0].vpp)
    return np.array(pace_s), np.array(fill_s)


def _even_layers(job: TrainingJob, config: ParallelConfig) -> list[int]:
    """Return the layers of every virtual stage in equal shares, which is precise enough for a pace."""
    each, more = divmod(job.model.num_layers, config.pp * config.vpp)
    return [each + (at < more) for at in range(config.pp * config.vpp)]


def share_micro_batches(
    pace_s: FloatArray, fill_s: FloatArray, kinds: Sequence[ReplicaKind], rounds: int, unit: int
) -> tuple[int, ...] | None:
    """Share micro-batches among replicas so that the last one ends as early as possible; None if one would get none.

    Args:
        pace_s: Time of one micro-batch on the slowest stage of each kind of replica [s].
        fill_s: Time of filling and emptying the pipeline of each kind [s].
        kinds: Kinds of replicas.
        rounds: Number of all micro-batches in units of `unit`.
        unit: Number of micro-batches that are shared out together.
    """
    # Every replica needs at least one round.
    counts = np.array([kind.count for kind in kinds])
    if rounds < counts.sum():
        return None

    def take_rounds(limit_s: float) -> IntArray:
        """Return the rounds that a replica of each kind ends in a time, at least one."""
        return np.maximum(((limit_s - fill_s) / (unit * pace_s)).astype(np.int64), 1)

    low, high = 0.0, 1.001 * float((rounds * unit * pace_s + fill_s).max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if counts @ take_rounds(middle) >= rounds else (middle, high)
    # Rounds beyond the total are taken back from the replicas that end last.
    number = np.zeros(counts.sum(), dtype=np.int64)
    for at, kind in enumerate(kinds):
        number[list(kind.replicas)] = at
    shares = take_rounds(high)[number]
    ends_s = (unit * pace_s)[number] * shares + fill_s[number]
    for replica in np.argsort(-ends_s, kind="stable").tolist():
        if shares.sum() > rounds and shares[replica] > 1:
            shares[replica] -= 1
    if shares.sum() != rounds:
        return None
    return tuple(int(share) * unit for share in shares)
