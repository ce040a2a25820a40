"""Subject of a study: a model of the catalog under a framework, or a step of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from costmodels.calibration.measured_runs import MeasuredGroup
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.framework_flags import FlagExporter
from trials.own_step import OwnStep, World
from tuner.own_step.plans import OwnStepPlans
from tuner.own_step.predictions import DEFAULTS, OPENED, SEARCHED
from tuner.own_step.setting import OwnSetting
from tuner.own_step.tracing import takes_micro_batches
from tuner.space.enumeration import SpaceOptions
from tuner.study_file.study_keys import OwnModelKeys, SpaceKeys, StudyKeys

_TITLES: dict[World, str] = {"jax": "JAX", "torch": "torch"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subject:
    """What a study trains, and what it searches.

    Attributes:
        setting: Job, cluster and runtime; of a user's own step an `OwnSetting`, which refuses to have the other two.
        options: Options of the search space.
        runtime: Profile of the framework; None for a user's own step.
        measured: Measured rows that a replay serves, or None.
        flag_exporters: Exporters of the frameworks whose flags are known.
        own_step: Plans of a user's own step; None for a model of the catalog.
    """

    setting: Setting
    options: SpaceOptions
    runtime: RuntimeProfile | None = None
    measured: MeasuredGroup | None = None
    flag_exporters: Mapping[str, FlagExporter] = field(default_factory=dict)
    own_step: OwnStepPlans | None = None


def own_subject(keys: StudyKeys, model: OwnModelKeys, cluster: Cluster, folder: Path) -> Subject:
    """Return a user's own step as what a study trains.

    Args:
        keys: Keys of the study.
        model: Key `model` of the study.
        cluster: Cluster of the study.
        folder: Folder of the study file.

    Raises:
        ConfigError: The step cannot be imported or traced, or a key needs a model of the catalog.
    """
    step = _step_of(model, folder)
    _check_keys(keys, step)
    planner = "descent" if keys.planner.name == "auto" else keys.planner.name
    options = _options(keys.space)
    mbs = dict(options.allowed).get("mbs", ())
    if mbs and not takes_micro_batches(step):
        raise ConfigError(
            f"needs a factory that takes micro_batches, and {step.factory} does not",
            key="space.mbs",
            value=list(mbs),
            nearest="leave it out, or let the factory make a step of `micro_batches` micro-batches",
        )
    plans = OwnStepPlans(step=step, cluster=cluster, planner=planner, mbs=mbs)
    plans.graph()  # a mistake in the user's program is told before anything else happens
    # the rest of the tuner asks such a setting for its cluster only; whatever asks for more is refused in one message
    setting = cast("Setting", OwnSetting(cluster=cluster, step=step))
    return Subject(setting=setting, options=options, own_step=plans)


def own_current(keys: StudyKeys) -> ParallelConfig | None:
    """Return the configuration in use today; `StudyConfig.space` checks that it is a candidate."""
    if keys.current is None:
        return None
    for name, value in keys.current.items():
        if name not in SEARCHED:
            raise ConfigError(
                "unknown key", key=f"current.{name}", value=value, nearest=f"valid: {', '.join(SEARCHED)}"
            )
    try:
        return ParallelConfig(**(DEFAULTS | keys.current))
    except ConfigError as error:
        raise error.under("current") from None


def describe_own(plans: OwnStepPlans) -> dict[str, Any]:
    """Return what gives a trial of a user's own step its meaning, beside its cluster and its backend, as JSON."""
    return {
        "model": {plans.step.world: plans.factory, "program": plans.fingerprint()},
        "space": {"opened": list(OPENED)},
        "planner": {"name": plans.planner},
    }


def _step_of(model: OwnModelKeys, folder: Path) -> OwnStep:
    """Return the step that a study names.

    Raises:
        ConfigError: It names none, or two.
    """
    named: dict[World, str] = {world: factory for world in get_args(World) if (factory := getattr(model, world))}
    if len(named) != 1:
        raise ConfigError(
            "must name one factory",
            key="model",
            value=dict(named) or None,
            nearest="jax: module:factory or torch: module:factory, not both",
        )
    ((world, factory),) = named.items()
    return OwnStep(world=world, factory=factory, folder=_home_of(factory, folder))


def _home_of(factory: str, folder: Path) -> str:
    """Return the folder that holds a factory's module: the study file's, or else the working directory."""
    module = factory.partition(":")[0].partition(".")[0]
    holds = module and ((folder / f"{module}.py").is_file() or (folder / module).is_dir())
    return str((folder if holds else Path()).resolve())


def _options(keys: SpaceKeys) -> SpaceOptions:
    allowed = tuple((name, tuple(sorted(values))) for name in SEARCHED if (values := getattr(keys, name)) is not None)
    return SpaceOptions(allowed=allowed, opened=OPENED, memory_headroom=keys.memory_headroom)


def _check_keys(keys: StudyKeys, step: OwnStep) -> None:
    """Check that no key asks for what only a model of the catalog has."""
    nearest = f"leave it out: {step.factory} itself says what a step computes, and on how much data"
    for key in ("job", "measured"):
        if getattr(keys, key) is not None:
            raise ConfigError("belongs to models of the catalog, not to a step of your own", key=key, nearest=nearest)
    if "runtime" in keys.model_fields_set:
        raise ConfigError(
            "belongs to models of the catalog, not to a step of your own",
            key="runtime",
            value=keys.runtime,
            nearest=f"leave it out: {_TITLES[step.world]} runs your step",
        )
    if keys.planner.pins:
        raise ConfigError(
            "cannot be given for a step of your own",
            key="planner.pins",
            nearest=f"plan_{step.world} holds them"
            if step.world == "torch"
            else "jax.lax.with_sharding_constraint in your function holds in plan_jax",
        )
    if keys.history:
        raise ConfigError("cannot inform a study of a step of your own", key="history", nearest="leave it out")
    for name in keys.space.model_fields_set - {*SEARCHED, "memory_headroom"}:
        raise ConfigError(
            "is no choice of a step of your own", key=f"space.{name}", nearest=f"valid: {', '.join(SEARCHED)}"
        )
    for name in SEARCHED:
        values = getattr(keys.space, name)
        if values is not None and (not values or len(set(values)) < len(values)):
            raise ConfigError("must list at least one value, each once", key=f"space.{name}", value=values)
    if step.world not in keys.trial.OWN_STEPS:
        raise ConfigError(
            f"does not run a step of your own in {_TITLES[step.world]}",
            key="trial.backend",
            value=keys.trial.backend,
            nearest=f"trial: {{backend: {step.world}}}, or backend: simulated",
        )
    if keys.trial.proxy is not None:
        raise ConfigError("has no smaller form of a step of your own", key="trial.proxy", nearest="leave proxy out")
