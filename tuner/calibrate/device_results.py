"""What a calibration of a device finds: times of calls, beside their formula and the device's peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.operators.isolated import lone_call_s, lone_operator
from costmodels.operators.layer_operators import OpKind
from hardware.cluster import Cluster
from hardware.device import Device
from tuner.search.earlier_runs import LoneSample


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationProgress:
    """How far a calibration is.

    Attributes:
        done: Calls whose time is known.
        planned: Calls of the plan.
        now: What was measured last; empty before.
    """

    done: int
    planned: int
    now: str = ""


OnProgress = Callable[[CalibrationProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCalibration:
    """What is known of a device.

    Attributes:
        cluster: The study's, of that one device.
        precision: Of the study's job.
        storage: Where it stands, as it may be shown.
        planned: Calls that the study needs most.
        measured: Those of them that were measured now.
        known: Those that had been before.
        refused: Calls that could not be run, by reason.
        left_out: Share of the candidates' predicted steps that no call of this machine stands for.
        seconds: Wall time.
        samples: The times of all calls of the plan that are known.
        notes: What a user should know.
    """

    cluster: Cluster
    precision: str
    storage: str
    planned: int
    measured: int
    known: int
    refused: dict[str, int]
    left_out: float
    seconds: float
    samples: tuple[LoneSample, ...]
    notes: tuple[str, ...]

    @property
    def device(self) -> Device:
        """The device."""
        return self.cluster.devices[0]

    def as_json(self, plot: Path | None) -> dict[str, Any]:
        """What `meshtune calibrate --device --json` prints."""
        return {
            "device": self.device.name,
            "precision": self.precision,
            "measured": self.measured,
            "known": self.known,
            "planned": self.planned,
            "seconds": self.seconds,
            "kinds": self.kinds(),
            "refused": self.refused,
            "left_out": self.left_out,
            "plot": None if plot is None else str(plot),
            "storage": self.storage,
        }

    def kinds(self) -> dict[str, dict[str, Any]]:
        """For each kind its number of shapes, and medians: of t_hat over the time, and of the share of the peak."""
        by_kind: dict[OpKind, list[LoneSample]] = {}
        for sample in self.samples:
            by_kind.setdefault(sample.call.kind, []).append(sample)
        return {
            str(kind): {
                "shapes": len(some),
                "of_formula": _median(
                    (lone_call_s(sample.call, self.cluster) or np.nan) / sample.time_s for sample in some
                ),
                "of_peak": _median(peak_share(sample, self.device) for sample in some),
            }
            for kind, some in sorted(by_kind.items())
        }


def peak_share(sample: LoneSample, device: Device) -> float:
    """Share of the device's peak that a call reached: of its arithmetic, its memory, or its link to its neighbours."""
    call = sample.call
    if call.is_collective:
        return call.shape[0] / sample.time_s / device.scale_up.bandwidth_bytes_per_s
    operator = lone_operator(call)
    if operator.flop[0]:
        return float(operator.flop[0]) / sample.time_s / device.peak_flop_per_s(call.precision)
    return float(operator.moved_bytes[0]) / sample.time_s / device.memory_bandwidth_bytes_per_s


def _median(values: Iterable[float]) -> float:
    return float(np.nanmedian(list(values)))
