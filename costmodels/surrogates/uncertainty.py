"""How far a predicted step time can be trusted: standard deviations of its logarithm.

Two things are known. A profile's `step_error` is the spread of measured over predicted on runs that no fit saw, which
holds the errors that constants typically have. `log_errors` say how well each constant is known, and the configuration
says how much depends on it: a step that waits for launches inherits the launches' error. The sum of squares would count
the constants twice, so the larger of the two is taken: a configuration is never better known than the runs of other
models were predicted, and worse where it leans on a constant that no run has told.

The device's speed is left to `step_error`. Letters: n configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import CONSTANTS, RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.operators.kernels import remembered_kernel_s
from costmodels.step.memory import MemoryEstimate
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepUncertainty:
    """How wrong n predicted step times may be.

    Attributes:
        log_error: Standard deviation of the logarithm of true over predicted step time [n].
        from_constants: What each constant of the profile contributes to it, by name, each [n].
    """

    log_error: FloatArray
    from_constants: Mapping[str, FloatArray]

    def dominant(self, position: int, count: int = 3) -> tuple[tuple[str, float], ...]:
        """The constants that contribute most to one configuration's error, the largest first, with their share."""
        effects = {name: float(effect[position]) for name, effect in self.from_constants.items()}
        ordered = sorted(effects.items(), key=lambda entry: -entry[1])
        return tuple((name, effect) for name, effect in ordered[:count] if effect > 0)


def step_uncertainty(setting: Setting, grid: ConfigGrid, *, memory: MemoryEstimate) -> StepUncertainty:
    """The uncertainty of `estimate_step` on a grid: what all constants contribute, and the profile's `step_error`."""
    effects = {name: np.abs(effect) for name, effect in constant_effects(setting, grid, memory=memory).items()}
    of_constants = np.sqrt(np.sum([effect**2 for effect in effects.values()], axis=0))
    return StepUncertainty(log_error=np.maximum(setting.runtime.step_error, of_constants), from_constants=effects)


def constant_effects(setting: Setting, grid: ConfigGrid, *, memory: MemoryEstimate) -> dict[str, FloatArray]:
    """Change of the log step time if one constant of the profile errs by a standard deviation, by its name, each [n].

    It is the slope of the log step time over the constant's logarithm, times its `log_error`. The slope is a difference
    over one standard deviation, to the side where the bounds leave more room: overlap and launches have kinks that a
    derivative would not see.
    """
    runtime = setting.runtime
    kernel_time = remembered_kernel_s()

    def log_step(profile: RuntimeProfile) -> FloatArray:
        under_profile = replace(setting, runtime=profile)
        return np.log(estimate_step(under_profile, grid, kernel_time=kernel_time, memory=memory).step_time_s)

    base = log_step(runtime)
    effects = {}
    for name, log_error in runtime.log_errors:
        value = float(getattr(runtime, name))
        # a constant that a fact has set to zero is no constant of this run
        moved = _moved(name, value, log_error) if value > 0 and log_error > 0 else value
        if moved == value:
            effects[name] = np.zeros(len(grid))
            continue
        effects[name] = (log_step(runtime.with_constants({name: moved})) - base) / math.log(moved / value) * log_error
    return effects


def _moved(name: str, value: float, log_error: float) -> float:
    """The constant one standard deviation away, inside its bounds, on the side that leaves more room."""
    bounds = CONSTANTS[name]
    up = min(value * math.exp(log_error), bounds.upper)
    down = max(value * math.exp(-log_error), bounds.lower)
    return up if up / value >= value / down else down


def likely_range(value: float, log_error: float) -> tuple[float, float]:
    """One standard deviation to each side of a lognormal quantity: it holds the truth with probability 68%."""
    return value * math.exp(-log_error), value * math.exp(log_error)
