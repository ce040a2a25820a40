"""Results of a device calibration: times of calls, compared with their formula and the device's peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.operators.isolated import isolated_call_s, isolated_operator
from hardware.cluster import Cluster
from hardware.device import Device
from tuner.search.earlier_runs import IsolatedSample


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationProgress:
    """Progress of a calibration.

    Attributes:
        done: Number of calls with a known time.
        planned: Number of calls in the plan.
        now: Name of the call measured last; empty before the first.
    """

    done: int
    planned: int
    now: str = ""


OnProgress = Callable[[CalibrationProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCalibration:
    """Result of calibrating one device.

    Attributes:
        cluster: Cluster of the study, with only this device.
        precision: Precision of the study's job.
        storage: URL of the storage without its password.
        planned: Number of calls in the plan: those that the study needs most.
        measured: Number of planned calls measured in this calibration.
        known: Number of planned calls measured in earlier calibrations.
        refused: Number of calls that could not be run, by reason.
        left_out: Share of the candidates' predicted steps that no call on this machine represents.
        seconds: Wall time of the calibration [s].
        samples: Times of all calls of the plan that are known.
        notes: Remarks for the user.
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
    samples: tuple[IsolatedSample, ...]
    notes: tuple[str, ...]

    @property
    def device(self) -> Device:
        """Device that was calibrated."""
        return self.cluster.devices[0]

    def as_json(self, plot: Path | None) -> dict[str, Any]:
        """Build the JSON object of `meshtune calibrate --device --json`."""
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
        """Compute per kind the number of shapes and the medians of t_hat over time and of the share of the peak."""
        by_kind: dict[OpKind, list[IsolatedSample]] = {}
        for sample in self.samples:
            by_kind.setdefault(sample.call.kind, []).append(sample)
        return {
            str(kind): {
                "shapes": len(some),
                # A call without a formula gives NaN, which the median ignores.
                "of_formula": _median(
                    (isolated_call_s(sample.call, self.cluster) or np.nan) / sample.time_s for sample in some
                ),
                "of_peak": _median(peak_share(sample, self.device) for sample in some),
            }
            for kind, some in sorted(by_kind.items())
        }


def peak_share(sample: IsolatedSample, device: Device) -> float:
    """Compute the share of the device's peak that a call reached: of its arithmetic, memory or link bandwidth."""
    call = sample.call
    if call.is_collective:
        return call.shape[0] / sample.time_s / device.scale_up.bandwidth_bytes_per_s
    operator = isolated_operator(call)
    # Operators without FLOPs, such as normalisations, are bound by memory: compare those with the bandwidth.
    if operator.flop[0]:
        return float(operator.flop[0]) / sample.time_s / device.peak_flop_per_s(call.precision)
    return float(operator.moved_bytes[0]) / sample.time_s / device.memory_bandwidth_bytes_per_s


def _median(values: Iterable[float]) -> float:
    return float(np.nanmedian(list(values)))
