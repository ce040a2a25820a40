"""The configuration in use, once the devices and the model are known that a file leaves to others."""

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
from costmodels.step.schedules import chunk_of_layer
from hardware.io.errors import ConfigError
from tuner.imports.imported import Imported


@dataclass(frozen=True, kw_only=True, slots=True)
class Present:
    """What a study says of the configuration in use.

    Attributes:
        job: Keys of `job:`, the fixed values of the further dimensions among them.
        current: Keys of `current:`: the eight degrees, and an assignment where layers are uneven; empty where the file
            tells a model alone.
    """

    job: Mapping[str, Any]
    current: Mapping[str, Value]


def present_of(imported: Imported, *, devices: int, model: ModelSpec, runtime: RuntimeProfile) -> Present:
    """The configuration in use on so many devices.

    Args:
        imported: What a file says; nothing of it is open.
        devices: Devices of the cluster.
        model: What is trained.
        runtime: Its profile, which says how layers are dealt out where the file doesn't.

    Raises:
        ConfigError: the degrees and the devices, or the layers and the model, contradict each other.
    """
    assert not imported.open, "whoever asks has filled in what the file leaves open"
    job = dict(imported.job)
    if not imported.has_degrees:
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
    layers = _uneven_layers(imported.layers, degrees["pp"] * degrees["vpp"], model, runtime)
    if imported.assignment:
        current["assignment"] = imported.assignment
    elif layers:
        current["assignment"] = f"layers={numbers_in_words(layers)}"
    return Present(job=job, current=current)


def _replicas(imported: Imported, degrees: Mapping[str, int], devices: int) -> int:
    """Data parallel replicas, which most files leave to the number of devices."""
    parts = {name: degrees[name] for name in ("pp", "tp", "cp", "up") if degrees[name] > 1}
    dp = imported.degrees.get("dp")
    if dp is not None:
        parts["dp"] = dp
    one_copy = math.prod(parts.values())
    told = ", ".join(f"{name}={size}" for name, size in parts.items())
    per_host = imported.devices_per_host or 8
    if dp is not None and one_copy != devices:
        raise ConfigError(
            f"the configuration ({told}) occupies {one_copy} devices, and the cluster has {devices}",
            nearest=f"--hosts {max(1, one_copy // per_host)} of {per_host} devices",
        )
    if devices % one_copy:
        raise ConfigError(
            f"one replica ({told}) occupies {one_copy} devices, which must divide the {devices} of the cluster",
            nearest=f"--hosts {-(-one_copy // per_host)} of {per_host} devices, or other degrees by --config",
        )
    return dp if dp is not None else devices // one_copy


def _uneven_layers(layers: tuple[int, ...], chunks: int, model: ModelSpec, runtime: RuntimeProfile) -> tuple[int, ...]:
    """The layers of each virtual stage where they are not what the runtime does by itself."""
    if not layers:
        return ()
    if len(layers) != chunks or sum(layers) != model.num_layers:
        raise ConfigError(
            f"the layers of the {chunks} virtual stages must add up to the model's {model.num_layers}",
            value=numbers_in_words(layers),
        )
    usual = np.bincount(chunk_of_layer(model, runtime, chunks, 1), minlength=chunks)
    return () if tuple(usual.tolist()) == layers else layers
