"""Load a study file: check every key, resolve every name, and report a mistake as one message.

`study_keys.py` holds the grammar of study files. `load_study` turns the keys into the frozen objects that the rest of
Meshtune works with.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from costmodels.job.setting import Setting
from hardware.cluster import Cluster
from hardware.cluster_file import read_described_cluster
from hardware.device import power_limit_w
from hardware.dynamics import hosts_alone
from hardware.io.config_file import parse_yaml, read_mapping, validate_mapping
from hardware.io.errors import ConfigError, shown_url
from hardware.price_file import Prices
from hardware.trace_file import read_trace
from trials.backend import AbstractBackend, Observation, Status, TrialAbility
from trials.knobs.knob import Knob, today_of
from trials.trial_keys import StudyParts
from tuner.catalog.shadows import notes_on_shadows
from tuner.catalog.unread import notes_on_unread
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_planner import LayeredStepPlanner
from tuner.search.objectives import COST, ENERGY, MEMORY, STEP_TIME
from tuner.study_file.cost_keys import CostKeys, build_prices
from tuner.study_file.key_errors import under
from tuner.study_file.knob_keys import KnobKeys, build_knobs
from tuner.study_file.known_knobs import Entries, KnobCatalog, StudyKnobs
from tuner.study_file.named_storages import HistoryEntry, history_of, storage_of
from tuner.study_file.paths import StudyPaths
from tuner.study_file.proxy_keys import proxy_options
from tuner.study_file.request import Economics, HistoryOptions, StudyRequest, TrialOptions
from tuner.study_file.space_options import notes_on_former_rules, runnable_options, with_free_memory, with_told_layers
from tuner.study_file.storage_address import StorageAddress
from tuner.study_file.study_keys import LONGEST_NAME, OwnModelKeys, SearchOptions, StudyKeys, TracedModelKeys
from tuner.study_file.subject import choose_subject
from tuner.subject.ability import Ability
from tuner.subject.contract import AbstractSubject
from tuner.subject.problem import Problem

USUAL_REPEATS = 2
"""Default of `search.repeats` if trials train for real."""


def load_study(
    path: Path | str, *, overrides: Sequence[str] = (), storage: str | None = None, hosts: Sequence[int] | None = None
) -> StudyRequest:
    """Load the study that a YAML file describes.

    Args:
        path: Path of the study file; paths inside it are relative to it.
        overrides: Texts `a.b=value` that replace keys of the file; the value is YAML.
        storage: Database URL that replaces MESHTUNE_STORAGE, which replaces the file's.
        hosts: Some of the hosts, ascending, where others are lost: a study of its own on what they form, without the
            current configuration, which needs all of them. None for the study as the file describes it.

    Raises:
        ConfigError: The file, or a file that it names, contains a mistake.
    """
    path = Path(path)
    mapping = read_mapping(path)
    try:
        for override in overrides:
            _apply_override(mapping, override)
        keys = validate_mapping(StudyKeys, mapping)
        users = storage or os.environ.get("MESHTUNE_STORAGE")
        named = {override.partition("=")[0] for override in overrides} | ({"storage"} if users else set())
        paths = StudyPaths(folder=path.parent, named=frozenset(named))
        return _resolve(keys, path, users or keys.storage, paths, hosts)
    except ConfigError as error:
        raise _without_secret(error).in_file(str(path)) from None


def _without_secret(error: ConfigError) -> ConfigError:
    """Return the error without its value if it is about a command's environment, which may hold secrets."""
    if "trial.environment" not in (error.key or "") and "environment" not in str(error.value):
        return error
    return ConfigError(error.rule, key=error.key, nearest=error.nearest, file=error.file)


def name_on(name: str, cluster: Cluster, hosts: Sequence[int]) -> str:
    """Return the name of a study's own study on some of its hosts; equal hosts have one, whichever they are."""
    first = range(len(hosts))
    is_first = hosts_alone(cluster, hosts) == hosts_alone(cluster, first)
    which = f"{len(hosts)}-hosts" if is_first else "-".join(f"h{host}" for host in hosts)
    found = f"{name}.on-{which}"
    if len(found) <= LONGEST_NAME:
        return found
    digest = hashlib.sha256(found.encode()).hexdigest()[:12]
    return f"{found[: LONGEST_NAME - 13]}-{digest}"


def _resolve(
    keys: StudyKeys, path: Path, url: str | None, paths: StudyPaths, hosts: Sequence[int] | None
) -> StudyRequest:
    base_dir = path.parent
    _check_no_nul(keys.model_dump())
    storage, notes = storage_of(url, keys.name, paths)
    described = under("cluster", lambda: read_described_cluster(keys.cluster, base_dir))
    cluster = described.cluster
    if hosts is not None:
        keys = keys.model_copy(update={"name": name_on(keys.name, cluster, hosts), "current": None, "measured": None})
        described, cluster = replace(described, trace=None), hosts_alone(cluster, hosts)
    chosen = choose_subject(keys, cluster, base_dir)
    subject = chosen.subject
    options, renamed = with_free_memory(chosen.options, keys.space, keys.limits, paths.named)
    notes += (*renamed, *notes_on_former_rules(options, chosen.parts.setting), *_notes_on_model(chosen.parts.setting))
    notes += notes_on_shadows(cluster, model=_model_file(keys.model), runtime=keys.runtime)
    notes += notes_on_unread()
    catalog = chosen.catalog and replace(chosen.catalog, options=options)
    found = _knobs_of(keys.space.knobs, catalog, subject)
    knobs = found.knobs
    parts = StudyParts(
        name=keys.name,
        storage=storage.place,
        cluster=cluster,
        base_dir=base_dir,
        subject=chosen.parts,
        step_planner=LayeredStepPlanner(planning=chosen.planning),
        knobs=knobs,
    )
    backend = keys.trial.build(parts)
    _check_knobs(keys, knobs, backend)
    options = with_told_layers(options, backend, chosen.parts)
    current = subject.current(keys.current, options)
    options = runnable_options(keys.space, options, backend, current, cluster)
    planning = _resolved_planning(chosen.planning, keys, backend, subject)
    if planning.name == "megatron":
        options = replace(options, pins=planning.pins)
    objective, prices = _objective(keys, subject), under("cost", lambda: build_prices(keys.cost, base_dir))
    history, history_notes = history_of(keys.history, storage, paths)
    _check_written(keys, storage, paths)
    problem = Problem(
        subject=subject,
        options=options,
        planning=planning,
        objective=objective,
        current=current and replace(current, knobs=tuple(today_of(knobs).items())),
        measured=backend.candidates(options.opened),
        knobs=knobs,
        known_knobs=found.known,
    )
    return StudyRequest(
        name=keys.name,
        file=str(path),
        problem=problem,
        search=_search(keys.search, backend, objective),
        trials=TrialOptions(
            backend=backend,
            proxy=proxy_options(keys.trial, subject, backend, keys.search.max_trials),
            time_limit_s=keys.trial.time_limit,
            current=_current_observation(keys, backend),
        ),
        storage=storage,
        history=HistoryOptions(entries=history),
        economics=Economics(prices=prices, limits=keys.limits, pays_idle_hosts=keys.cost.idle_hosts == "paid"),
        trace=under("cluster.trace", lambda: read_trace(described.trace, cluster)) if described.trace else None,
        meaning=subject.meaning(options, planning, knobs)
        | {"trial": keys.trial.meaning() | backend.describe()}
        | _describe_objective(objective, cluster, prices, keys.cost),
        knob_catalog=catalog,
        notes=(*notes, *history_notes, *paths.read_elsewhere(_files_read(keys, history, described.trace, base_dir))),
    )


def _notes_on_model(setting: Setting | None) -> tuple[str, ...]:
    """Return notes on how the model was read, and on its parts that no prediction counts."""
    if setting is None:
        return ()
    parts, remarks = setting.job.model.left_out, setting.job.model.remarks
    told = "; job.towers counts the vision tower" if "vision tower" in parts else ""
    return (*remarks, *((f"{' and '.join(parts)} of the model: left out of all predictions{told}",) if parts else ()))


def _knobs_of(entries: Entries, catalog: KnobCatalog | None, subject: AbstractSubject) -> StudyKnobs:
    """Return the knobs of a study; known ones need a framework."""
    if catalog is not None:
        return catalog.build(entries)
    own = [entry for entry in entries if isinstance(entry, KnobKeys) and entry.catalog is None]
    if len(own) < len(entries):
        rule = subject.refusal(Ability.KNOBS) or ""
        raise ConfigError(rule, key="space.knobs", nearest="mappings with name and values")
    return StudyKnobs(knobs=build_knobs(own))


def _check_knobs(keys: StudyKeys, knobs: Sequence[Knob], backend: AbstractBackend) -> None:
    """Check that the study's trials can set knobs, and run each at full size."""
    if knobs and TrialAbility.KNOBS not in backend.abilities:
        raise ConfigError(
            "need trials that can set them",
            key="space.knobs",
            value=[knob.name for knob in knobs],
            nearest="trial.backend: command, or simulated",
        )
    if knobs and keys.trial.proxy is not None:
        raise ConfigError("cannot be searched by smaller jobs", key="space.knobs", nearest="leave trial.proxy out")


def _check_written(keys: StudyKeys, storage: StorageAddress, paths: StudyPaths) -> None:
    """Check that a study writes only to its own folder, or to places that the user allows."""
    if storage.file is not None:
        nearest = f"give --storage {storage}, or MESHTUNE_STORAGE"
        paths.check_written(storage.file, key="storage", value=shown_url(keys.storage or storage.url), nearest=nearest)
    for key, name in keys.trial.files_written():
        paths.check_written(paths.folder / name, key=key, value=name, nearest=f"give --set {key}={name}")


def _model_file(named: str | OwnModelKeys | TracedModelKeys | None) -> str | None:
    """Return the path of the file that describes the model, if one does."""
    if isinstance(named, TracedModelKeys):
        return named.transformers
    return named if isinstance(named, str) else None


def _files_read(
    keys: StudyKeys, history: Sequence[HistoryEntry], trace: Path | None, base_dir: Path
) -> Iterator[tuple[str, Path]]:
    """Yield the key and path of each file that a study may read; the name of a catalog entry is no existing path."""
    named = [
        ("model", _model_file(keys.model)),
        ("runtime", keys.runtime),
        ("cluster.file", keys.cluster.get("file")),
        ("cost.prices", keys.cost.prices),
    ]
    named += keys.trial.files_read()
    for number, entry in enumerate(history):
        if isinstance(entry, str):
            named.append((f"history.{number}", entry))
        elif entry.file is not None:
            yield f"history.{number}", entry.file
    for key, name in named:
        if name is not None:
            yield key, base_dir / name
    if trace is not None:
        yield "cluster.trace", trace


def _check_no_nul(value: Any, key: str = "") -> None:
    """Check that no text of a study holds a NUL, which no path, name or argument of a program can hold."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigError("holds a NUL", key=key, value=value)
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        _check_no_nul(name, key)
        _check_no_nul(part, f"{key}.{name}".lstrip("."))


def _resolved_planning(
    chosen: LayerPlanning, keys: StudyKeys, backend: AbstractBackend, subject: AbstractSubject
) -> LayerPlanning:
    """Return the planner of layers; under `auto` it is the plan by hand unless trials and framework run others."""
    runs = TrialAbility.PLANS in backend.abilities
    # simulated trials run plans of any framework; a command that takes plans is the framework
    is_real = TrialAbility.TRAINING in backend.abilities
    if chosen.is_auto and not (runs and (is_real or subject.setting.runtime.runs_plans)):
        return LayerPlanning()
    if runs or chosen.name == "megatron":
        return chosen
    if keys.planner.name == "auto":
        return LayerPlanning(pins=chosen.pins)  # of the plans by hand, those that hold them
    nearest = (
        'the argument "{plan}" in trial.command, which is the path of a trial\'s plan for tuner.load_plan'
        if keys.trial.backend == "command"
        else "planner.name: megatron, trial.backend: simulated or jax, or torch with runtime: torch-planned"
    )
    raise ConfigError(
        "needs trials that run plans, because others shard layers as Megatron does",
        key="planner.name",
        value=keys.planner.name,
        nearest=nearest,
    )


def _current_observation(keys: StudyKeys, backend: AbstractBackend) -> Observation | None:
    """Return the measurement of the current configuration that the study states.

    Raises:
        ConfigError: The study names no such configuration, or its trials cannot be compared with a real step.
    """
    if keys.measured is None:
        return None
    if keys.current is None:
        raise ConfigError("needs `current`, the configuration that was measured", key="measured")
    if TrialAbility.TRAINING not in backend.abilities or backend.clock != "wall":
        raise ConfigError(
            "needs trials that train for real: a step of your cluster compares with no simulated or replayed one",
            key="measured",
            nearest="trial: {backend: command, ...}, or leave measured out",
        )
    peak_gib = keys.measured.peak_memory_gib
    return Observation(
        status=Status.OK,
        step_times_s=(keys.measured.step_time_s,),
        peak_memory_bytes=None if peak_gib is None else round(peak_gib * 2**30),
        taken_from=keys.measured.source,
        reason=f"measured by your log: {keys.measured.source}",
    )


def _objective(keys: StudyKeys, subject: AbstractSubject) -> tuple[str, ...]:
    """Return the names of what the study minimizes.

    Raises:
        ConfigError: The values cannot be searched, or the study asks for what only step times allow.
    """
    names = (keys.objective,) if isinstance(keys.objective, str) else tuple(keys.objective)
    if names == (STEP_TIME,):
        return names
    if len(set(names)) < len(names) or set(names) == {MEMORY}:
        raise ConfigError(
            "must be one of step_time, cost_per_token and energy_per_token, or two different values",
            key="objective",
            value=keys.objective,
            nearest="for example [step_time, memory]",
        )
    if rule := subject.refusal(Ability.TOKENS):
        raise ConfigError(rule, key="objective", value=keys.objective, nearest="step_time")
    if getattr(keys.trial, "proxy", None) is not None:
        raise ConfigError(
            "cannot have proxy jobs", key="objective", value=keys.objective, nearest="leave trial.proxy out"
        )
    for key, usual in (("acquisition", ("expected_loss", "draws", "thompson", "ucb")), ("repeats", (None, 0))):
        value = getattr(keys.search, key)
        if value not in usual:
            raise ConfigError(
                "weighs step times, which this study does not minimize alone",
                key=f"search.{key}",
                value=value,
                nearest=f"leave search.{key} out",
            )
    return names


def _describe_objective(
    objective: tuple[str, ...], cluster: Cluster, prices: Prices | None, keys: CostKeys
) -> dict[str, Any]:
    """Return what gives the values of trials their meaning, beside that of trials whose value is the step time.

    Raises:
        ConfigError: The study minimizes a cost or energy, and a device has no price or no known power.
    """
    if objective == (STEP_TIME,):
        return {}
    told: dict[str, Any] = {"values": list(objective), "idle_hosts": keys.idle_hosts}
    unknown = [device.name for device in cluster.devices if power_limit_w(device) is None]
    if ENERGY in objective and unknown:
        rule = f"needs the power limit of every device, and the catalog has none of {' and '.join(unknown)}"
        raise ConfigError(rule, key="objective", value=ENERGY)
    if COST in objective:
        groups = cluster.groups
        per_hour = [None if prices is None else prices.per_device_hour(group) for group in groups]
        if prices is None or None in per_hour:
            raise ConfigError(
                "needs a price of every device of the cluster",
                key="objective",
                value=COST,
                nearest="cost: {prices: FILE}, or cost: {price_per_device_hour: 2.5}",
            )
        told |= {"currency": prices.currency, "per_device_hour": per_hour}
    return {"objective": told}


def _search(keys: SearchOptions, backend: AbstractBackend, objective: tuple[str, ...]) -> SearchOptions:
    """Return the options of the search, with defaults that depend on the backend.

    Trials are stopped early by their step times, and measured again by them, so only a study of step times does either.

    If trials train for real, the fastest configurations are measured again, because replication costs less than a wrong
    answer. A baseline is tried first, unless the study has a current configuration.
    """
    trains = TrialAbility.TRAINING in backend.abilities
    repeats = keys.repeats if keys.repeats is not None else USUAL_REPEATS if trains else 0
    baseline = trains if keys.baseline is None else keys.baseline
    known = {"repeats": repeats, "baseline": baseline}
    return keys.model_copy(update=known if objective == (STEP_TIME,) else known | {"prune": False, "repeats": 0})


def _apply_override(mapping: dict[str, Any], override: str) -> None:
    """Replace one key of the study, for example by `search.seed=3`."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(
            "must read key=value", key="--set", value=shown_url(override), nearest="for example search.seed=3"
        )
    *parents, last = path.split(".")
    target = mapping
    for parent in parents:
        inner = target.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError("holds no keys of its own", key=f"--set {path}", value=inner)
        target = inner
    try:
        target[last] = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(error.rule, key=f"--set {path}", value=shown_url(text), nearest=error.nearest) from None
