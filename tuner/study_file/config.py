"""Study file -> StudyConfig: every key checked, every name resolved, every mistake one message.

The pydantic classes below are the study file's grammar; `load_study` turns what they hold into the frozen objects that
the rest of Meshtune works with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, Field

from costmodels.calibration.measured_runs import MeasuredGroup, read_measured_group
from costmodels.calibration.sources import MeasuredSetting, source_of
from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import (
    DEGREES,
    ENUMERATED_DIMENSIONS,
    FURTHER_DIMENSIONS,
    RECOMPUTE_MODES,
    ParallelConfig,
    Value,
)
from costmodels.job.runtime import RuntimeProfile, find_runtime, read_profile
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster, described_cluster
from hardware.dynamics import Trace
from hardware.io.config_file import DocumentedModel, checked, parse_yaml, read_mapping, read_text
from hardware.io.errors import ConfigError, shown_url
from hardware.trace_file import read_trace
from trials.backend import AbstractBackend
from trials.command.placeholders import without_wildcards
from trials.replay.backend import ReplayBackend
from trials.simulated.backend import SimulatedBackend
from tuner.planners.sharding.pins import Pin
from tuner.plans.layer_plans import LayerPlanner, LayerPlanning
from tuner.search.proxy.proxy_trials import ProxyOptions
from tuner.space.enumeration import (
    Space,
    SpaceOptions,
    active_rules,
    broken_rules,
    build_space,
    impossible_values,
    launchable,
    setting_for,
)
from tuner.space.rules import Setting
from tuner.study_file.command_trial import CommandKeys
from tuner.study_file.paths import StudyPaths
from tuner.study_file.trial_config import (
    NotNegative,
    PositiveInt,
    ReplayKeys,
    SimulatedKeys,
    TrialKeys,
    backend_of,
    proxy_of,
    trial_meaning,
)

DEFAULT_STORAGE = "sqlite:///meshtune.db"

Share = Annotated[float, Field(ge=0, lt=1)]


class _JobKeys(DocumentedModel):
    """`job:`."""

    sequence_length: PositiveInt
    """Tokens per sequence. A replay takes it from its rows."""

    global_batch_size: PositiveInt
    """Sequences per optimizer step. A replay takes it from its rows."""

    precision: Literal["bf16", "fp16", "nvfp4", "fp8", "tf32", "fp32"] = "bf16"
    """Type of the matrix products."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Whose states each parameter has."""

    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """Training states sharded over data parallel ranks: 0 none, 1 optimizer, 2 gradients, 3 weights.

    Default: `1`, or the lowest that the runtime offers
    """

    sequence_parallel: bool | None = None
    """Whether norms and residuals are split over tp.

    Default: the runtime's
    """

    recompute_modules: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: ["core_attn"])
    """What `selective` repeats, by Megatron-Core's names: `core_attn`, `mlp`, `layernorm`, `moe_act`, `mla_up_proj`,
    `moe`, `shared_experts`.

    Default: `[core_attn]`
    """

    expert_tp: NotNegative = 0
    """Tensor parallel degree of the experts; 0 is that of the rest, `tp`."""

    dp_shard: NotNegative = 0
    """Data parallel ranks over which ZeRO shards, the others hold copies (HSDP); 0 is all of `dp`."""


class _SpaceKeys(DocumentedModel):
    """`space:`."""

    rules: str | None = None
    """Rule set: `flexparallel`, or one of those in the table of runtimes.

    Default: the runtime's
    """

    without: list[str] = Field(default_factory=list)
    """Rules switched off by name; `meshtune space FILE` lists those that removed something."""

    memory_headroom: Share = 0.08
    """Share of each device's memory that must stay free; what may well do so, given how far predictions of memory are
    off, is not dropped.
    """

    pp: list[PositiveInt] | None = None
    """Allowed pipeline stages.

    Default: all
    """

    tp: list[PositiveInt] | None = None
    """Allowed tensor parallel degrees.

    Default: all
    """

    dp: list[PositiveInt] | None = None
    """Allowed data parallel degrees.

    Default: all
    """

    cp: list[PositiveInt] | None = None
    """Allowed context parallel degrees (ring attention).

    Default: all
    """

    up: list[PositiveInt] | None = None
    """Allowed Ulysses degrees.

    Default: all
    """

    vpp: list[PositiveInt] | None = None
    """Allowed model chunks per stage.

    Default: all
    """

    ep: list[PositiveInt] | None = None
    """Allowed expert parallel degrees.

    Default: all
    """

    mbs: list[PositiveInt] | None = None
    """Allowed sequences per micro-batch.

    Default: all
    """

    recompute: list[Literal["none", "selective", "full"]] | None = None
    """Opens this dimension: the values of the list are searched.

    Default: the job's
    """

    zero_stage: list[Annotated[int, Field(ge=0, le=3)]] | None = None
    """As `recompute`.

    Default: the job's
    """

    sequence_parallel: list[bool] | None = None
    """As `recompute`.

    Default: the job's
    """

    expert_tp: list[NotNegative] | None = None
    """As `recompute`; `[0, 1]` tries experts split as the rest is, and not at all.

    Default: the job's
    """

    dp_shard: list[NotNegative] | None = None
    """As `recompute`; `[0, 8]` tries shards over all of dp, and over eight neighbours.

    Default: the job's
    """

    assignment: list[Literal["layers", "recomputed", "micro_batches", "hosts"]] | None = None
    """What may be uneven: `layers` and `recomputed` of each virtual stage, `micro_batches` of each replica, the order
    of `hosts`; `[]` leaves work even.

    Default: all that the runtime can be told on unlike hosts, nothing on like ones
    """


class _PinKeys(DocumentedModel):
    """One of `planner.pins:`."""

    op: str
    """Names of operators, with `*` for any text."""

    dim: str
    """A dim of theirs by its name, or by its place, as `operand1.0` or `result.0`."""

    axis: Literal["dp", "cp", "up", "tp"] | None = None
    """The mesh axis that cuts it.

    Default: whichever comes first
    """

    ways: PositiveInt | None = None
    """Into how many parts at least.

    Default: the devices along the axis
    """

    weight_s: Annotated[float, Field(ge=0)] | None = None
    """What missing it by a factor of e costs [s], for a soft pin.

    Default: none: the pin must hold
    """


class _PlannerKeys(DocumentedModel):
    """`planner:`."""

    name: LayerPlanner = "megatron"
    """How the layers of candidates are sharded: `megatron` is the plan that frameworks write by hand; `recursive`
    (D-Rec) and `descent` look for better ones, for simulated trials; see [sharding
    plans](sharding-plans.md#in-a-study).
    """

    pins: list[_PinKeys] = Field(default_factory=list)
    """Dims that such a plan must cut."""


class _SearchKeys(DocumentedModel):
    """`search:`."""

    draws: Annotated[int, Field(ge=10, le=10_000)] = 100
    """Joint draws of the surrogate per decision."""

    confidence: Annotated[float, Field(gt=0, le=1)] = 0.95
    """The search stops once the best has been tried with this probability."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """A tried configuration counts as the best where it is at most so much slower: 0.01 is 1%; 0 searches for the very
    best.
    """

    max_trials: PositiveInt = 40
    """Budget of trials."""

    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Budget of wall time [s], of all runs of the study together."""

    budget_device_hours: Annotated[float, Field(gt=0)] | None = None
    """Budget of device-hours, of all runs of the study together: once the trials that have ended took them, start-up
    included, no further one starts. What runs then still ends, so that the budget is exceeded by those trials. A
    simulated or replayed trial counts what its measured steps would have taken.
    """

    parallel_trials: Annotated[int, Field(ge=1, le=1024)] = 1
    """Trials that run at the same time."""

    share_hosts: bool = False
    """Whether trials may run side by side on hosts that each would have to itself: those with GPUs, or of several
    hosts, or of commands that reach their hosts by themselves.
    """

    placement_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """How long a joined Ray cluster has to give the trials their hosts [s]; then fewer run at once, or the run ends
    where there is room for none.
    """

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Fixes every decision of the search."""

    prune: bool = True
    """A trial is stopped after its first steps where it is clearly slower than the best; never the first trial nor the
    current's.
    """

    repeats: Annotated[int, Field(ge=0, le=100)] | None = None
    """Further trials of each of the two or three fastest, in turn, where they are too close to call when nothing else
    is left to try; they count as trials.

    Default: `2` where trials train, else `0`
    """

    acquisition: Literal["draws", "thompson", "ucb", "ei_per_second"] = "draws"
    """How the next trial is chosen: `draws` (uniformly over the draws whose fastest candidate is untried), `thompson`
    (the fastest untried candidate of one draw), `ucb` (lowest confidence bound) or `ei_per_second` (expected
    improvement per second of trial).
    """

    baseline: bool | None = None
    """The first trial runs what an engineer would write by hand, and the result is compared with it: of the candidates
    that fit, the least tp·pp, tp first up to a host, then pp; least ep and mbs, dp the rest
    ([tuner/answers/baseline.py](../tuner/baseline.py)).

    Default: `true` where trials train and there is no `current`, else `false`
    """


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise ValueError("must be up to 128 letters, digits, dots, dashes and underscores, a letter or digit first")
    return name


class StudyKeys(DocumentedModel):
    """A study file."""

    name: Annotated[str, AfterValidator(_checked_name)]
    """The study's name in its storage: letters, digits, dots, dashes, underscores."""

    model: str | None = None
    """Catalog name, or path to YAML, to a Hugging Face `config.json`, or to its directory. Required, except for a
    replay, which takes it from its rows.
    """

    cluster: dict[str, Any]
    """Where the job runs: one of four forms."""

    job: _JobKeys | None = None
    """What one optimizer step trains on. Required, except for a replay."""

    runtime: str = "megatron-core"
    """Profile of the training framework: a catalog name of the table of runtimes below, or path to a YAML file that
    `meshtune calibrate` wrote.
    """

    space: _SpaceKeys = _SpaceKeys()
    """Which configurations are searched.

    Default: all that the rules allow
    """

    planner: _PlannerKeys = _PlannerKeys()
    """How the layers of candidates are sharded.

    Default: as frameworks do by hand
    """

    search: _SearchKeys = _SearchKeys()
    """How the search goes, and when it ends.

    Default: those of its keys
    """

    current: dict[str, Any] | None = None
    """The configuration in use today: the first trial, never pruned; degrees left out are 1."""

    trial: Annotated[TrialKeys, Field(discriminator="backend")] = SimulatedKeys(backend="simulated")
    """How a trial is run.

    Default: `{backend: simulated}`
    """

    storage: str = DEFAULT_STORAGE
    """`sqlite:///FILE`, `postgresql://...` or `journal:///FILE`, see [storage](storage.md); `MESHTUNE_STORAGE` wins
    over it, `--storage` over both.
    """

    history: list[str] = Field(default_factory=list)
    """What earlier studies and others measured: database URLs of studies, and CSV files as in
    [configs/measured](../configs/measured/README.md).
    """


USUAL_REPEATS = 2
"""`search.repeats` where trials train for real and nobody says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """How the tuner searches: see the study file's `search:` keys."""

    draws: int
    confidence: float
    tolerance: float
    max_trials: int
    max_seconds: float | None
    budget_device_hours: float | None
    parallel_trials: int
    share_hosts: bool
    placement_wait_s: float
    seed: int
    prune: bool
    repeats: int
    acquisition: str
    baseline: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StudyConfig:
    """A checked study: what is tuned, over what, how, and where its results stand.

    Attributes:
        name: The study's name in its storage.
        file: The file it was read from.
        setting: Job, cluster and runtime.
        trace: How the cluster changes over time, or None. Trials run on the cluster as it is described.
        options: What the study says about its space.
        planning: How the layers of candidates are sharded.
        layer_plans: What was planned for them, by shape, as `layer_plans.summary_of` tells it, and None where there is
            no plan by hand to compare with; see planned_study.py.
        search: Budget, confidence, parallel trials, seed.
        current: The configuration in use today, or None.
        backend: How a trial is run.
        proxy: The smaller jobs that run before; None where every trial runs at full size.
        time_limit_s: Limit of one trial, or None.
        storage: Database URL.
        history: Where earlier runs stand: database URLs, and CSV files relative to `file`.
        meaning: What gives the study's trials their meaning; a resumed study must have the same.
        measured: The measured rows that a replay serves, or None.
        read_elsewhere: Sentences on files that it reads outside its folder and the working directory.
    """

    name: str
    file: str
    setting: Setting
    trace: Trace | None
    options: SpaceOptions
    planning: LayerPlanning
    search: SearchOptions
    current: ParallelConfig | None
    backend: AbstractBackend
    proxy: ProxyOptions | None
    time_limit_s: float | None
    storage: str
    history: tuple[str, ...]
    meaning: dict[str, Any]
    measured: MeasuredGroup | None
    layer_plans: Mapping[str, dict[str, Any] | None] = field(default_factory=dict)
    read_elsewhere: tuple[str, ...] = ()

    @property
    def measured_setting(self) -> MeasuredSetting:
        """The setting, and what the trials' peaks of memory count: what the device sees, or what a sweep published."""
        source = source_of(self.measured.runs[0]) if self.measured else None
        return MeasuredSetting(
            job=self.setting.job,
            cluster=self.setting.cluster,
            runtime=self.setting.runtime,
            memory=source.memory if source else "device",
            stage=source.stage if source else "fullest",
        )

    @property
    def config_defaults(self) -> dict[str, Value]:
        """Values of the further dimensions where nobody names them."""
        return _further_defaults(self.setting.job, self.setting.runtime)

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The names that identify a candidate: the eight degrees and the opened dimensions."""
        return DEGREES + self.options.opened

    def config_of(self, values: Mapping[str, Value]) -> ParallelConfig:
        """The configuration that a candidate's dimensions name.

        What they leave open is fixed by the job or, in a replay, by the measured row.
        """
        if isinstance(self.backend, ReplayBackend):
            grid = self.backend.candidates(self.options.opened)
            position = grid.positions().get(tuple(values[name] for name in grid.dimensions))
            if position is not None:
                return grid.config(position)
        return ParallelConfig(**(self.config_defaults | dict(values)))  # type: ignore[arg-type] # checked by ParallelConfig

    def space(self) -> Space:
        """Enumerates, prunes and predicts the memory of the study's candidates."""
        replayed = self.backend.candidates(self.options.opened) if isinstance(self.backend, ReplayBackend) else None
        try:
            return build_space(self.setting, self.options, current=self.current, measured=replayed)
        except ConfigError as error:
            raise error.in_file(self.file) from None


def load_study(path: Path | str, *, overrides: Sequence[str] = (), storage: str | None = None) -> StudyConfig:
    """The study that a YAML file describes.

    Args:
        path: The study file; paths inside it are relative to it.
        overrides: `a.b=value` texts that replace keys of the file; the value is YAML.
        storage: Database URL that wins over MESHTUNE_STORAGE, which wins over the file.

    Raises:
        ConfigError: anything in the file, or in a file that it names, cannot work.
    """
    path = Path(path)
    mapping = read_mapping(path)
    try:
        for override in overrides:
            _apply_override(mapping, override)
        keys = checked(StudyKeys, mapping)
        users = storage or os.environ.get("MESHTUNE_STORAGE")
        named = {override.partition("=")[0] for override in overrides} | ({"storage"} if users else set())
        paths = StudyPaths(folder=path.parent, named=frozenset(named))
        return _resolved(keys, path, users or keys.storage, paths)
    except ConfigError as error:
        raise _without_secret(error).in_file(str(path)) from None


def _without_secret(error: ConfigError) -> ConfigError:
    """The same mistake; of what a command gets in its environment no message tells a value."""
    if "trial.environment" not in (error.key or "") and "environment" not in str(error.value):
        return error
    return ConfigError(error.rule, key=error.key, nearest=error.nearest, file=error.file)


def _resolved(keys: StudyKeys, path: Path, storage: str, paths: StudyPaths) -> StudyConfig:
    base_dir = path.parent
    _check_no_nul(keys.model_dump())
    described = _under("cluster", lambda: described_cluster(keys.cluster, base_dir))
    cluster = described.cluster
    runtime = _under("runtime", lambda: _runtime(keys.runtime, base_dir))
    group = _measured_group(keys, base_dir) if isinstance(keys.trial, ReplayKeys) else None
    job = _job(keys, base_dir, group, runtime)
    for device in cluster.devices:
        _under("job", lambda device=device: device.peak_flop_per_s(job.precision))
    uneven = _uneven(keys.space, cluster, runtime) if group is None else ()
    options = _space_options(keys.space, uneven)
    setting = setting_for(job, cluster, runtime, options)
    if group is not None and group.devices != cluster.num_devices:
        raise ConfigError(
            f"the measured rows ran on {group.devices} devices, and the cluster has {cluster.num_devices}",
            key="cluster",
            value=keys.cluster,
            nearest="change the cluster's hosts or trial.where",
        )
    _check_fixed_dimensions(setting, options, measured=group is not None)
    _check_absent_dimensions(setting, options)
    if group is None:
        _check_possible_values(setting, options)
    backend = backend_of(keys.trial, setting, group, base_dir)
    planning = _planning(keys.planner, backend)
    _check_storage(storage)
    _check_history(keys.history, base_dir, storage)
    _check_written(keys.trial, storage, paths)
    return StudyConfig(
        name=keys.name,
        file=str(path),
        setting=setting,
        trace=_under("cluster.trace", lambda: read_trace(described.trace, cluster)) if described.trace else None,
        options=options,
        planning=planning,
        search=_search(keys.search, backend),
        current=_current(keys, setting, options),
        backend=backend,
        proxy=proxy_of(keys.trial, setting, backend, keys.search.max_trials),
        time_limit_s=keys.trial.time_limit_s,
        storage=storage,
        history=tuple(keys.history),
        meaning=_meaning(keys, setting, options, backend, group) | _planned_meaning(planning),
        measured=group,
        read_elsewhere=paths.read_elsewhere(_files_read(keys, described.trace, base_dir)),
    )


def _check_written(trial: TrialKeys, storage: str, paths: StudyPaths) -> None:
    """What a study writes must lie where its file may write, or where the user has said.

    Raises:
        ConfigError: it does not.
    """
    file = storage_file(storage)
    if file is not None:
        nearest = f"give --storage {storage}, or MESHTUNE_STORAGE"
        paths.check_written(file, key="storage", value=storage, nearest=nearest)
    if isinstance(trial, CommandKeys) and trial.logs is not None:
        nearest = f"give --set trial.logs={trial.logs}"
        paths.check_written(paths.folder / trial.logs, key="trial.logs", value=trial.logs, nearest=nearest)


def _files_read(keys: StudyKeys, trace: Path | None, base_dir: Path) -> Iterator[tuple[str, Path]]:
    """What a study may read, by the keys that name it; a name of a catalog is no path that leads anywhere."""
    named = [("model", keys.model), ("runtime", keys.runtime), ("cluster.file", keys.cluster.get("file"))]
    if isinstance(keys.trial, ReplayKeys):
        named += [(f"trial.measured.{number}", name) for number, name in enumerate(keys.trial.measured)]
    if isinstance(keys.trial, CommandKeys) and keys.trial.profile is not None:
        named.append(("trial.profile", without_wildcards(keys.trial.profile.partition("{")[0])))
    for number, entry in enumerate(keys.history):
        if not is_database(entry):
            named.append((f"history.{number}", entry))
        elif (file := storage_file(entry)) is not None:
            yield f"history.{number}", file
    for key, name in named:
        if name is not None:
            yield key, base_dir / name
    if trace is not None:
        yield "cluster.trace", trace


def _check_no_nul(value: Any, key: str = "") -> None:
    """No text of a study holds a NUL, which no path, name or argument of a program can.

    Raises:
        ConfigError: one does.
    """
    if isinstance(value, str) and "\0" in value:
        raise ConfigError("holds a NUL", key=key, value=value)
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        _check_no_nul(name, key)
        _check_no_nul(part, f"{key}.{name}".lstrip("."))


def _planning(keys: _PlannerKeys, backend: AbstractBackend) -> LayerPlanning:
    """How layers are sharded.

    Raises:
        ConfigError: the trials run what frameworks do by hand, and nothing else.
    """
    if keys.name != "megatron" and not isinstance(backend, SimulatedBackend):
        raise ConfigError(
            "plans layers otherwise than the study's trials shard them, which is Megatron's way",
            key="planner.name",
            value=keys.name,
            nearest="planner.name: megatron, or trial.backend: simulated",
        )
    if keys.name == "megatron" and keys.pins:
        raise ConfigError(
            "are obeyed by planners, and megatron is the plan by hand",
            key="planner.pins",
            nearest="planner.name: descent",
        )
    return LayerPlanning(name=keys.name, pins=tuple(Pin(**pin.model_dump()) for pin in keys.pins))


def _planned_meaning(planning: LayerPlanning) -> dict[str, Any]:
    """The planner as a key of the study; the plan by hand is what studies without the key have."""
    return {} if planning.name == "megatron" else {"planner": asdict(planning)}


def _search(keys: _SearchKeys, backend: AbstractBackend) -> SearchOptions:
    """How the tuner searches.

    Where trials train for real, close calls are measured again, since that costs less than a wrong answer, and a
    baseline is tried first where nobody names what is in use today.
    """
    repeats = keys.repeats if keys.repeats is not None else USUAL_REPEATS if backend.trains else 0
    baseline = backend.trains if keys.baseline is None else keys.baseline
    return SearchOptions(**keys.model_dump(exclude={"repeats", "baseline"}), repeats=repeats, baseline=baseline)


def _under(prefix: str, resolve: Any) -> Any:
    """What `resolve()` returns; a mistake inside is told under the key `prefix`."""
    try:
        return resolve()
    except ConfigError as error:
        if error.file:  # the mistake stands in a file that the study names: say where, and by which key
            error = ConfigError(str(error.in_file(error.file)), key=prefix)
            raise error from None
        raise error.under(prefix) from None


def _runtime(name: str, base_dir: Path) -> RuntimeProfile:
    """The profile that a catalog name or the path of a YAML file means."""
    is_file = name.endswith((".yaml", ".yml")) or "/" in name
    return read_profile(base_dir / name) if is_file else find_runtime(name)


def _job(keys: StudyKeys, base_dir: Path, group: MeasuredGroup | None, runtime: RuntimeProfile) -> TrainingJob:
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
            recompute=first.recompute,
            zero_stage=first.zero_stage,
            sequence_parallel=None,
            recompute_modules=group.runs[0].recompute_modules,
            expert_tp=first.expert_tp,
            dp_shard=first.dp_shard,
        )
    for key in ("model", "job"):
        if getattr(keys, key) is None:
            raise ConfigError("is required and missing", key=key)
    assert keys.model is not None, "checked above"
    assert keys.job is not None, "checked above"
    model = load_model(keys.model, base_dir)
    values = keys.job.model_dump()
    if values["zero_stage"] is None:
        values["zero_stage"] = 1 if 1 in runtime.zero_stages else min(runtime.zero_stages)
    values["recompute_modules"] = tuple(values["recompute_modules"])
    return _under("job", lambda: TrainingJob(model=model, **values))  # type: ignore[no-any-return] # _under returns what the lambda does


def _measured_group(keys: StudyKeys, base_dir: Path) -> MeasuredGroup:
    assert isinstance(keys.trial, ReplayKeys), "only a replay has measured rows"
    trial = keys.trial
    return _under("trial", lambda: read_measured_group(trial.measured, trial.where, base_dir))  # type: ignore[no-any-return] # _under returns what the lambda does


def _uneven(keys: _SpaceKeys, cluster: Cluster, runtime: RuntimeProfile) -> tuple[str, ...]:
    """What may be uneven: what the study says, or on unlike hosts all that the runtime can be told."""
    if keys.assignment is None:
        return runtime.uneven if cluster.is_mixed else ()
    for part in keys.assignment:
        if part not in runtime.uneven:
            raise ConfigError(
                f"can't be told to the runtime {runtime.name}",
                key="space.assignment",
                value=part,
                nearest=f"valid: {', '.join(runtime.uneven)}",
            )
    return tuple(dict.fromkeys(keys.assignment))


def _space_options(keys: _SpaceKeys, uneven: tuple[str, ...]) -> SpaceOptions:
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


def _check_fixed_dimensions(setting: Setting, options: SpaceOptions, *, measured: bool) -> None:
    """A value that the job fixes, or that the study opens, must be one that the runtime offers."""
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


def _check_absent_dimensions(setting: Setting, options: SpaceOptions) -> None:
    """A degree that the framework does not have may be named in `space:`, but only if 1 is among its values."""
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


def _check_possible_values(setting: Setting, options: SpaceOptions) -> None:
    """Of the values that the study allows, at least one must divide what it splits; others are a note of the space."""
    allowed = dict(options.allowed)
    for dimension, (wrong, demand, valid) in impossible_values(setting, options).items():
        if set(wrong) == set(allowed[dimension]):
            raise ConfigError(
                demand,
                key=f"space.{dimension}",
                value=list(wrong),
                nearest=f"valid: {', '.join(map(str, valid))}",
            )


def _further_defaults(job: TrainingJob, runtime: RuntimeProfile) -> dict[str, Value]:
    default_sp = runtime.sequence_parallel if job.sequence_parallel is None else job.sequence_parallel
    fixed = {name: getattr(job, name) for name in ("recompute", "zero_stage", "expert_tp", "dp_shard")}
    return fixed | {"sequence_parallel": default_sp, "assignment": ""}


def _current(keys: StudyKeys, setting: Setting, options: SpaceOptions) -> ParallelConfig | None:
    if keys.current is None:
        return None
    known = DEGREES + FURTHER_DIMENSIONS
    for name, value in keys.current.items():
        if name not in known:
            raise ConfigError("unknown key", key=f"current.{name}", value=value, nearest=f"valid: {', '.join(known)}")
    fixed = _further_defaults(setting.job, setting.runtime)
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


def is_database(entry: str) -> bool:
    """Whether an entry of `history:` is meant as a database URL and not as a file."""
    return "://" in entry


def is_journal(url: str) -> bool:
    """Whether a storage URL names a journal file."""
    return url.startswith("journal://")


def storage_file(url: str) -> Path | None:
    """The file of a SQLite or journal URL, empty for a database in memory; None for a database server."""
    found = re.match(r"(?:sqlite(?:\+\w+)?|journal)://(?:/(file:)?([^?]*))?", url)
    if found is None:
        return None
    _, name = found.groups()
    if name in (None, ":memory:"):
        return Path()
    return Path(unquote(name) if found[1] else name)  # SQLite decodes what begins with file:


def no_database(url: str) -> ConfigError:
    """What to say of a file in `history:` that is not there."""
    nearest = "a relative path starts at the working directory, as for storage"
    return ConfigError("no such database", value=url, nearest=nearest)


def _check_history(entries: Sequence[str], base_dir: Path, storage: str) -> None:
    """Each entry must be a database or a CSV file, and files must be there; what they hold is read later."""
    for position, entry in enumerate(entries):
        key = f"history.{position}"
        if entry in entries[:position]:
            raise ConfigError("is named twice; keep one", key=key, value=shown_url(entry))
        if is_database(entry):
            _check_storage(entry, key)
            file, own = storage_file(entry), storage_file(storage)
            is_own = file is not None and own is not None and file.resolve() == own.resolve()
            if file is not None and not file.is_file() and not is_own:  # our own may not have been made yet
                raise no_database(entry).under(key)
        elif not entry.endswith(".csv"):
            raise ConfigError(
                "is neither a database URL nor a CSV file of measured runs",
                key=key,
                value=entry,
                nearest="for example sqlite:///meshtune.db, or sweep.csv in the form of configs/measured",
            )
        else:
            _under(key, lambda entry=entry: read_text(base_dir / entry))


def _check_storage(url: str, key: str = "storage") -> None:
    if "\0" in url:
        raise ConfigError("is no database URL", key=key, value=shown_url(url))
    if is_journal(url):
        if not re.fullmatch(r"journal:///[^?]+", url):
            raise ConfigError(
                "names no journal file",
                key=key,
                value=url,
                nearest="for example journal:////shared/study.log; with three slashes the path is relative",
            )
    elif not re.match(r"^(sqlite|postgresql|mysql)(\+\w+)?://", url):
        raise ConfigError(
            "is no database URL",
            key=key,
            value=shown_url(url),
            nearest="for example sqlite:///meshtune.db, postgresql://user@host/name or journal:////shared/study.log",
        )


def _apply_override(mapping: dict[str, Any], override: str) -> None:
    """Replaces one key of the study: `search.seed=3`."""
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


def _meaning(
    keys: StudyKeys,
    setting: Setting,
    options: SpaceOptions,
    backend: AbstractBackend,
    group: MeasuredGroup | None,
) -> dict[str, Any]:
    """The resolved values under the study file's keys that give a trial its meaning, as JSON."""
    job, runtime = asdict(setting.job), asdict(setting.runtime)
    model = job.pop("model")
    del runtime["layer_changes"]  # which follow from all else
    return {
        "model": model,
        "cluster": _described(setting.cluster),
        "job": job,
        "runtime": runtime,
        "space": {"opened": list(options.opened)},
        "trial": trial_meaning(keys.trial, backend, group),
    }


def _described(cluster: Cluster) -> dict[str, Any]:
    """The cluster without what it is only while a trace has changed it, and without the switches that it has not."""
    assert not cluster.slow_pairs, "a study describes the cluster while nothing has changed"
    assert not cluster.networks, "a study describes the cluster while nothing has changed"
    left_out = {"slow_pairs", "networks"} | (set() if cluster.switches else {"switches", "uplink_bytes_per_s"})
    return {key: value for key, value in asdict(cluster).items() if key not in left_out}


def first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """The first key, in dotted form, at which two meanings differ, with both values; None if they agree."""
    for key in sorted({*before, *now}):
        path = f"{prefix}{key}"
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            inner = first_difference(old, new, f"{path}.")
            if inner is not None:
                return inner
        elif old != new:
            return path, old, new
    return None
