"""Figures of a device that `meshtune catalog` and the atlas show, in one order and with one set of units."""

from __future__ import annotations

from dataclasses import dataclass

from hardware.device import GIB, Device
from hardware.link import Link

PEAKS = ("bf16", "fp16", "fp8", "fp4", "fp32")
"""Precisions whose peaks are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Number that describes a device.

    Attributes:
        column: Its key in the JSON of `meshtune catalog devices`.
        name: What it is, in words.
        value: The number in `unit`; None where the device has none.
        unit: Its unit; empty for a count.
        field: Name under which `Device.sources` has its source.
        kind: Kind of the link whose bandwidth it is; empty for other figures.
    """

    column: str
    name: str
    value: float | None
    unit: str
    field: str
    kind: str = ""


def figures_of(device: Device) -> tuple[Figure, ...]:
    """Return the figures of a device: its peaks, its memory, its links and the devices of a host."""
    return (
        Figure(column="memory_gib", name="memory", value=device.memory_bytes / GIB, unit="GiB", field="memory_gib"),
        *(_peak(name, getattr(device, f"{name}_flop_per_s")) for name in PEAKS),
        Figure(
            column="memory_gb_per_s",
            name="memory bandwidth",
            value=device.memory_bandwidth_bytes_per_s / 1e9,
            unit="GB/s",
            field="memory_bandwidth_gb_per_s",
        ),
        _bandwidth("host_gb_per_s", "link in a host", "scale_up", device.scale_up),
        _bandwidth("network_gb_per_s", "link between hosts", "scale_out", device.scale_out),
        Figure(
            column="devices_per_host",
            name="devices of a host",
            value=device.devices_per_host,
            unit="",
            field="devices_per_host",
        ),
    )


def _peak(precision: str, flop_per_s: float | None) -> Figure:
    column, value = f"{precision}_tflops", None if flop_per_s is None else flop_per_s / 1e12
    return Figure(column=column, name=f"{precision} peak", value=value, unit="TFLOP/s", field=column)


def _bandwidth(column: str, name: str, field: str, link: Link) -> Figure:
    value, source = link.bandwidth_bytes_per_s / 1e9, f"{field}.bandwidth_gb_per_s"
    return Figure(column=column, name=name, value=value, unit="GB/s", field=source, kind=link.kind)
