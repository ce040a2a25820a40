"""A study's `trial:` keys, and what they mean: the backend that runs trials, and the smaller jobs that go before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from costmodels.calibration.measured_runs import MeasuredGroup
from costmodels.job.parallel_config import DEGREES, ENUMERATED_DIMENSIONS, FURTHER_DIMENSIONS, ParallelConfig
from costmodels.job.proxy_job import Reduction, least_layers
from costmodels.job.setting import Setting
from hardware.io.config_file import DocumentedModel
from hardware.io.errors import ConfigError
from trials.backend import AbstractBackend
from trials.replay.backend import ReplayBackend
from trials.simulated.backend import Fidelity, SimulatedBackend
from trials.torch_training.backend import ClockChoice, TorchBackend
from trials.torch_training.trainable import check_trainable
from tuner.search.proxy.proxy_trials import ProxyOptions
from tuner.study_file.command_trial import CommandKeys, command_backend, command_meaning

PositiveInt = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


def _layers_or_auto(layers: int | str) -> int | str:
    if layers != "auto" and (isinstance(layers, str) or layers < 1):
        raise ValueError("must be auto or a whole number of at least 1")
    return layers


class ProxyKeys(DocumentedModel):
    """`trial.proxy:`."""

    hosts: PositiveInt
    """Hosts of the cluster that a smaller job occupies at most."""

    layers: Annotated[int | str, AfterValidator(_layers_or_auto)] = "auto"
    """Layers of the smaller job; `auto` keeps those of each pipeline stage."""

    full_trials: NotNegative = 3
    """Trials at full size that follow; 0 leaves an extrapolated answer."""


class ReplayKeys(DocumentedModel):
    """`trial:` with `backend: replay`."""

    backend: Literal["replay"]
    """Trials are answered by measured rows."""

    measured: Annotated[list[str], Field(min_length=1)]
    """CSV files as in [configs/measured](../configs/measured/README.md)."""

    where: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Column and value that choose the rows of one job on one cluster."""

    seconds_per_trial: Annotated[float, Field(ge=0)] = 0.0
    """Wall time that each trial pretends to take [s], spread over its steps."""

    time_limit_s: Annotated[float, Field(gt=0)] | None = None
    """A trial is cut off after this [s]; the steps that it measured are kept."""

    proxy: ProxyKeys | None = None
    """Refused: there are no rows of smaller jobs."""


class SimulatedKeys(DocumentedModel):
    """`trial:` with `backend: simulated`."""

    backend: Literal["simulated"]
    """Trials are answered by a simulated world, which the tuner's model gets wrong on purpose."""

    fidelity: Fidelity = "step_time"
    """What makes a step of operators and collectives: `step_time`, the closed form that the tuner believes in too, or
    `simulator`, the event simulator, which takes up to some seconds a trial.
    """

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Which world."""

    noise: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Spread of one step's time from step to step, as a share of it."""

    operator_error: Annotated[float, Field(ge=0, le=1)] = 0.3
    """How wrong the cost model is about this world, as a share of each time."""

    num_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Steps that a trial measures."""

    seconds_per_trial: Annotated[float, Field(ge=0)] = 0.0
    """Wall time that each trial pretends to take [s], spread over its steps."""

    time_limit_s: Annotated[float, Field(gt=0)] | None = None
    """A trial is cut off after this [s]; the steps that it measured are kept."""

    proxy: ProxyKeys | None = None
    """Smaller jobs that run in place of candidates before any runs at full size; see below."""


class TorchKeys(DocumentedModel):
    """`trial:` with `backend: torch`."""

    backend: Literal["torch"]
    """Trials train the model with PyTorch; see [real training](real-training.md)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` (gloo) or `cuda` (NCCL); `auto` is what the cluster's devices are."""

    clock: ClockChoice = "auto"
    """What a step time counts; `auto` is the wall clock where every rank has a device or core to itself, else the
    virtual one, see [real training](real-training.md).
    """

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Weights and data."""

    warmup_steps: Annotated[int, Field(ge=1, le=100)] = 2
    """Steps before the first measured one."""

    min_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Measured steps at least."""

    max_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Measured steps at most."""

    precision: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Measuring ends when the relative standard error of the median is below this."""

    capacity_factor: Annotated[float, Field(gt=0, le=100)] | None = None
    """An expert takes at most this many times its even share of a rank's tokens and drops the others.

    Default: none: nothing is dropped
    """

    spread: bool = False
    """On CPUs, too, every host of the cluster is a machine of the Ray cluster; else one machine stands for all."""

    profile: bool = True
    """One more step is profiled for the times of operators."""

    hang_limit_s: Annotated[float, Field(gt=0)] = 120.0
    """A trial whose ranks tell nothing for so long hangs [s]."""

    time_limit_s: Annotated[float, Field(gt=0)] | None = None
    """A trial is cut off after this [s]; the steps that it measured are kept."""

    proxy: ProxyKeys | None = None
    """Smaller jobs that run in place of candidates before any runs at full size; see below."""


TrialKeys = ReplayKeys | SimulatedKeys | TorchKeys | CommandKeys
"""`trial:`, one of these by its `backend`."""


def backend_of(keys: TrialKeys, setting: Setting, group: MeasuredGroup | None, base_dir: Path) -> AbstractBackend:
    """What runs the study's trials.

    Args:
        keys: The study's `trial:`.
        setting: What is measured, and where.
        group: The measured rows that a replay serves.
        base_dir: The study file's folder.

    Raises:
        ConfigError: it cannot run them.
    """
    if isinstance(keys, ReplayKeys):
        assert group is not None, "a replay has measured rows"
        return ReplayBackend(group=group, seconds_per_trial=keys.seconds_per_trial)
    if isinstance(keys, CommandKeys):
        return command_backend(keys, setting, base_dir)
    job, cluster, runtime = setting.job, setting.cluster, setting.runtime
    if isinstance(keys, SimulatedKeys):
        return SimulatedBackend(
            job=job,
            cluster=cluster,
            runtime=runtime,
            fidelity=keys.fidelity,
            seed=keys.seed,
            noise=keys.noise,
            operator_error=keys.operator_error,
            num_steps=keys.num_steps,
            seconds_per_trial=keys.seconds_per_trial,
        )
    if keys.max_steps < keys.min_steps:
        raise ConfigError(
            f"must be at least min_steps, which is {keys.min_steps}", key="trial.max_steps", value=keys.max_steps
        )
    if runtime.rule_set != "torch-reference":
        raise ConfigError(
            "is not how the torch backend trains", key="runtime", value=runtime.name, nearest="runtime: torch-reference"
        )
    check_trainable(job)
    is_processor = all(device.is_processor for device in cluster.devices)
    device = keys.device if keys.device != "auto" else "cpu" if is_processor else "cuda"
    if device == "cuda" and keys.clock == "virtual":
        raise ConfigError(
            "follows CPU time, which says nothing of a GPU", key="trial.clock", value="virtual", nearest="clock: wall"
        )
    return TorchBackend(
        job=job,
        cluster=cluster,
        runtime=runtime,
        device=device,
        chosen_clock=keys.clock,
        seed=keys.seed,
        warmup_steps=keys.warmup_steps,
        min_steps=keys.min_steps,
        max_steps=keys.max_steps,
        precision=keys.precision,
        capacity_factor=keys.capacity_factor,
        spreads=keys.spread,
        profiles=keys.profile,
        hang_limit_s=keys.hang_limit_s,
    )


def proxy_of(keys: TrialKeys, setting: Setting, backend: AbstractBackend, max_trials: int) -> ProxyOptions | None:
    """What the study says about proxies.

    Args:
        keys: The study's `trial:`.
        setting: What is measured, and where.
        backend: What runs the trials.
        max_trials: Trials that the study may run.

    Raises:
        ConfigError: none can be run.
    """
    wanted = keys.proxy
    if wanted is None:
        return None
    model, cluster = setting.job.model, setting.cluster
    layers = wanted.layers if isinstance(wanted.layers, int) else None
    if len(cluster.groups) > 1:
        raise ConfigError(
            f"needs equal hosts, and the cluster has {len(cluster.groups)} groups of them",
            key="trial.proxy",
            nearest="leave proxy out",
        )
    one_host = Reduction(hosts=1, layers=model.num_layers, global_batch_size=setting.job.global_batch_size)
    if backend.reduced(one_host) is None:
        raise ConfigError(
            f"cannot be run by the backend {keys.backend}, which answers for its own job only",
            key="trial.proxy",
            nearest="leave proxy out, or use backend: simulated",
        )
    if wanted.hosts >= cluster.num_hosts:
        raise ConfigError(
            f"must be fewer than the {cluster.num_hosts} hosts of the cluster",
            key="trial.proxy.hosts",
            value=wanted.hosts,
            nearest=f"at most {cluster.num_hosts - 1}" if cluster.num_hosts > 1 else "leave proxy out",
        )
    if layers is not None and not least_layers(model) <= layers <= model.num_layers:
        raise ConfigError(
            f"must be from {least_layers(model)} to the {model.num_layers} layers of the model",
            key="trial.proxy.layers",
            value=layers,
            nearest="auto keeps those of each stage",
        )
    if wanted.full_trials >= max_trials:
        raise ConfigError(
            f"must be fewer than search.max_trials, which is {max_trials}",
            key="trial.proxy.full_trials",
            value=wanted.full_trials,
            nearest=f"at most {max_trials - 1}",
        )
    return ProxyOptions(hosts=wanted.hosts, layers=layers, full_trials=wanted.full_trials)


def trial_meaning(keys: TrialKeys, backend: AbstractBackend, group: MeasuredGroup | None) -> dict[str, Any]:
    """The resolved values under `trial:` that give a trial its meaning, as JSON."""
    trial = keys.model_dump()
    # a proxy trial says by itself what it ran
    for unrelated in ("time_limit_s", "hang_limit_s", "seconds_per_trial", "measured", "proxy"):
        trial.pop(unrelated, None)
    if isinstance(keys, CommandKeys):
        trial = command_meaning(trial)
    if isinstance(backend, TorchBackend):  # what `auto` has become
        trial |= {"device": backend.device, "clock": backend.clock}
    if group is not None:
        rows = [[*run.config.values(_dimensions_of(run.config)).values(), run.step_time_s] for run in group.runs]
        digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        trial["rows"] = f"{len(rows)} rows, sha256 {digest[:16]}"
    return trial


def _dimensions_of(config: ParallelConfig) -> tuple[str, ...]:
    """What tells a configuration; an even assignment needs no telling."""
    return DEGREES + (FURTHER_DIMENSIONS if config.assignment else ENUMERATED_DIMENSIONS)
