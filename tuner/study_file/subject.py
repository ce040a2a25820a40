"""Choice of a study's subject by the keys of its file, with the options of its search space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from costmodels.calibration.measured_runs import MeasuredGroup
from costmodels.job.facts import parse_facts, with_facts
from costmodels.job.model_catalog import load_model, trace_model_file
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import DIMENSIONS, ParallelConfig
from costmodels.job.runtime import LAYOUT_RULE_SETS, RuntimeProfile, find_runtime, read_profile
from costmodels.job.sequences import check_rows
from costmodels.job.setting import Setting
from costmodels.job.tower import TowerWork
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from trials.framework_flags import FlagExporter
from trials.own_step import OwnStep, World
from trials.trial_keys import SubjectParts
from tuner.own_step.plans import OwnStepPlans
from tuner.own_step.predictions import OPENED, SEARCHED
from tuner.own_step.tracing import takes_micro_batches
from tuner.plans.layer_planning import AUTO_PLANNER, LayerPlanning
from tuner.space.enumeration import SpaceOptions, setting_for
from tuner.study_file.key_errors import under
from tuner.study_file.known_knobs import KnobCatalog, facts_of_today
from tuner.study_file.sequence_keys import read_sequences, rows_of_step
from tuner.study_file.space_options import (
    build_options,
    check_absent_dimensions,
    check_fixed_dimensions,
    check_possible_values,
    find_uneven,
    has_gainful_layers,
    headroom_of,
)
from tuner.study_file.study_keys import JobKeys, OwnModelKeys, PlannerKeys, SpaceKeys, StudyKeys, TracedModelKeys
from tuner.study_file.tower_keys import read_towers
from tuner.subject.catalog import CatalogSubject
from tuner.subject.contract import AbstractSubject
from tuner.subject.own_step import OwnStepSubject
from tuner.subject.replay import ReplaySubject

_TITLES: dict[World, str] = {"jax": "JAX", "torch": "torch"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chosen:
    """Subject of a study, with what its trials are built from.

    Attributes:
        subject: Subject.
        options: Options of the search space.
        parts: Parts of the study that its backend is built from; without name, storage, folder, cluster and knobs.
        planning: Planner of layers that the study asks for.
        catalog: Catalog of the framework's knobs; None for a step of the user's own.
    """

    subject: AbstractSubject
    options: SpaceOptions
    parts: SubjectParts
    planning: LayerPlanning = field(default_factory=LayerPlanning)
    catalog: KnobCatalog | None = None


def choose_subject(keys: StudyKeys, cluster: Cluster, folder: Path) -> Chosen:
    """Return the subject that the keys of a study name.

    Args:
        keys: Keys of the study.
        cluster: Cluster of the study.
        folder: Folder of the study file.

    Raises:
        ConfigError: The subject cannot be read, or a key contradicts another.
    """
    if isinstance(keys.model, OwnModelKeys):
        return _choose_own_step(keys, keys.model, cluster, folder)
    return _choose_model(keys, cluster, folder)


def _choose_own_step(keys: StudyKeys, model: OwnModelKeys, cluster: Cluster, folder: Path) -> Chosen:
    """Return a step of the user's own, which can be imported and traced."""
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
    parts = SubjectParts(own_step=plans)
    return Chosen(subject=OwnStepSubject(cluster=cluster, plans=plans), options=options, parts=parts)


def _flag_exporters(setting: Setting, current: ParallelConfig | None) -> Mapping[str, FlagExporter]:
    """Return the exporters of all frameworks that take flags, for trials that run the user's command."""
    from tuner.study_file.exported_flags import flag_exporters  # noqa: PLC0415 # it loads importers and exporters

    return flag_exporters(setting, current)


def _choose_model(keys: StudyKeys, cluster: Cluster, base_dir: Path) -> Chosen:
    """Return a model of the catalog, or the rows of one that trials replay."""
    profile = under("runtime", lambda: _runtime(keys.runtime, base_dir))
    of_knobs = facts_of_today(keys.space.knobs, profile.rule_set, keys.trial.framework())
    runtime = with_facts(with_facts(profile, parse_facts(keys.facts)), of_knobs)
    _check_sharding(runtime)
    group = under("trial", lambda: keys.trial.measured_runs(base_dir))
    job = _job(keys, base_dir, group, runtime)
    for device in cluster.devices:
        under("job", lambda device=device: device.peak_flop_per_s(job.precision))
    uneven = find_uneven(keys.space, cluster, runtime) if group is None else ()
    gainful = group is None and has_gainful_layers(keys.space, cluster, runtime)
    options = build_options(keys.space, uneven, gainful_layers=gainful)
    setting = setting_for(job, cluster, runtime, options)
    if group is not None and group.devices != cluster.num_devices:
        raise ConfigError(
            f"the measured rows ran on {group.devices} devices, and the cluster has {cluster.num_devices}",
            key="cluster",
            value=keys.cluster,
            nearest="change the cluster's hosts or trial.where",
        )
    check_fixed_dimensions(setting, options, measured=group is not None)
    check_absent_dimensions(setting, options)
    if group is None:
        check_possible_values(setting, options)
    subject = CatalogSubject(trained=setting) if group is None else ReplaySubject(predicted=setting, group=group)
    current = subject.current(keys.current, options)
    return Chosen(
        subject=subject,
        options=options,
        parts=SubjectParts(setting=setting, measured=group, flag_exporters=partial(_flag_exporters, setting, current)),
        catalog=KnobCatalog(
            setting=setting,
            options=options,
            framework=keys.trial.framework(),
            files=tuple(keys.trial.config_files()),
            words=tuple(keys.trial.own_words()),
        ),
        planning=_planning(keys.planner),
    )


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
    return SpaceOptions(allowed=allowed, opened=OPENED, memory_headroom=headroom_of(keys))


def _check_keys(keys: StudyKeys, step: OwnStep) -> None:
    """Check that no key asks for what only a model of the catalog has."""
    nearest = f"leave it out: {step.factory} itself says what a step computes, and on how much data"
    for key in ("job", "measured", "facts"):
        if getattr(keys, key):
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


def _planning(keys: PlannerKeys) -> LayerPlanning:
    """Return the planner of layers for trials that run plans."""
    name = AUTO_PLANNER if keys.name == "auto" else keys.name
    if not keys.pins:
        return LayerPlanning(name=name, is_auto=keys.name == "auto")
    # pins come with the planners, and few studies have any
    from tuner.planners.sharding.pins import Pin  # noqa: PLC0415

    return LayerPlanning(name=name, pins=tuple(Pin(**pin.model_dump()) for pin in keys.pins))


def _runtime(name: str, base_dir: Path) -> RuntimeProfile:
    is_file = name.endswith((".yaml", ".yml")) or "/" in name
    return read_profile(base_dir / name) if is_file else find_runtime(name)


def _job(keys: StudyKeys, base_dir: Path, group: MeasuredGroup | None, runtime: RuntimeProfile) -> TrainingJob:
    """Return the job of the keys or, in a replay, of the measured rows."""
    if group is not None:
        for key in ("model", "job"):
            if getattr(keys, key) is not None:
                raise ConfigError(
                    "a replayed study takes its model and job from the measured rows",
                    key=key,
                    value=getattr(keys, key) if key == "model" else None,
                    nearest=f"leave {key} out",
                )
        first = group.runs[0].config
        return TrainingJob(
            model=group.model,
            sequence_length=group.sequence_length,
            global_batch_size=group.global_batch_size,
            precision=group.precision,
            recompute_modules=group.runs[0].recompute_modules,
            **(first.values(DIMENSIONS) | {"sequence_parallel": None}),  # type: ignore[arg-type] # TrainingJob checks types
        )
    for key in ("model", "job"):
        if getattr(keys, key) is None:
            raise ConfigError("is required and missing", key=key)
    assert isinstance(keys.model, str | TracedModelKeys), "checked above"
    assert keys.job is not None, "checked above"
    model = _load(keys.model, base_dir, {} if keys.job.towers is None else read_towers(keys.job.towers))
    values = keys.job.model_dump(exclude={"towers"})
    if values["zero_stage"] is None:
        sharded = [stage for stage in runtime.offered_stages if stage]
        values["zero_stage"] = 1 if 1 in sharded else max(sharded) if runtime.torch_fsdp2 else min(sharded, default=0)
    if values["expert_tp"] is None:
        values["expert_tp"] = int(runtime.whole_experts and model.is_moe)
    values["recompute_modules"] = tuple(values["recompute_modules"])
    of_job = keys.job
    under("job", lambda: _set_batch(values, of_job, base_dir))
    return under("job", lambda: TrainingJob(model=model, **values))  # type: ignore[no-any-return] # _under returns what the lambda does


def _check_sharding(runtime: RuntimeProfile) -> None:
    """Check that a framework can be told to shard by FSDP2 in place of its own ways.

    Raises:
        ConfigError: It is not Megatron-LM, or its profile has no such stages.
    """
    if runtime.torch_fsdp2 and (runtime.rule_set not in LAYOUT_RULE_SETS or not runtime.offered_stages):
        rule = f"is a way of Megatron-LM alone, and the runtime is {runtime.name}"
        raise ConfigError(rule, key="facts.sharding", value="fsdp2", nearest="own, or leave it out")


def _load(named: str | TracedModelKeys, base_dir: Path, towers: Mapping[str, TowerWork]) -> ModelSpec:
    if isinstance(named, str):
        return load_model(named, base_dir, towers)
    if towers:
        rule = "needs a model whose config.json is read, and this one is traced"
        raise ConfigError(rule, key="job.towers", nearest="leave it out, or name the file as `model:` itself")
    return under("model", lambda: trace_model_file(named.transformers, base_dir))  # type: ignore[no-any-return] # as above


def _set_batch(values: dict[str, Any], keys: JobKeys, base_dir: Path) -> None:
    """Replace the keys of sequences and of the batch among the job's values by what they mean."""
    given, tokens = keys.sequences, values.pop("global_batch_tokens")
    sequences = None if given is None else under("sequences", lambda: read_sequences(given, base_dir))
    values["sequences"] = sequences
    if sequences is not None:
        check_rows(sequences, keys.sequence_length)
    values["global_batch_size"] = rows_of_step(
        keys.global_batch_size,
        tokens=tokens,
        per_step=None if given is None else given.per_step,
        sequence_length=keys.sequence_length,
        sequences=sequences,
    )
