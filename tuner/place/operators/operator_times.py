"""Times of operators on unlike devices, from their operations and the data that they move.

Source: the roofline of "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization",
equations 1 and 2: the time is the longer one of arithmetic and memory traffic. Peaks are multiplied by the shares that
large products reach on the device (costmodels/catalog/kernels), and every kernel takes at least the device's latency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from costmodels.operators.kernel_catalog import kernel_constants
from hardware.device import Device


def roofline_s(device: Device, precision: str, flop: float, moved_bytes: float, *, launches: int = 1) -> float:
    """Return the time of an operator on a device [s].

    Args:
        device: Device that runs it.
        precision: Number format of its arithmetic.
        flop: Floating-point operations.
        moved_bytes: Data read from and written to the device's memory.
        launches: Kernels that are launched for it; 0 for a part of another operator's kernel.

    Raises:
        ConfigError: The device has no arithmetic in this precision.
    """
    constants = kernel_constants(device.name).matmul
    share = constants.peak_share * (constants.fp8_share if precision == "fp8" else 1.0)
    arithmetic_s = flop / (device.peak_flop_per_s(precision) * share)
    traffic_s = moved_bytes / (device.memory_bandwidth_bytes_per_s * constants.bandwidth_share)
    return max(arithmetic_s, traffic_s) + launches * constants.latency_s


def measured_s(devices: Sequence[Device], seconds: Mapping[str, float], parts: int = 1) -> tuple[float, ...]:
    """Return measured times on all devices, of one of equal parts; inf on kinds without one [D]."""
    return tuple(seconds.get(device.name, math.inf) / parts for device in devices)
