"""Resolve `space:` and `current:`: the dimensions that are searched, and the configuration in use today."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.job.parallel_config import (
    DEGREES,
    ENUMERATED_DIMENSIONS,
    FURTHER_DIMENSIONS,
    RECOMPUTE_MODES,
    ParallelConfig,
    Value,
)
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from tuner.space.enumeration import SpaceOptions, active_rules, broken_rules, impossible_values, launchable
from tuner.study_file.study_keys import SpaceKeys, StudyKeys


def find_uneven(keys: SpaceKeys, cluster: Cluster, runtime: RuntimeProfile) -> tuple[str, ...]:
    """Return the kinds of work that may be uneven: the study's, or on unlike hosts all that the runtime supports."""
    if keys.assignment is None:
        return runtime.uneven if cluster.is_mixed else ()
    for part in keys.assignment:
        if part not in runtime.uneven:
            raise ConfigError(
                f"is not supported by the runtime {runtime.name}",
                key="space.assignment",
                value=part,
                nearest=f"valid: {', '.join(runtime.uneven)}",
            )
    return tuple(dict.fromkeys(keys.assignment))


def build_options(keys: SpaceKeys, uneven: tuple[str, ...]) -> SpaceOptions:
    """Return the options of the search space, with values in ascending order."""
    allowed: list[tuple[str, tuple[int, ...]]] = []
    opened: list[str] = []
    for name in DEGREES + ENUMERATED_DIMENSIONS:
        values = getattr(keys, name)
        if values is None:
            continue
        if not values or len(set(values)) < len(values):
            raise ConfigError("must list at least one value, each once", key=f"space.{name}", value=values)
        if name in ENUMERATED_DIMENSIONS:
            opened.append(name)
        codes = [RECOMPUTE_MODES.index(value) if name == "recompute" else int(value) for value in values]
        allowed.append((name, tuple(sorted(codes))))
    return SpaceOptions(
        rule_set=keys.rules,
        without=tuple(keys.without),
        allowed=tuple(allowed),
        opened=(*opened, "assignment") if uneven else tuple(opened),
        uneven=uneven,
        memory_headroom=keys.memory_headroom,
    )


def check_fixed_dimensions(setting: Setting, options: SpaceOptions, *, measured: bool) -> None:
    """Check that the runtime offers every value that the job fixes or the study opens."""
    job, runtime = setting.job, setting.runtime
    if measured:
        return
    opened = dict(options.allowed)
    modes = [RECOMPUTE_MODES[code] for code in opened.get("recompute", ())] or [job.recompute]
    stages = list(opened.get("zero_stage", ())) or [job.zero_stage]
    splits = [bool(code) for code in opened.get("sequence_parallel", ())] or [bool(job.sequence_parallel)]
    rules = {rule.name for rule in active_rules(setting, options)}
    checks: list[tuple[str, Sequence[Value], Sequence[Value]]] = [
        ("recompute", modes, runtime.recompute_modes),
        ("zero_stage", stages, runtime.zero_stages),
        ("sequence_parallel", splits, (False,) if "no_sequence_parallel" in rules else (False, True)),
    ]
    checks += [
        (name, opened.get(name, ()) or [getattr(job, name)], (0,))
        for name in ("expert_tp", "dp_shard")
        if f"no_{name}" in rules
    ]
    for key, values, offered in checks:
        where = "space" if key in options.opened else "job"
        for value in values:
            if value not in offered:
                raise ConfigError(
                    f"is not offered by the runtime {runtime.name}",
                    key=f"{where}.{key}",
                    value=value,
                    nearest=f"valid: {', '.join(map(str, offered))}",
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
                demand,
                key=f"space.{dimension}",
                value=list(wrong),
                nearest=f"valid: {', '.join(map(str, valid))}",
            )


def further_defaults(job: TrainingJob, runtime: RuntimeProfile) -> dict[str, Value]:
    """Return the values of the further dimensions that the job and the runtime fix, by name."""
    default_sp = runtime.sequence_parallel if job.sequence_parallel is None else job.sequence_parallel
    fixed = {name: getattr(job, name) for name in ("recompute", "zero_stage", "expert_tp", "dp_shard")}
    return fixed | {"sequence_parallel": default_sp, "assignment": ""}


def find_current(keys: StudyKeys, setting: Setting, options: SpaceOptions) -> ParallelConfig | None:
    """Return the configuration in use today, checked against the study; None if the study names none."""
    if keys.current is None:
        return None
    known = DEGREES + FURTHER_DIMENSIONS
    for name, value in keys.current.items():
        if name not in known:
            raise ConfigError("unknown key", key=f"current.{name}", value=value, nearest=f"valid: {', '.join(known)}")
    fixed = further_defaults(setting.job, setting.runtime)
    try:
        config = ParallelConfig(**(fixed | keys.current))
    except ConfigError as error:
        raise error.under("current") from None
    for name, value in keys.current.items():
        if name in FURTHER_DIMENSIONS and name not in options.opened and value != fixed[name]:
            raise ConfigError(
                f"the study fixes {name} to {fixed[name]}",
                key=f"current.{name}",
                value=value,
                nearest=f"leave it out, change job.{name}, or search it with space.{name}",
            )
    if not launchable(setting, config):
        reasons = broken_rules(setting, options, config)
        raise ConfigError(
            "cannot be launched: " + "; ".join(reasons.values()), key="current", value=str(config), nearest=None
        )
    return config
