"""Resolve `space:` and `current:`: the dimensions that are searched, and the configuration in use today."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from costmodels.job.parallel_config import DEGREES, DIMENSIONS, ENUMERATED_DIMENSIONS, ParallelConfig, Value
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.backend import AbstractBackend, TrialAbility
from trials.trial_keys import SubjectParts
from tuner.space.dimensions import SEARCHED
from tuner.space.enumeration import SpaceOptions, active_rules, impossible_values
from tuner.space.fewer_hosts import IDLE_HOSTS, is_on_fewer
from tuner.space.rules.rule_sets import FORMER_RULES
from tuner.study_file.cost_keys import Limits
from tuner.study_file.study_keys import SpaceKeys


def find_uneven(keys: SpaceKeys, cluster: Cluster, runtime: RuntimeProfile) -> tuple[str, ...]:
    """Return the kinds of work that may be uneven: the study's, or on unlike hosts all that the runtime supports.

    A framework whose node ranks may be assigned to hosts in any order may also get fewer hosts.
    """
    supported = (*runtime.uneven, IDLE_HOSTS) if "hosts" in runtime.uneven else runtime.uneven
    if keys.assignment is None:
        return supported if cluster.is_mixed else ()
    for part in keys.assignment:
        if part not in supported:
            raise ConfigError(
                f"is not supported by the runtime {runtime.name}",
                key="space.assignment",
                value=part,
                nearest=f"valid: {', '.join(supported)}",
            )
    return tuple(dict.fromkeys(keys.assignment))


def has_gainful_layers(keys: SpaceKeys, cluster: Cluster, runtime: RuntimeProfile) -> bool:
    """Return whether unequal layers are candidates where they gain: on like hosts, if the study says nothing of them.

    A rule set of another framework knows nothing of how this one divides layers.
    """
    is_own = keys.rules in (None, runtime.rule_set)
    return keys.assignment is None and not cluster.is_mixed and "layers" in runtime.uneven and is_own


def build_options(keys: SpaceKeys, uneven: tuple[str, ...], *, gainful_layers: bool = False) -> SpaceOptions:
    """Return the options of the search space, with values in ascending order."""
    allowed: list[tuple[str, tuple[int, ...]]] = []
    opened: list[str] = []
    for name, dimension in SEARCHED.items():
        values = getattr(keys, name)
        if values is None:
            continue
        if not values or len(set(values)) < len(values):
            raise ConfigError("must list at least one value, each once", key=f"space.{name}", value=values)
        if dimension.further:
            opened.append(name)
        allowed.append((name, tuple(sorted(map(dimension.code_of, values)))))
    return SpaceOptions(
        rule_set=keys.rules,
        without=tuple(keys.without),
        allowed=tuple(allowed),
        opened=(*opened, "assignment") if uneven or gainful_layers else tuple(opened),
        uneven=uneven,
        gainful_layers=gainful_layers,
        memory_headroom=headroom_of(keys),
    )


def headroom_of(keys: SpaceKeys) -> float:
    """Return the share of memory that must stay free by prediction, before `limits:` says otherwise."""
    return SpaceOptions().memory_headroom if keys.memory_headroom is None else keys.memory_headroom


def notes_on_former_rules(options: SpaceOptions, setting: Setting | None) -> tuple[str, ...]:
    """Return a note for each rule that a study of a model switches off and that its rule set no longer has."""
    if setting is None:
        return ()
    name = options.rule_set or setting.runtime.rule_set
    return tuple(
        f"space.without: {rule} is no longer a rule of {name}; leave it out"
        for rule in options.without
        if rule in FORMER_RULES.get(name, ())
    )


def with_free_memory(
    options: SpaceOptions, keys: SpaceKeys, limits: Limits, named: Collection[str]
) -> tuple[SpaceOptions, tuple[str, ...]]:
    """Return the options with the share of memory that must stay free, and a note where it has its old name.

    Args:
        options: Options of the space.
        keys: Keys of `space:`.
        limits: Keys of `limits:`.
        named: Keys that the command line gives, which replace those of the file.

    Raises:
        ConfigError: the old key and the new one say different things.
    """
    old, share = keys.memory_headroom, limits.free_memory
    if old is not None and share not in (None, old) and "limits.free_memory" not in named:
        raise ConfigError(
            f"is the old name of limits.free_memory, which is {share:g}",
            key="space.memory_headroom",
            value=old,
            nearest="keep limits.free_memory",
        )
    options = options if share is None else replace(options, memory_headroom=share)
    if old is None:
        return options, ()
    return options, ("space.memory_headroom is now limits.free_memory, which holds for what trials measure too",)


def check_fixed_dimensions(setting: Setting, options: SpaceOptions, *, measured: bool) -> None:
    """Check that the runtime offers every value that the job fixes or the study opens."""
    if measured:
        return
    allowed = dict(options.allowed)
    rules = {rule.name for rule in active_rules(setting, options)}
    for name in ENUMERATED_DIMENSIONS:
        dimension = DIMENSIONS[name]
        fixed = getattr(setting.job, name)
        values = [dimension.value_of(code) for code in allowed[name]] if name in options.opened else [fixed]
        offered = SEARCHED[name].offered
        if f"no_{name}" in rules:
            choices: Sequence[Value] = (dimension.value_of(0),)
        elif offered is not None:
            choices = offered(setting.runtime)
        else:
            continue
        for value in values:
            if value is not None and value not in choices:  # None follows the runtime
                raise ConfigError(
                    f"is not offered by the runtime {setting.runtime.name}",
                    key=f"{'space' if name in options.opened else 'job'}.{name}",
                    value=value,
                    nearest=f"valid: {', '.join(map(str, choices))}",
                )


def check_absent_dimensions(setting: Setting, options: SpaceOptions) -> None:
    """Check that a degree that the framework lacks has 1 among its values, if `space:` names it."""
    allowed = dict(options.allowed)
    for rule in active_rules(setting, options):
        dimension = rule.name.removeprefix("no_")
        if rule.needs == (dimension,) and dimension in DEGREES and 1 not in allowed.get(dimension, (1,)):
            raise ConfigError(
                rule.reason(setting),
                key=f"space.{dimension}",
                value=list(allowed[dimension]),
                nearest=f"leave {dimension} out, or choose another runtime",
            )


def check_possible_values(setting: Setting, options: SpaceOptions) -> None:
    """Check that at least one allowed value of each degree divides the size that it splits.

    Other values become a note of the space.
    """
    allowed = dict(options.allowed)
    for dimension, (wrong, demand, valid) in impossible_values(setting, options).items():
        if set(wrong) == set(allowed[dimension]):
            raise ConfigError(
                demand, key=f"space.{dimension}", value=list(wrong), nearest=f"valid: {', '.join(map(str, valid))}"
            )


def with_told_layers(options: SpaceOptions, backend: AbstractBackend, parts: SubjectParts) -> SpaceOptions:
    """Return the options without unequal layers that the study does not ask for, where trials cannot be told them."""
    if parts.setting is None or parts.measured is not None or TrialAbility.LAYERS in backend.abilities:
        return options
    return replace(options.with_equal_layers(), equal_chunks=parts.setting.runtime.balances_stages)


def runnable_options(
    keys: SpaceKeys, options: SpaceOptions, backend: AbstractBackend, current: ParallelConfig | None, cluster: Cluster
) -> SpaceOptions:
    """Return the options without layouts on fewer hosts where trials always take all hosts.

    Raises:
        ConfigError: the study asks for layouts that its trials cannot run, or the current configuration is one.
    """
    asked = keys.assignment or ()
    if TrialAbility.IDLE_HOSTS in backend.abilities:
        return options
    if IDLE_HOSTS in asked:
        raise ConfigError(
            "needs trials that can run on some of the hosts, and those of this study take all of them",
            key="space.assignment",
            value=IDLE_HOSTS,
            nearest="trial.backend: simulated, or a command with launch: once or slurm",
        )
    if current is not None and is_on_fewer(cluster, current.assignment.hosts):
        raise ConfigError(
            f"leaves hosts idle, and trials of this study take all {cluster.num_hosts} hosts",
            key="current.assignment",
            value=str(current.assignment),
            nearest="describe the used hosts as the cluster",
        )
    return replace(options, uneven=tuple(part for part in options.uneven if part != IDLE_HOSTS))
