"""Predictions of the cost model for all candidates of a study, as input of the surrogates.

Letters: n candidates, c constants, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import ConfigGrid
from costmodels.step.error_models import MemoryErrorModel, memory_error_of
from costmodels.step.memory.peak import MEMORY_PARTS, MemoryEstimate, estimate_memory
from costmodels.step.step_time import estimate_step
from costmodels.surrogates.features import configuration_features
from costmodels.surrogates.uncertainty import constant_effects, stall_variance
from hardware.arrays import FloatArray, IntArray

PLAN_ERROR = 0.05
"""Standard deviation of the log step time with a sharding plan over that predicted for it, relative to the plan by hand
(assumed): predicted gains are mostly below 0.1, and a runtime may overlap all or nothing of what a plan sends."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predicted:
    """Predictions for n candidates.

    Attributes:
        step_time_s: Predicted step times [n].
        constant_effects: Change of the log step time if one constant of the runtime profile errs by a standard
            deviation [n, c]; see `uncertainty.constant_effects`. In a study with sharding plans, the last column is the
            effect of a plan in place of that by hand, which all layouts share.
        features: Features of the configurations [n, d]; see `features.configuration_features`.
        needed_bytes: Memory that the fullest device needs [n].
        capacity_bytes: Memory capacity of that device [n].
        peak_bytes: Predicted memory peak of that device, counted as trials measure it [n].
        memory_shares: Share of each of MEMORY_PARTS in `needed_bytes` [n, parts].
        memory_error: Distribution of the logarithm of true over predicted memory.
        stall_variance: Variance of the log step time that comes from stalls which may happen or not [n].
    """

    step_time_s: FloatArray
    constant_effects: FloatArray
    features: FloatArray
    needed_bytes: FloatArray
    capacity_bytes: FloatArray
    peak_bytes: FloatArray
    memory_shares: FloatArray
    memory_error: MemoryErrorModel
    stall_variance: FloatArray

    @classmethod
    def of_times(cls, step_time_s: FloatArray, features: FloatArray) -> Predicted:
        """Return candidates of which only step times [n] are predicted, with features [n, d] to tell them apart.

        Memory is not predicted: every candidate is assumed to fit.
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
            memory_error=MemoryErrorModel(scale=0.0),
            stall_variance=np.zeros(count),
        )

    @property
    def knows_memory(self) -> bool:
        """Whether memory was predicted."""
        return bool(np.isfinite(self.capacity_bytes).all())

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self.step_time_s)


def predict(measured: MeasuredSetting, grid: ConfigGrid, *, memory: MemoryEstimate | None = None) -> Predicted:
    """Predict step times and memory of the candidates of one setting.

    Args:
        measured: Job, cluster and runtime, and how a memory peak is measured.
        grid: Candidates to predict.
        memory: Memory estimate of the candidates; computed if left out.
    """
    setting = measured.setting
    if memory is None:
        memory = estimate_memory(setting, grid)
    estimate = estimate_step(setting, grid, memory=memory)
    effects = constant_effects(setting, grid, memory=memory)
    if setting.runtime.layer_changes:
        effects |= {"plan": PLAN_ERROR * grid.is_planned.astype(np.float64)}
    needed = memory.needed_bytes
    return Predicted(
        step_time_s=estimate.step_time_s,
        constant_effects=np.stack(list(effects.values()), axis=1),
        features=configuration_features(setting.job, setting.cluster, grid, estimate),
        needed_bytes=needed,
        capacity_bytes=memory.capacity_bytes,
        peak_bytes=measured.peak_bytes(grid, memory),
        memory_shares=np.stack([memory.parts_bytes[part] / needed for part in MEMORY_PARTS], axis=1),
        memory_error=memory_error_of(setting.runtime),
        stall_variance=stall_variance(setting, grid, estimate.step_time_s, memory=memory),
    )


def together(parts: Sequence[Predicted], at: Sequence[IntArray]) -> Predicted:
    """Merge the candidates of several settings.

    Args:
        parts: Predictions of each setting.
        at: Positions of each part's candidates in the result; together they fill 0..n-1.
    """
    order = np.argsort(np.concatenate(at))

    # the parts are concatenated, then brought into the order of the candidates
    def merged(name: str) -> FloatArray:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    names = [name for name in Predicted.__slots__ if name != "memory_error"]
    widest = max((part.memory_error for part in parts), key=lambda error: error.scale)
    return Predicted(**{name: merged(name) for name in names}, memory_error=widest)
