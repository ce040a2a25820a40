"""Compute capabilities of NVIDIA's devices."""

from __future__ import annotations

from collections.abc import Mapping

from hardware.device import Device

CAPABILITIES: Mapping[str, tuple[int, int]] = {
    "V100": (7, 0),
    "A100": (8, 0),
    "A800": (8, 0),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "H800": (9, 0),
    "H20": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
}
"""Compute capabilities by the first word of a device's name (docs.nvidia.com, CUDA GPU compute capability)."""


def capability_of(device: Device) -> tuple[int, int] | None:
    """Return the compute capability of a device; None if it is not known."""
    words = device.name.replace("-", " ").split()
    return next((CAPABILITIES[word] for word in words if word in CAPABILITIES), None)
