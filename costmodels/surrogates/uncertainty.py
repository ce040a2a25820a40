"""Uncertainty of a predicted step time: standard deviations of its logarithm.

There are two sources. The profile's `step_error` is the spread of measured over predicted times on held-out runs, which
includes the typical errors of constants. Its `log_errors` state how well each constant is known, and the configuration
determines how much the step depends on it: a step that waits for launches inherits the launches' error. A sum of
squares would count the constants twice, so the larger of the two counts. A configuration is then never more certain
than held-out runs were, and less certain where it depends on a constant that no run has determined.

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
from costmodels.operators.kernels import cached_kernel_s
from costmodels.step.memory import MemoryEstimate
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepUncertainty:
    """Uncertainty of n predicted step times.

    Attributes:
        log_error: Standard deviation of the logarithm of true over predicted step time [n].
        from_constants: Contribution of each constant of the profile, by its name, each [n].
    """

    log_error: FloatArray
    from_constants: Mapping[str, FloatArray]

    def dominant(self, position: int, count: int = 3) -> tuple[tuple[str, float], ...]:
        """Return the constants that contribute most to one configuration's error, largest first, with contributions."""
        effects = {name: float(effect[position]) for name, effect in self.from_constants.items()}
        ordered = sorted(effects.items(), key=lambda entry: -entry[1])
        return tuple((name, effect) for name, effect in ordered[:count] if effect > 0)


def step_uncertainty(setting: Setting, grid: ConfigGrid, *, memory: MemoryEstimate) -> StepUncertainty:
    """Compute the uncertainty of `estimate_step` on a grid from all constants and the profile's `step_error`."""
    effects = {name: np.abs(effect) for name, effect in constant_effects(setting, grid, memory=memory).items()}
    # constants err independently, so their effects add up in squares
    of_constants = np.sqrt(np.sum([effect**2 for effect in effects.values()], axis=0))
    return StepUncertainty(log_error=np.maximum(setting.runtime.step_error, of_constants), from_constants=effects)


def constant_effects(setting: Setting, grid: ConfigGrid, *, memory: MemoryEstimate) -> dict[str, FloatArray]:
    """Compute the change of the log step time per standard deviation of each constant, by its name, each [n].

    It is the slope of the log step time over the constant's logarithm, times its `log_error`. The slope is a difference
    over one standard deviation, to the side where the bounds leave more room: overlap and launches have kinks that a
    derivative would not see.
    """
    runtime = setting.runtime
    kernel_time = cached_kernel_s()

    def log_step(profile: RuntimeProfile) -> FloatArray:
        under_profile = replace(setting, runtime=profile)
        return np.log(estimate_step(under_profile, grid, kernel_time=kernel_time, memory=memory).step_time_s)

    # finite differences over a whole standard deviation see the kinks that overlap makes
    base = log_step(runtime)
    effects = {}
    for name, log_error in runtime.log_errors:
        value = float(getattr(runtime, name))
        # a fact of the run may fix a constant at zero, and then it has no error
        moved = _move(name, value, log_error) if value > 0 and log_error > 0 else value
        if moved == value:
            effects[name] = np.zeros(len(grid))
            continue
        effects[name] = (log_step(runtime.with_constants({name: moved})) - base) / math.log(moved / value) * log_error
    return effects


def _move(name: str, value: float, log_error: float) -> float:
    """Return the constant one standard deviation away, inside its bounds, on the side with more room."""
    bounds = CONSTANTS[name]
    up = min(value * math.exp(log_error), bounds.upper)
    down = max(value * math.exp(-log_error), bounds.lower)
    return up if up / value >= value / down else down


def likely_range(value: float, log_error: float) -> tuple[float, float]:
    """Return the range of one standard deviation of a lognormal quantity; the truth is in it with probability 68%."""
    return value * math.exp(-log_error), value * math.exp(log_error)
