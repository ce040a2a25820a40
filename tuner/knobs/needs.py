"""What a known knob needs of a study's model and cluster, by names that the catalog uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from costmodels.job.setting import Setting

Need = Callable[[Setting], bool]


def _peak(field: str) -> Need:
    """Return the need that every device has a peak in a precision."""
    return lambda setting: all(getattr(device, field) for device in setting.cluster.devices)


def _links(kind: str) -> Need:
    """Return the need that the devices of every host are joined by links of a kind."""
    return lambda setting: all(kind in device.scale_up.kind for device in setting.cluster.devices)


NEEDS: Mapping[str, tuple[Need, str]] = {
    "experts": (lambda setting: setting.job.model.is_moe, "a model with experts"),
    "dense": (lambda setting: not setting.job.model.is_moe, "a model without experts"),
    "untied embeddings": (lambda setting: not setting.job.model.tied_embeddings, "an untied embedding"),
    "adam": (lambda setting: setting.job.optimizer == "adam", "Adam"),
    "bf16": (lambda setting: setting.job.precision in ("bf16", "fp8", "nvfp4"), "weights in bf16"),
    "fp8": (lambda setting: setting.job.precision == "fp8", "a job in fp8"),
    "nvlink": (_links("nvlink"), "NVLink inside hosts"),
    "hopper": (_peak("fp8_flop_per_s"), "devices with fp8 units, from Hopper on"),
    "blackwell": (_peak("fp4_flop_per_s"), "devices with fp4 units, from Blackwell on"),
    "before blackwell": (
        lambda setting: not any(device.fp4_flop_per_s for device in setting.cluster.devices),
        "devices before Blackwell",
    ),
    "several hosts": (lambda setting: setting.cluster.num_hosts > 1, "more than one host"),
    "accelerators": (
        lambda setting: not any(device.is_processor for device in setting.cluster.devices),
        "accelerators",
    ),
}
"""Needs by name, each with the words for it."""


def unmet_needs(setting: Setting, names: tuple[str, ...]) -> list[str]:
    """Return the needs that a study does not meet, in words."""
    return [NEEDS[name][1] for name in names if not NEEDS[name][0](setting)]
