"""All that is predicted of candidates before a trial, as the tuner's surrogates take it.

Letters: n candidates, c constants, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import ConfigGrid
from costmodels.step.memory import MEMORY_PARTS, MemoryEstimate, estimate_memory
from costmodels.step.step_time import estimate_step
from costmodels.surrogates.features import configuration_features
from costmodels.surrogates.uncertainty import constant_effects
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predicted:
    """What is predicted of n candidates.

    Attributes:
        step_time_s: Step times [n].
        constant_effects: Change of the log step time if one constant of the runtime profile errs by a standard
            deviation [n, c]; see `uncertainty.constant_effects`.
        features: What else sets the candidates apart [n, d]; see features.py.
        needed_bytes: Memory that the fullest device must have [n].
        capacity_bytes: Memory that it has [n].
        peak_bytes: Its peak as trials measure it [n].
        memory_shares: Share that each of MEMORY_PARTS has of `needed_bytes` [n, parts].
        memory_error: Standard deviation of the logarithm of true over predicted memory.
    """

    step_time_s: FloatArray
    constant_effects: FloatArray
    features: FloatArray
    needed_bytes: FloatArray
    capacity_bytes: FloatArray
    peak_bytes: FloatArray
    memory_shares: FloatArray
    memory_error: float

    @classmethod
    def of_times(cls, step_time_s: FloatArray, features: FloatArray) -> Predicted:
        """Candidates of which no more is predicted than their step times [n], and features [n, d] to tell them apart.

        Nothing is said of memory: what runs out of it counts as a surprise.
        """
        count = len(step_time_s)
        if len(features) != count:
            raise ValueError(f"`features` must have one row for each of {count} step times, but got {len(features)}.")
        return cls(
            step_time_s=np.asarray(step_time_s, dtype=np.float64),
            constant_effects=np.zeros((count, 0)),
            features=np.asarray(features, dtype=np.float64),
            needed_bytes=np.ones(count),
            capacity_bytes=np.full(count, np.inf),
            peak_bytes=np.ones(count),
            memory_shares=np.zeros((count, len(MEMORY_PARTS))),
            memory_error=0.0,
        )

    @property
    def knows_memory(self) -> bool:
        """Whether memory was predicted."""
        return bool(np.isfinite(self.capacity_bytes).all())

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self.step_time_s)


def predict(measured: MeasuredSetting, grid: ConfigGrid, *, memory: MemoryEstimate | None = None) -> Predicted:
    """What is predicted of the candidates of one setting.

    Args:
        measured: The job, the cluster, the runtime, and what a measured peak counts.
        grid: The candidates.
        memory: Their memory, if it is at hand.
    """
    setting = measured.setting
    if memory is None:
        memory = estimate_memory(setting, grid)
    estimate = estimate_step(setting, grid, memory=memory)
    effects = constant_effects(setting, grid, memory=memory)
    needed = memory.needed_bytes
    return Predicted(
        step_time_s=estimate.step_time_s,
        constant_effects=np.stack(list(effects.values()), axis=1),
        features=configuration_features(setting.job, setting.cluster, grid, estimate),
        needed_bytes=needed,
        capacity_bytes=memory.capacity_bytes,
        peak_bytes=_measured_peak(measured, grid, memory),
        memory_shares=np.stack([memory.parts_bytes[part] / needed for part in MEMORY_PARTS], axis=1),
        memory_error=setting.runtime.memory_error,
    )


def _measured_peak(measured: MeasuredSetting, grid: ConfigGrid, memory: MemoryEstimate) -> FloatArray:
    """The peak as the setting's trials count it [n], of the stage that they look at."""
    if measured.stage != "fullest":
        memory = estimate_memory(measured.setting, grid, stage=measured.stage)
    return memory.peak_as(measured.memory)


def together(parts: Sequence[Predicted], at: Sequence[IntArray]) -> Predicted:
    """Candidates of several settings as one; `at` says where those of each part go, and all together fill 0..n-1."""
    order = np.argsort(np.concatenate(at))

    def merged(name: str) -> FloatArray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    names = [name for name in Predicted.__slots__ if name != "memory_error"]
    return Predicted(**{name: merged(name) for name in names}, memory_error=max(part.memory_error for part in parts))
