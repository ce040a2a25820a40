"""Enumeration of the candidate grid, with the reason for each configuration that is left out.

The rules stand in tuner/space/rules, the dimensions and their order of enumeration in tuner/space/dimensions.py. The
grid is enumerated in stages: first the five degrees that multiply to the number of devices, then one dimension after
the other. Every rule is applied at the first stage where all dimensions that it needs are known, so that a space of
tens of millions of raw combinations is never built. `removed` still counts raw combinations: a row that a rule drops
early is weighted with the combinations that it stands for.

Letters: n rows of the grid.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import (
    DEGREES,
    DIMENSIONS,
    ENUMERATED_DIMENSIONS,
    ConfigGrid,
    ParallelConfig,
    concatenate,
)
from costmodels.job.runtime import RuntimeProfile, other_runtimes
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.step.changed_layers import shape_keys
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import MemoryEstimate, estimate_memory
from costmodels.step.memory.plausible import may_fit_under_any
from costmodels.step.step_time import estimate_step
from hardware.arrays import IntArray
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError, did_you_mean
from tuner.space.dimensions import SEARCHED, STAGES, divisors
from tuner.space.fewer_hosts import (
    FARTHEST,
    IDLE_HOSTS,
    MOST_KEPT,
    MOST_PLANNED_ON_SET,
    MOST_PLANNED_SETS,
    MOST_SETS,
    at_peak_s,
    host_sets,
    on_hosts,
    setting_on_hosts,
)
from tuner.space.gainful_layers import gainful_layers
from tuner.space.rules.pipeline import CHUNKS_WITHOUT_LAYERS, EQUAL_CHUNKS
from tuner.space.rules.rule import Columns, Keep, Rule
from tuner.space.rules.rule_sets import DUPLICATE_RULES, FORMER_RULES, LAYER_PADDING, RULE_SETS, RULES, THINNING_RULES
from tuner.space.worth_planning import worth_planning

if TYPE_CHECKING:  # pins come with the planners, and few studies have any
    from tuner.planners.sharding.pins import Pin

MAX_CANDIDATES = 5_000_000
MAX_COMBINATIONS = 40_000_000
"""Most rows that enumeration holds at once, a few gigabytes."""
MOST_PLANNED = 400
"""Most configurations whose uneven work is planned for their even work; on unlike hosts half as many join them."""
MOST_PROVEN = 8
"""Most of these configurations whose stages are refined by branch and bound."""
MOST_LISTED = 20
"""Most values that a note lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceOptions:
    """Options of a study for its space.

    Attributes:
        rule_set: Name of a rule set in RULE_SETS; None takes the runtime's.
        without: Names of the rules that are switched off.
        allowed: Codes that a dimension may take, where the study tightens it.
        opened: Names of the further dimensions that the study searches.
        uneven: Parts of an assignment that are planned for every configuration, beside its even one; IDLE_HOSTS also
            looks for configurations on fewer hosts.
        gainful_layers: Whether unequal layers are planned for the leading configurations, and are candidates where they
            gain, although the study does not ask for them.
        equal_chunks: Whether trials can run several chunks per stage only if all are equal.
        memory_headroom: Share of each device's memory that must stay free; a configuration that may keep it free under
            a plausible profile, given the error of predicted memory, is not dropped.
        pins: Pins that the plans by hand of all candidates hold, where the framework shards by hand.
    """

    rule_set: str | None = None
    without: tuple[str, ...] = ()
    allowed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    opened: tuple[str, ...] = ()
    uneven: tuple[str, ...] = ()
    gainful_layers: bool = False
    equal_chunks: bool = False
    memory_headroom: float = 0.08
    pins: tuple[Pin, ...] = ()

    def with_equal_layers(self) -> SpaceOptions:
        """Return the options without unequal layers that the study does not ask for."""
        if not self.gainful_layers:
            return self
        opened = tuple(name for name in self.opened if name != "assignment")
        return replace(self, gainful_layers=False, opened=opened)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Space:
    """Candidates of a study.

    Attributes:
        grid: Configurations that obey every rule and may fit in memory, and the current one.
        memory: Predicted memory of the configurations in the grid.
        num_before_memory: Number of configurations that obey every rule.
        removed: Number of raw combinations that each rule dropped, and of configurations that memory dropped.
        warnings: Messages for the user, such as rules that the current configuration breaks.
    """

    grid: ConfigGrid
    memory: MemoryEstimate
    num_before_memory: int
    removed: dict[str, int]
    warnings: tuple[str, ...]


def setting_for(job: TrainingJob, cluster: Cluster, runtime: RuntimeProfile, options: SpaceOptions) -> Setting:
    """Return the setting that rules and cost model use; a rule set may bring its own layer padding.

    Raises:
        ConfigError: the rule set or a switched-off rule does not exist.
    """
    name = options.rule_set or runtime.rule_set
    if name not in RULE_SETS:
        raise ConfigError("is no rule set", key="space.rules", value=name, nearest=did_you_mean(name, RULE_SETS))
    for rule in options.without:
        if rule in FORMER_RULES.get(name, ()):
            continue
        if rule not in RULE_SETS[name] or rule == "devices":
            known = [known for known in RULE_SETS[name] if known != "devices"]
            raise ConfigError(
                f"is no rule of {name} that can be switched off",
                key="space.without",
                value=rule,
                nearest=did_you_mean(rule, known),
            )
    if name in LAYER_PADDING:
        runtime = replace(runtime, layer_padding=LAYER_PADDING[name], layer_split="even")
    return Setting(job=job, cluster=cluster, runtime=runtime)


def active_rules(setting: Setting, options: SpaceOptions) -> list[Rule]:
    """Return the rules in force: the rule set without switched-off rules, and one rule per tightened dimension.

    Rules that remove duplicates of a dimension are in force only where the study opens that dimension, and rules that
    thin one out only where it does not list the values. Where its values
    leave out the ZeRO stage that stands for all without replicas, none of those left would remain.
    """
    name = options.rule_set or setting.runtime.rule_set
    rules = [RULES[rule] for rule in RULE_SETS[name] if rule not in options.without]
    rules = [rule for rule in rules if rule.name not in DUPLICATE_RULES or rule.needs[-1] in options.opened]
    listed = {name for name, _ in options.allowed}
    rules = [rule for rule in rules if rule.name not in THINNING_RULES or rule.needs[-1] not in listed]
    least = min(setting.runtime.offered_stages)
    if least not in dict(options.allowed).get("zero_stage", (least,)):
        rules = [rule for rule in rules if rule.name != "zero_needs_replicas"]
    rules += [EQUAL_CHUNKS] if options.equal_chunks else []
    return rules + [_allow_only(dimension, values) for dimension, values in options.allowed]


def rule_reasons(setting: Setting, options: SpaceOptions) -> dict[str, str]:
    """Return what each active rule demands, in words, by the rule's name."""
    return {rule.name: rule.reason(setting) for rule in active_rules(setting, options)}


def _allow_only(dimension: str, values: tuple[int, ...]) -> Rule:
    shown = [SEARCHED[dimension].show(value) for value in values]
    return Rule(
        name=f"space.{dimension}",
        needs=(dimension,),
        keep=lambda _, c: np.isin(c[dimension], values),
        reason=lambda _: f"the study allows {dimension} only {', '.join(shown)}",
    )


OnBroken = Callable[[str, Columns, Keep, int], None]
"""Function that is told what a rule drops: the rule's name, the columns known by then [n], a mask of the rows that it
drops [n], and the number of raw combinations that each row stands for."""


def ignore_broken(rule: str, columns: Columns, broken: Keep, weight: int) -> None:
    """Ignore the dropped rows; the default of callers that want the counts alone."""


def enumerate_space(
    setting: Setting, options: SpaceOptions, *, on_broken: OnBroken = ignore_broken
) -> tuple[ConfigGrid, dict[str, int]]:
    """Enumerate all configurations that obey the rules in force, and count the raw combinations that each rule drops.

    Rows come in the order of the dimensions, pp slowest.

    Args:
        setting: Job, cluster and runtime of the study.
        options: Options of the study for its space.
        on_broken: Function that is called with the rows that a rule drops, each time it drops some.

    Raises:
        ConfigError: more than MAX_CANDIDATES configurations remain, or more than MAX_COMBINATIONS must be looked at.
    """
    raw = _raw_values(setting, options)
    rules = active_rules(setting, options)
    removed = dict.fromkeys((rule.name for rule in rules), 0)
    columns: dict[str, IntArray] = {}
    num_rows = 1  # the empty combination, which the first stage extends
    for position, stage in enumerate(STAGES):
        values = raw[stage[0]] if len(stage) == 1 else _factorisations(setting.cluster.num_devices, len(stage))
        _check_size(num_rows * len(values), MAX_COMBINATIONS, "combinations to look at")
        # every row known so far meets every value of this stage
        columns = {name: np.repeat(column, len(values)) for name, column in columns.items()}
        added = np.tile(values.reshape(len(values), -1), (num_rows, 1))
        columns |= {name: added[:, i] for i, name in enumerate(stage)}
        known = set(columns)
        # a row stands for all raw values of the stages to come
        weight = int(np.prod([len(raw[later[0]]) for later in STAGES[position + 1 :]], dtype=np.int64))
        keep = np.ones(num_rows * len(values), dtype=np.bool_)
        for rule in rules:
            # a rule is due at the first stage that completes what it needs; a row counts for the first rule it breaks
            if set(rule.needs) <= known and set(rule.needs) & set(stage):
                broken = keep & ~rule.keep(setting, columns)
                removed[rule.name] += int(broken.sum()) * weight
                on_broken(rule.name, columns, broken, weight)
                keep &= ~broken
        columns = {name: column[keep] for name, column in columns.items()}
        num_rows = int(keep.sum())
    _check_size(num_rows, MAX_CANDIDATES, "configurations")
    # lexsort takes the slowest key last
    order = np.lexsort([columns[name] for name in reversed(DEGREES + ENUMERATED_DIMENSIONS)])
    columns = {name: column[order] for name, column in columns.items()}
    grid = ConfigGrid.from_codes(columns, opened=options.opened)
    return grid, {name: count for name, count in removed.items() if count}


def _check_size(number: int, limit: int, what: str) -> None:
    if number > limit:
        raise ConfigError(
            f"has more than {limit:,} {what}; tighten a degree", key="space", nearest="for example tp: [1, 2, 4, 8]"
        )


def _raw_values(setting: Setting, options: SpaceOptions) -> dict[str, IntArray]:
    """Return the values of each dimension before any rule; the job fixes those that the study does not open."""
    fixed = setting.job.fixed_values(sequence_parallel=setting.runtime.sequence_parallel)
    rules = {rule.name for rule in active_rules(setting, options)}
    raw = {}
    for name, dimension in SEARCHED.items():
        is_fixed = name in fixed and name not in options.opened
        codes = [dimension.code_of(fixed[name])] if is_fixed else dimension.codes(setting, rules)
        raw[name] = np.array(codes, dtype=np.int64)
    return raw


def impossible_values(setting: Setting, options: SpaceOptions) -> dict[str, tuple[tuple[int, ...], str, list[int]]]:
    """Return the allowed values that no configuration of the job and cluster can have, whatever the rules.

    Returns:
        By dimension, the values, the demand that they don't meet, and all values that do.
    """
    found = {}
    rules = {rule.name for rule in active_rules(setting, options)}
    for name, values in options.allowed:
        dimension = SEARCHED[name]
        if dimension.possible is None:
            continue
        possible = dimension.possible(setting, rules)
        # 0 stands for the value of another dimension, which may be any
        wrong = tuple(value for value in values if value and value not in possible.values)
        if wrong:
            found[name] = (wrong, possible.demand, list(possible.values))
    return found


def _unused_values(setting: Setting, options: SpaceOptions, grid: ConfigGrid) -> list[str]:
    """Return a note for each allowed value that no configuration has once all rules are applied, with the reason."""
    wrong = impossible_values(setting, options)
    notes = [
        f"space.{dimension}: no configuration has {_list_values(dimension, values)}: {dimension} {demand}"
        for dimension, (values, demand, _) in wrong.items()
    ]
    absent = {
        dimension: set(values)
        - set(wrong[dimension][0] if dimension in wrong else ())
        - {*getattr(grid, dimension).tolist()}
        for dimension, values in options.allowed
    }
    unused = {
        (dimension, value): Counter[str]()
        for dimension, values in options.allowed
        for value in values
        if value in absent[dimension]
    }
    # without any configuration, every value would get a note
    if not unused or not len(grid):
        return notes

    def hear(rule: str, columns: Columns, broken: Keep, weight: int) -> None:
        for (dimension, value), rules in unused.items():
            if dimension in columns and rule != f"space.{dimension}":
                rules[rule] += int((broken & (columns[dimension] == value)).sum()) * weight

    # a second enumeration counts, for these values alone, which rule takes most of their combinations away
    enumerate_space(setting, options, on_broken=hear)
    reasons = {rule.name: rule.reason(setting) for rule in active_rules(setting, options)}
    for (dimension, value), rules in unused.items():
        most = max(rules, key=lambda rule: rules[rule])
        notes.append(
            f"space.{dimension}: no configuration has {_list_values(dimension, (value,))}; "
            f"most of them fall to {most}: {reasons[most]}"
        )
    return notes


def _list_values(dimension: str, values: tuple[int, ...]) -> str:
    listed = ", ".join(SEARCHED[dimension].show(value) for value in values[:MOST_LISTED])
    more = len(values) - MOST_LISTED
    return f"{dimension} {listed}{f' and {more:,} more' if more > 0 else ''}"


def _factorisations(number: int, parts: int) -> IntArray:
    """Return all ordered ways [f, parts] to write `number` as a product of `parts` factors."""
    # each part divides what the parts before it leave; the last part is the rest
    rows: list[tuple[int, ...]] = [()]
    rests = [number]
    for _ in range(parts - 1):
        extended = [(row, rest, d) for row, rest in zip(rows, rests, strict=True) for d in divisors(rest)]
        rows = [(*row, d) for row, _, d in extended]
        rests = [rest // d for _, rest, d in extended]
    return np.array([(*row, rest) for row, rest in zip(rows, rests, strict=True)], dtype=np.int64)


def with_plans(setting: Setting, options: SpaceOptions, grid: ConfigGrid) -> ConfigGrid:
    """Append the planned configurations whose uneven work is predicted to be faster than their even work.

    Of very many configurations, only some are planned (`worth_planning`). Branch and bound then looks for better stages
    of the MOST_PROVEN fastest plans.
    """
    from tuner.planners.pipeline.uneven import plan_uneven_work, refine_stages  # noqa: PLC0415 # few studies ask for uneven work

    headroom, parts = options.memory_headroom, options.uneven
    if not parts:
        return grid
    chosen = worth_planning(setting, grid, MOST_PLANNED, memory_headroom=headroom)
    found = plan_uneven_work(setting, grid.take(chosen), parts, memory_headroom=headroom)
    found = found.take(found.assignment > 0)  # nothing is gained in the others
    if not len(found):
        return grid
    order = np.argsort(estimate_step(setting, found).step_time_s)
    best = refine_stages(setting, found.take(order[:MOST_PROVEN]), parts, memory_headroom=headroom)
    return concatenate([grid, best, found.take(np.sort(order[MOST_PROVEN:]))])


def with_fewer_hosts(setting: Setting, options: SpaceOptions, grid: ConfigGrid) -> ConfigGrid:
    """Append the configurations that leave hosts idle and are predicted to be about as fast as the best one, or faster.

    Args:
        setting: Job, cluster and runtime.
        options: Options of the study for its space, without IDLE_HOSTS.
        grid: Candidates on all hosts; there may be none.
    """
    best_s = float(_fastest(setting, options, grid, 1)[1].min(initial=math.inf))
    found: list[tuple[float, tuple[int, ...], Setting, ConfigGrid]] = []
    for hosts in host_sets(setting)[:MOST_SETS]:
        part = replace(setting, cluster=setting.cluster.reordered(hosts))
        if at_peak_s(part) < best_s:
            own, seconds = _fastest(part, options, enumerate_space(part, options)[0], MOST_PLANNED_ON_SET)
            if len(own):
                found.append((float(seconds[0]), hosts, part, own))
    found.sort(key=lambda one: one[0])
    planned = [
        on_hosts(with_plans(part, options, own) if number < MOST_PLANNED_SETS else own, hosts)
        for number, (_, hosts, part, own) in enumerate(found)
    ]
    if not planned:
        return grid
    fewer, seconds = _fastest(setting, options, concatenate(planned), MOST_KEPT)
    return concatenate([grid, fewer.take(seconds < FARTHEST * best_s)])


def _fastest(
    setting: Setting, options: SpaceOptions, grid: ConfigGrid, most: int
) -> tuple[ConfigGrid, NDArray[np.float64]]:
    """Return the configurations that fit and are predicted to be the fastest, with their step times [s], in order."""
    memory = estimate_memory(setting, grid)
    at = np.flatnonzero(memory.fits(options.memory_headroom))
    seconds = estimate_step(setting, grid.take(at), memory=memory.take(at)).step_time_s
    order = np.argsort(seconds, kind="stable")[:most]
    return grid.take(at[order]), seconds[order]


def with_planned_layers(setting: Setting, grid: ConfigGrid) -> ConfigGrid:
    """Append the configurations whose layers can be sharded otherwise than by hand, once for each such plan.

    The plans are those of the runtime's changes of layers. The grid has the plans by hand.
    """
    changes = setting.runtime.layer_changes
    if "plan" not in grid.opened or not changes or not len(grid):
        return grid
    at: dict[tuple[int, ...], list[int]] = {}
    for position, shape in enumerate(shape_keys(grid)):
        at.setdefault(shape, []).append(position)
    code_of = DIMENSIONS["plan"].code_of
    found = [(at[change.shape], code_of(change.plan)) for change in changes if change.shape in at]
    appended = [
        replace(grid.take(np.array(positions)), plan=np.full(len(positions), code)) for positions, code in found
    ]
    return concatenate([grid, *appended])


def broken_rules(setting: Setting, options: SpaceOptions, config: ParallelConfig) -> dict[str, str]:
    """Return every rule in force that `config` breaks, with its reason."""
    columns, there = _columns(config), setting_on_hosts(setting, config)
    broken = {
        rule.name: rule.reason(there)
        for rule in active_rules(setting, options)
        if not bool(np.all(rule.keep(there, columns)))
    }
    wrong = assignment_error(setting, config)
    return broken | ({"assignment": wrong} if wrong else {})


def assignment_error(setting: Setting, config: ParallelConfig) -> str | None:
    """Explain why a configuration's uneven work does not belong to this job and cluster; None if it does."""
    given, job, hosts = config.assignment, setting.job, setting.cluster.num_hosts
    num_virtual, rounds = config.pp * config.vpp, job.global_batch_size // config.mbs
    layers = given.layers or repeat(job.model.num_layers)
    checks = (
        (len(given.layers) not in (0, num_virtual), f"layers must name {num_virtual} numbers, one per virtual stage"),
        (
            given.layers and sum(given.layers) != job.model.num_layers,
            f"layers must add up to the model's {job.model.num_layers}, but give {sum(given.layers)}",
        ),
        (
            len(given.recomputed) not in (0, num_virtual),
            f"recomputed must name {num_virtual} numbers, one per virtual stage",
        ),
        (
            any(again > held for again, held in zip(given.recomputed, layers, strict=False)),
            "recomputed must not exceed the layers of a virtual stage",
        ),
        (
            len(given.micro_batches) not in (0, config.dp),
            f"micro_batches must name {config.dp} numbers, one per replica",
        ),
        (
            given.micro_batches and sum(given.micro_batches) != rounds,
            f"micro_batches must add up to the step's {rounds}, but give {sum(given.micro_batches)}",
        ),
        (any(host >= hosts for host in given.hosts), f"hosts must name some of the {hosts} hosts, from 0 on"),
    )
    return next((reason for is_wrong, reason in checks if is_wrong), None)


def why_not(setting: Setting, options: SpaceOptions, config: ParallelConfig) -> dict[str, str]:
    """Return the reasons that keep `config` out of the space: broken rules, and memory where it can be predicted."""
    reasons = broken_rules(setting, options, config)
    if launchable(setting, config):
        grid = ConfigGrid.from_configs([config], options.opened)
        memory = estimate_memory(setting, grid)
        if not _may_fit(setting, grid, memory, options)[0]:
            need = _describe_need(setting, grid, memory, 0)
            reasons["memory"] = f"{need}, and {options.memory_headroom:.0%} must stay free"
    return reasons


def launchable(setting: Setting, config: ParallelConfig) -> bool:
    """Check whether the cost model can price the configuration, that is, whether its degrees divide what they split."""
    needed = ("devices", "global_batch", "ep_within_stage", "dp_shard_within_dp")
    if assignment_error(setting, config):
        return False
    columns, there = _columns(config), setting_on_hosts(setting, config)
    return all(RULES[name].keep(there, columns).all() for name in needed) and (
        config.pp <= setting.padded_layers + CHUNKS_WITHOUT_LAYERS
        and max(setting.job.model.num_experts, 1) % config.ep == 0
    )


def _columns(config: ParallelConfig) -> Columns:
    """Return the codes of a configuration, one row."""
    return {
        name: np.array([dimension.code_of(getattr(config, name))], dtype=np.int64)
        for name, dimension in SEARCHED.items()
    }


def build_space(
    setting: Setting, options: SpaceOptions, *, current: ParallelConfig | None, measured: ConfigGrid | None = None
) -> Space:
    """Build the candidates of a study: enumerated and pruned, or exactly the `measured` ones that a replay offers.

    The current configuration is never pruned. It stays in the grid, and a warning names the rules that it breaks.
    """
    warnings: list[str] = []
    if measured is not None:
        removed: dict[str, int] = {}
        grid = measured
        memory = estimate_memory(setting, grid)
        fitting = np.ones(len(grid), dtype=np.bool_)
    else:
        grid, removed = enumerate_space(setting, options)
        warnings += _unused_values(setting, options, grid)
        on_all = replace(options, uneven=tuple(part for part in options.uneven if part != IDLE_HOSTS))
        # Stages and recomputation are chosen for layers as they are sharded, by what these take and keep.
        grid = with_planned_layers(setting, grid)
        if on_all.uneven and len(grid):
            grid = with_plans(setting, on_all, grid)
        if IDLE_HOSTS in options.uneven:
            fewer = with_fewer_hosts(setting, on_all, grid)
            fewer = with_planned_layers(setting, fewer.take(np.arange(len(grid), len(fewer))))
            grid = concatenate([grid, fewer])
        memory = estimate_memory(setting, grid)
        if options.gainful_layers:
            found = gainful_layers(setting, grid, memory, memory_headroom=options.memory_headroom)
            grid, memory = concatenate([grid, found]), memory.joined(estimate_memory(setting, found))
        fitting = _may_fit(setting, grid, memory, options)
    num_before_memory = len(grid)
    dropped = int((~fitting).sum())
    if dropped:
        if dropped == len(grid):
            warnings.append(_describe_closest(setting, grid, memory, options))
        removed["memory"] = dropped
        grid, memory = grid.take(fitting), memory.take(np.flatnonzero(fitting))
    if current is not None and _find_position(grid, current) is None:
        if measured is not None:
            raise ConfigError(
                "is not among the measured rows, so it cannot be replayed", key="current", value=str(current)
            )
        reasons = why_not(setting, options, current)
        warnings.append(
            f"the current configuration {current} stays in the space although it breaks: "
            + "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
        )
        grid = concatenate([grid, ConfigGrid.from_configs([current], grid.opened)])
        memory = estimate_memory(setting, grid)
    return Space(
        grid=grid, memory=memory, num_before_memory=num_before_memory, removed=removed, warnings=tuple(warnings)
    )


def _doubted_by(setting: Setting) -> tuple[RuntimeProfile, ...]:
    """Return the other profiles whose prediction of memory may be right instead; the search weighs them by its trials.

    There are none where the study's own profile was fitted to peaks of the user's cluster.
    """
    return () if setting.runtime.knows_memory else other_runtimes(setting.runtime)


def _may_fit(setting: Setting, grid: ConfigGrid, memory: MemoryEstimate, options: SpaceOptions) -> Keep:
    """Return a mask [n] of the configurations that may fit under any plausible profile, given each one's error."""
    fitting = memory.may_fit(options.memory_headroom, memory_error_of(setting.runtime))
    left, doubted_by = np.flatnonzero(~fitting), _doubted_by(setting)
    if len(left) and doubted_by:
        fitting[left] = may_fit_under_any(setting, doubted_by, grid.take(left), options.memory_headroom)
    return fitting


def _describe_need(setting: Setting, grid: ConfigGrid, memory: MemoryEstimate, position: int) -> str:
    """Describe what a configuration needs under the study's profile, and under the leanest one if it needs less."""
    needed_bytes, capacity_bytes = float(memory.needed_bytes[position]), float(memory.capacity_bytes[position])
    told = f"needs {needed_bytes / 2**30:.1f} GiB of {capacity_bytes / 2**30:.1f} GiB"
    config = grid.take(np.array([position]))
    elsewhere = {
        profile.name: float(estimate_memory(setting.predicted_by(profile), config).needed_bytes[0])
        for profile in _doubted_by(setting)
    }
    leanest = min(elsewhere, key=lambda name: elsewhere[name], default=None)
    if leanest is None or elsewhere[leanest] >= needed_bytes:
        return told
    return f"{told} ({elsewhere[leanest] / 2**30:.1f} GiB as the profile {leanest} predicts)"


def _describe_closest(setting: Setting, grid: ConfigGrid, memory: MemoryEstimate, options: SpaceOptions) -> str:
    """Describe the configuration that comes closest to fitting, where nothing fits."""
    # devices of unlike hosts differ in their memory, so shares are compared
    closest = int(np.argmin(memory.needed_bytes / memory.capacity_bytes))
    need = _describe_need(setting, grid, memory, closest)
    return (
        f"nothing fits: the closest, {grid.config(closest)}, {need}, of which {options.memory_headroom:.0%} must stay "
        "free"
    )


def _find_position(grid: ConfigGrid, config: ParallelConfig) -> int | None:
    """Return the position of `config` in the grid, by the dimensions that identify a candidate; None without it."""
    return grid.positions().get(tuple(config.values(grid.dimensions).values()))
