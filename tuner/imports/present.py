"""Current configuration of a study, completed with the devices and the model that an imported file does not state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import DEGREES, Value
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.uneven_work import numbers_in_words
from costmodels.step.pipeline.schedules import chunk_of_layer
from hardware.io.errors import ConfigError
from tuner.imports.imported import Imported


@dataclass(frozen=True, kw_only=True, slots=True)
class Present:
    """Current configuration in the form of a study file.

    Attributes:
        job: Keys of `job:`, including the fixed values of the further dimensions.
        current: Keys of `current:`: the eight degrees, and an assignment if layers are uneven; empty if the file
            describes only a model.
    """

    job: Mapping[str, Any]
    current: Mapping[str, Value]


def present_of(imported: Imported, *, devices: int, model: ModelSpec, runtime: RuntimeProfile) -> Present:
    """Complete an imported configuration, in which no key is open, for a cluster of so many devices.

    The runtime profile determines how layers are distributed over stages by default.

    Raises:
        ConfigError: the degrees do not match the devices, or the layers do not match the model.
    """
    assert not imported.open, "the caller fills in all open keys before this call"
    job = dict(imported.job)
    if not imported.degrees:
        return Present(job=job, current={})
    degrees = {**dict.fromkeys(DEGREES, 1), **imported.degrees}
    degrees["dp"] = _replicas(imported, degrees, devices)
    if imported.micro_batches is not None:
        job.setdefault("global_batch_size", imported.micro_batches * degrees["dp"] * degrees["mbs"])
    if imported.copies > 1:
        if degrees["dp"] % imported.copies:
            raise ConfigError(f"dp = {degrees['dp']} must be a multiple of the {imported.copies} copies of the states")
        job["dp_shard"] = degrees["dp"] // imported.copies
    current: dict[str, Value] = {name: degrees[name] for name in DEGREES}
    layers = _uneven_layers(imported.layers, degrees["pp"], degrees["vpp"], model, runtime)
    if imported.assignment:
        current["assignment"] = imported.assignment
    elif layers:
        current["assignment"] = f"layers={numbers_in_words(layers)}"
    return Present(job=job, current=current)


def _replicas(imported: Imported, degrees: Mapping[str, int], devices: int) -> int:
    """Return the data parallel degree, which follows from the number of devices unless the file states it."""
    parts = {name: degrees[name] for name in ("pp", "tp", "cp", "up") if degrees[name] > 1}
    dp = imported.degrees.get("dp")
    if dp is not None:
        parts["dp"] = dp
    one_copy = math.prod(parts.values())
    described = ", ".join(f"{name}={size}" for name, size in parts.items())
    per_host = imported.devices_per_host or 8
    if dp is not None and one_copy != devices:
        raise ConfigError(
            f"the configuration ({described}) occupies {one_copy} devices, but the cluster has {devices}",
            nearest=f"--hosts {max(1, one_copy // per_host)} of {per_host} devices",
        )
    if devices % one_copy:
        raise ConfigError(
            f"one replica ({described}) occupies {one_copy} devices, which must divide the {devices} of the cluster",
            nearest=f"--hosts {-(-one_copy // per_host)} of {per_host} devices, or other degrees by --config",
        )
    return dp if dp is not None else devices // one_copy


def _uneven_layers(
    layers: tuple[int, ...], pp: int, vpp: int, model: ModelSpec, runtime: RuntimeProfile
) -> tuple[int, ...]:
    """Return the layers of each virtual stage [pp * vpp], or an empty tuple if they equal the runtime's default."""
    if not layers:
        return ()
    chunks = pp * vpp
    if len(layers) != chunks or sum(layers) != model.num_layers:
        raise ConfigError(
            f"the layers of the {chunks} virtual stages must add up to the model's {model.num_layers}",
            value=numbers_in_words(layers),
        )
    # number of layers that the runtime assigns to each chunk by default [pp * vpp]
    default = np.bincount(chunk_of_layer(model, runtime, pp, vpp), minlength=chunks)
    return () if tuple(default.tolist()) == layers else layers
