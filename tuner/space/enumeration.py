"""The candidate grid, and why each configuration that is not in it fell.

The rules stand in tuner/space/rules.py. The grid is enumerated in stages (the five degrees that multiply to the number
of devices, the experts' tensor degree, mbs, vpp, ep, then the opened dimensions), and every rule is applied at the
first stage where all that it needs is known, so that a space of tens of millions of raw combinations is never built.
`removed` still counts raw combinations: what a rule drops early is weighted with the combinations it stands for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np

from costmodels.job.parallel_config import (
    DEGREES,
    ENUMERATED_DIMENSIONS,
    RECOMPUTE_MODES,
    ConfigGrid,
    ParallelConfig,
    concatenate,
)
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import EVEN
from costmodels.step.memory import MemoryEstimate, estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.arrays import IntArray
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError, did_you_mean
from tuner.space.rules import DUPLICATE_RULES, LAYER_PADDING, RULE_SETS, RULES, Columns, Keep, Rule, Setting

MAX_CANDIDATES = 5_000_000
MAX_COMBINATIONS = 40_000_000
"""Rows that enumeration holds at once, a few gigabytes at most."""
MOST_PLANNED = 400
"""Configurations of a study for which uneven work is planned."""
MOST_PROVEN = 8
"""Of these, configurations whose stages branch and bound looks for."""
STAGES: tuple[tuple[str, ...], ...] = (
    ("pp", "tp", "dp", "cp", "up"),
    ("expert_tp",),
    ("mbs",),
    ("vpp",),
    ("ep",),
    ("recompute",),
    ("zero_stage",),
    ("sequence_parallel",),
    ("dp_shard",),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceOptions:
    """What a study says about its space.

    Attributes:
        rule_set: Name in RULE_SETS; None takes the runtime's.
        without: Rules switched off.
        allowed: Values that a dimension may take, where the study tightens it.
        opened: Further dimensions that the study searches.
        uneven: Parts of an assignment that are planned for every configuration, beside its even one.
        memory_headroom: Share of each device's memory that must stay free; what may keep it free is not dropped.
    """

    rule_set: str | None = None
    without: tuple[str, ...] = ()
    allowed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    opened: tuple[str, ...] = ()
    uneven: tuple[str, ...] = ()
    memory_headroom: float = 0.08


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Space:
    """The candidates of a study.

    Attributes:
        grid: Configurations that obey every rule and may fit in memory, and the current one.
        memory: Their predicted memory.
        num_before_memory: Configurations that obey every rule.
        removed: Raw combinations that each rule dropped, and configurations that memory dropped.
        warnings: What a user should know, such as rules that the current configuration breaks.
    """

    grid: ConfigGrid
    memory: MemoryEstimate
    num_before_memory: int
    removed: dict[str, int]
    warnings: tuple[str, ...]


def setting_for(job: TrainingJob, cluster: Cluster, runtime: RuntimeProfile, options: SpaceOptions) -> Setting:
    """The setting in which rules and cost model see the job: a rule set may bring its own layer padding.

    Raises:
        ConfigError: the rule set or a switched-off rule does not exist.
    """
    name = options.rule_set or runtime.rule_set
    if name not in RULE_SETS:
        raise ConfigError("is no rule set", key="space.rules", value=name, nearest=did_you_mean(name, RULE_SETS))
    for rule in options.without:
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
    """The rules in force: those of the rule set less the switched-off ones, and one for each tightened dimension."""
    name = options.rule_set or setting.runtime.rule_set
    rules = [RULES[rule] for rule in RULE_SETS[name] if rule not in options.without]
    rules = [rule for rule in rules if rule.name not in DUPLICATE_RULES or rule.needs[-1] in options.opened]
    return rules + [_tightened(dimension, values) for dimension, values in options.allowed]


def _tightened(dimension: str, values: tuple[int, ...]) -> Rule:
    shown = [_shown_value(dimension, value) for value in values]
    return Rule(
        name=f"space.{dimension}",
        needs=(dimension,),
        keep=lambda _, c: np.isin(c[dimension], values),
        reason=lambda _: f"the study allows {dimension} only {', '.join(shown)}",
    )


def _shown_value(dimension: str, value: int) -> str:
    if dimension == "recompute":
        return RECOMPUTE_MODES[value]
    return str(bool(value)).lower() if dimension == "sequence_parallel" else str(value)


OnBroken = Callable[[str, Columns, Keep, int], None]
"""Hears what a rule drops: its name, the columns known by then [n], which rows it drops [n], and the raw combinations
that each stands for."""


def unheard(rule: str, columns: Columns, broken: Keep, weight: int) -> None:
    """For callers who want the counts alone."""


def enumerate_space(
    setting: Setting, options: SpaceOptions, *, on_broken: OnBroken = unheard
) -> tuple[ConfigGrid, dict[str, int]]:
    """All configurations that obey the rules in force, and the raw combinations that each rule dropped.

    Rows come in the order of the degrees, pp slowest.

    Args:
        setting: Job, cluster and runtime.
        options: What the study says about its space.
        on_broken: Hears what each rule drops, as it does.

    Raises:
        ConfigError: more than MAX_CANDIDATES configurations remain, or more than MAX_COMBINATIONS are to be looked at.
    """
    raw = _raw_values(setting, options)
    rules = active_rules(setting, options)
    removed = dict.fromkeys((rule.name for rule in rules), 0)
    columns: dict[str, IntArray] = {}
    num_rows = 1
    for position, stage in enumerate(STAGES):
        values = raw[stage[0]] if len(stage) == 1 else _factorisations(setting.cluster.num_devices, len(stage))
        _check_size(num_rows * len(values), MAX_COMBINATIONS, "combinations to look at")
        columns = {name: np.repeat(column, len(values)) for name, column in columns.items()}
        added = np.tile(values.reshape(len(values), -1), (num_rows, 1))
        columns |= {name: added[:, i] for i, name in enumerate(stage)}
        known = set(columns)
        weight = int(np.prod([len(raw[later[0]]) for later in STAGES[position + 1 :]], dtype=np.int64))
        keep = np.ones(num_rows * len(values), dtype=np.bool_)
        for rule in rules:
            if set(rule.needs) <= known and set(rule.needs) & set(stage):
                broken = keep & ~rule.keep(setting, columns)
                removed[rule.name] += int(broken.sum()) * weight
                on_broken(rule.name, columns, broken, weight)
                keep &= ~broken
        columns = {name: column[keep] for name, column in columns.items()}
        num_rows = int(keep.sum())
    _check_size(num_rows, MAX_CANDIDATES, "configurations")
    order = np.lexsort([columns[name] for name in reversed(DEGREES + ENUMERATED_DIMENSIONS)])
    columns = {name: column[order] for name, column in columns.items()}
    sequence_parallel = columns.pop("sequence_parallel").astype(np.bool_)
    assignment = np.zeros(num_rows, dtype=np.int64)
    return ConfigGrid(
        **columns,
        sequence_parallel=sequence_parallel,
        assignment=assignment,
        assignments=(EVEN,),
        opened=options.opened,
    ), {name: count for name, count in removed.items() if count}


def _check_size(number: int, limit: int, what: str) -> None:
    if number > limit:
        raise ConfigError(
            f"has more than {limit:,} {what}; tighten a degree", key="space", nearest="for example tp: [1, 2, 4, 8]"
        )


def _raw_values(setting: Setting, options: SpaceOptions) -> dict[str, IntArray]:
    """The values of each dimension before any rule: divisors, and what the study opens."""
    job, runtime = setting.job, setting.runtime
    default_sp = runtime.sequence_parallel if job.sequence_parallel is None else job.sequence_parallel
    further = {
        "recompute": [RECOMPUTE_MODES.index(mode) for mode in runtime.recompute_modes],
        "zero_stage": list(runtime.zero_stages),
        "sequence_parallel": [0, 1],
        "expert_tp": [0, *divisors(max(job.model.expert_ffn_size, 1))],
        "dp_shard": [0, *divisors(setting.cluster.num_devices)],
    }
    fixed = {
        "recompute": [RECOMPUTE_MODES.index(job.recompute)],
        "zero_stage": [job.zero_stage],
        "sequence_parallel": [int(default_sp)],
        "expert_tp": [job.expert_tp],
        "dp_shard": [job.dp_shard],
    }
    values = {
        "mbs": divisors(job.global_batch_size),
        "vpp": divisors(setting.padded_layers),
        "ep": divisors(max(job.model.num_experts, 1)),
        **{name: further[name] if name in options.opened else fixed[name] for name in ENUMERATED_DIMENSIONS},
    }
    return {name: np.array(entries, dtype=np.int64) for name, entries in values.items()}


def impossible_values(setting: Setting, options: SpaceOptions) -> dict[str, tuple[tuple[int, ...], str, list[int]]]:
    """Values that a study allows and no configuration of its job and cluster can have, whatever the rules.

    Returns:
        By dimension, the values, the demand that they don't meet, and all values that do.
    """
    job, devices = setting.job, setting.cluster.num_devices
    experts, width = job.model.num_experts, job.model.expert_ffn_size
    sizes = {
        **dict.fromkeys(STAGES[0], (devices, f"must divide the cluster's {devices:,} devices")),
        "mbs": (job.global_batch_size, f"must divide the global batch of {job.global_batch_size:,} sequences"),
        "vpp": (setting.padded_layers, f"must divide the model's {setting.padded_layers} layers, padding included"),
        "ep": (
            max(experts, 1),
            f"must divide the model's {experts} experts" if experts else "must be 1 without experts",
        ),
        "expert_tp": (max(width, 1), f"must be 0, or divide the experts' width of {width:,}"),
        "dp_shard": (devices, f"must be 0, or divide the cluster's {devices:,} devices"),
    }
    found = {}
    for dimension, values in options.allowed:
        number, demand = sizes.get(dimension, (0, ""))
        wrong = tuple(value for value in values if number and value and (value < 0 or number % value))
        if wrong:
            found[dimension] = (wrong, demand, divisors(number))
    return found


def _unused_values(setting: Setting, options: SpaceOptions, grid: ConfigGrid) -> list[str]:
    """What the study allows and no configuration that obeys the rules has, with the reason."""
    wrong = impossible_values(setting, options)
    notes = [
        f"space.{dimension}: no configuration has {_listed(dimension, values)}: {dimension} {demand}"
        for dimension, (values, demand, _) in wrong.items()
    ]
    unused = {
        (dimension, value): Counter[str]()
        for dimension, values in options.allowed
        for value in values
        if value not in wrong.get(dimension, ((),))[0] and not (getattr(grid, dimension) == value).any()
    }
    if not unused or not len(grid):
        return notes

    def hear(rule: str, columns: Columns, broken: Keep, weight: int) -> None:
        for (dimension, value), rules in unused.items():
            if dimension in columns and rule != f"space.{dimension}":
                rules[rule] += int((broken & (columns[dimension] == value)).sum()) * weight

    enumerate_space(setting, options, on_broken=hear)
    reasons = {rule.name: rule.reason(setting) for rule in active_rules(setting, options)}
    for (dimension, value), rules in unused.items():
        most = max(rules, key=lambda rule: rules[rule])
        notes.append(
            f"space.{dimension}: no configuration has {_listed(dimension, (value,))}; "
            f"most of them fall to {most}: {reasons[most]}"
        )
    return notes


def _listed(dimension: str, values: tuple[int, ...]) -> str:
    return f"{dimension} {', '.join(_shown_value(dimension, value) for value in values)}"


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _factorisations(number: int, parts: int) -> IntArray:
    """All ordered ways [f, parts] to write `number` as a product of `parts` factors."""
    rows: list[tuple[int, ...]] = [()]
    rests = [number]
    for _ in range(parts - 1):
        extended = [(row, rest, d) for row, rest in zip(rows, rests, strict=True) for d in divisors(rest)]
        rows = [(*row, d) for row, _, d in extended]
        rests = [rest // d for _, rest, d in extended]
    return np.array([(*row, rest) for row, rest in zip(rows, rests, strict=True)], dtype=np.int64)


def with_plans(setting: Setting, options: SpaceOptions, grid: ConfigGrid) -> ConfigGrid:
    """The configurations, and after them those of which uneven work is predicted to make more.

    Where there are very many, work is planned for the MOST_PLANNED that are predicted to be the fastest with even work;
    for the MOST_PROVEN fastest of these, branch and bound looks for better stages.
    """
    from tuner.planners.pipeline.uneven import planned, refined  # noqa: PLC0415 # few studies ask for uneven work

    job, cluster, runtime = setting.job, setting.cluster, setting.runtime
    headroom, parts = options.memory_headroom, options.uneven
    chosen = np.arange(len(grid))
    if len(grid) > MOST_PLANNED:
        chosen = np.sort(np.argsort(estimate_step(job, cluster, runtime, grid).step_time_s)[:MOST_PLANNED])
    found = planned(job, cluster, runtime, grid.take(chosen), parts, memory_headroom=headroom)
    found = found.take(found.assignment > 0)
    if not len(found):
        return grid
    order = np.argsort(estimate_step(job, cluster, runtime, found).step_time_s)
    best = refined(job, cluster, runtime, found.take(order[:MOST_PROVEN]), parts, memory_headroom=headroom)
    return concatenate([grid, best, found.take(np.sort(order[MOST_PROVEN:]))])


def broken_rules(setting: Setting, options: SpaceOptions, config: ParallelConfig) -> dict[str, str]:
    """Every rule in force that `config` breaks, with its reason."""
    grid = ConfigGrid.from_configs([config], options.opened)
    columns = {name: grid.matrix([name])[:, 0] for name in DEGREES + ENUMERATED_DIMENSIONS}
    broken = {
        rule.name: rule.reason(setting)
        for rule in active_rules(setting, options)
        if not bool(np.all(rule.keep(setting, columns)))
    }
    wrong = assignment_error(setting, config)
    return broken | ({"assignment": wrong} if wrong else {})


def assignment_error(setting: Setting, config: ParallelConfig) -> str | None:
    """Why a configuration's uneven work is none of this job on this cluster; None if it is."""
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
        (
            sorted(given.hosts) not in ([], list(range(hosts))),
            f"hosts must name each of the {hosts} hosts once, from 0 on",
        ),
    )
    return next((reason for is_wrong, reason in checks if is_wrong), None)


def why_not(setting: Setting, options: SpaceOptions, config: ParallelConfig) -> dict[str, str]:
    """Everything that keeps `config` out of the space: the rules it breaks, and memory if it can be predicted."""
    reasons = broken_rules(setting, options, config)
    if launchable(setting, config):
        grid = ConfigGrid.from_configs([config], options.opened)
        memory = estimate_memory(setting.job, setting.cluster, setting.runtime, grid)
        if not _kept(setting, memory, options)[0]:
            reasons["memory"] = f"{_needed_in_words(memory, 0)}, and {options.memory_headroom:.0%} must stay free"
    return reasons


def launchable(setting: Setting, config: ParallelConfig) -> bool:
    """Whether the cost model can price the configuration: its sizes divide what they split."""
    needed = ("devices", "global_batch", "ep_within_stage", "dp_shard_within_dp")
    if assignment_error(setting, config):
        return False
    return all(RULES[name].keep(setting, _columns(config)).all() for name in needed) and (
        config.pp <= setting.padded_layers and max(setting.job.model.num_experts, 1) % config.ep == 0
    )


def _columns(config: ParallelConfig) -> Columns:
    names = (*DEGREES, "expert_tp", "dp_shard")
    return {name: np.array([getattr(config, name)], dtype=np.int64) for name in names}


def build_space(
    setting: Setting, options: SpaceOptions, *, current: ParallelConfig | None, measured: ConfigGrid | None = None
) -> Space:
    """The candidates of a study: enumerated and pruned, or exactly the `measured` ones that a replay offers.

    The current configuration is never pruned: it stays in the grid, and a warning names what it breaks.
    """
    warnings: list[str] = []
    if measured is not None:
        removed: dict[str, int] = {}
        grid = measured
        memory = estimate_memory(setting.job, setting.cluster, setting.runtime, grid)
        fitting = np.ones(len(grid), dtype=np.bool_)
    else:
        grid, removed = enumerate_space(setting, options)
        warnings += _unused_values(setting, options, grid)
        if options.uneven and len(grid):
            grid = with_plans(setting, options, grid)
        memory = estimate_memory(setting.job, setting.cluster, setting.runtime, grid)
        fitting = _kept(setting, memory, options)
    predicted, num_before_memory = grid, len(grid)
    dropped = int((~fitting).sum())
    if dropped:
        if dropped == len(grid):
            warnings.append(_closest_miss(grid, memory, options))
        removed["memory"] = dropped
        grid = grid.take(fitting)
    if current is not None and _position(grid, current) is None:
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
    if grid is not predicted:
        memory = estimate_memory(setting.job, setting.cluster, setting.runtime, grid)
    return Space(
        grid=grid,
        memory=memory,
        num_before_memory=num_before_memory,
        removed=removed,
        warnings=tuple(warnings),
    )


def _kept(setting: Setting, memory: MemoryEstimate, options: SpaceOptions) -> Keep:
    """What a study does not drop untried [n]: all that may fit, given how far the memory model is off."""
    return np.asarray(memory.may_fit(options.memory_headroom, setting.runtime.memory_error))


def _needed_in_words(memory: MemoryEstimate, position: int) -> str:
    needed, capacity = memory.needed_bytes[position] / 2**30, memory.capacity_bytes[position] / 2**30
    return f"needs {needed:.1f} GiB of {capacity:.1f} GiB"


def _closest_miss(grid: ConfigGrid, memory: MemoryEstimate, options: SpaceOptions) -> str:
    """Where nothing fits: the configuration that comes closest, and what may help."""
    closest = int(np.argmin(memory.needed_bytes / memory.capacity_bytes))
    told = (
        f"nothing fits: the closest, {grid.config(closest)}, {_needed_in_words(memory, closest)}, of which "
        f"{options.memory_headroom:.0%} must stay free"
    )
    return told if "recompute" in options.opened else f"{told}; space.recompute: [none, full] would search further"


def _position(grid: ConfigGrid, config: ParallelConfig) -> int | None:
    """Where `config` stands in the grid, by the dimensions that identify a candidate."""
    return grid.positions().get(tuple(config.values(grid.dimensions).values()))
