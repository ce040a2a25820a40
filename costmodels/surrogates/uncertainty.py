"""Uncertainty of a predicted step time: intervals of its logarithm.

A profile's constants were fitted on clusters of others, and a user's cluster differs from all of them. The error of a
prediction there has two parts: what differs even where every constant is known, and the effects of the constants'
errors, which are larger where a step depends on constants that no run has determined. Both are estimated over all
sources of measured runs, each predicted by profiles that had not seen it (`ErrorModel`). Its tails are heavy, so the
error has Student's t distribution.

A profile that was fitted to runs of the user's own cluster states the error of its own held-out runs. It includes the
typical errors of constants, so the larger of the two counts, and its distribution is normal.

Letters: n configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy.special import ndtri, stdtrit

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import CONSTANTS, RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.operators.kernels import cached_kernel_s
from costmodels.step.memory import MemoryEstimate
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray
from hardware.io.config_file import StrictModel, read_mapping, validate_mapping

SIGMA, WIDE = 0.6827, 0.95
"""Probabilities of the two central intervals that are stated."""

NORMAL_WIDE = float(ndtri(0.5 + WIDE / 2))
"""Half-width of the wide interval of a normal distribution, in standard deviations."""

CATALOG_FILE = Path(__file__).parents[1] / "catalog" / "errors.yaml"


class ErrorModel(StrictModel):
    """Error of a prediction on a cluster that no fit has seen.

    The log of true over predicted step time has Student's t distribution of `freedom` degrees of freedom, with the
    scale sqrt(unseen^2 + (constants * effect)^2), where `effect` is that of the errors of all constants of the profile.
    """

    unseen: Annotated[float, Field(gt=0)]
    constants: Annotated[float, Field(ge=0)]
    freedom: Annotated[float, Field(gt=0)]

    def scale(self, effect: FloatArray) -> FloatArray:
        """Return the scale of the distribution for the effects of all constants together [n]."""
        return np.sqrt(self.unseen**2 + (self.constants * effect) ** 2)

    def half_width(self, effect: FloatArray, probability: float) -> FloatArray:
        """Return half the width of the central interval of this probability [n]."""
        return np.asarray(stdtrit(self.freedom, 0.5 + probability / 2) * self.scale(effect))


class ErrorsFile(StrictModel):
    """Grammar of CATALOG_FILE."""

    step: ErrorModel
    fitted_on: str


@cache
def error_model() -> ErrorModel:
    """Return the catalog's error model of step times."""
    return validate_mapping(ErrorsFile, read_mapping(CATALOG_FILE), file=str(CATALOG_FILE)).step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepUncertainty:
    """Uncertainty of n predicted step times.

    Attributes:
        log_error: Half-width of the 68% interval of the logarithm of true over predicted step time [n].
        log_error_95: Half-width of its 95% interval [n].
        from_constants: Contribution of each constant of the profile to `log_error`, by its name, each [n].
        from_cluster: Contribution of a cluster that no fit has seen; 0 if the profile was fitted to the user's own.
    """

    log_error: FloatArray
    log_error_95: FloatArray
    from_constants: Mapping[str, FloatArray]
    from_cluster: float

    def dominant(self, position: int, count: int = 3) -> tuple[tuple[str, float], ...]:
        """Return the constants that contribute most to one configuration's error, largest first, with contributions."""
        effects = {name: float(effect[position]) for name, effect in self.from_constants.items()}
        ordered = sorted(effects.items(), key=lambda entry: -entry[1])
        return tuple((name, effect) for name, effect in ordered[:count] if effect > 0)


def step_uncertainty(setting: Setting, grid: ConfigGrid, *, memory: MemoryEstimate) -> StepUncertainty:
    """Compute the uncertainty of `estimate_step` on a grid."""
    effects = {name: np.abs(effect) for name, effect in constant_effects(setting, grid, memory=memory).items()}
    # constants err independently, so their effects add up in squares
    effect = np.sqrt(np.sum([each**2 for each in effects.values()], axis=0))
    if setting.runtime.knows_cluster:
        error = np.maximum(setting.runtime.step_error, effect)
        return StepUncertainty(
            log_error=error, log_error_95=NORMAL_WIDE * error, from_constants=effects, from_cluster=0.0
        )
    model = error_model()
    sigma = float(stdtrit(model.freedom, 0.5 + SIGMA / 2))
    return StepUncertainty(
        log_error=model.half_width(effect, SIGMA),
        log_error_95=model.half_width(effect, WIDE),
        from_constants={name: sigma * model.constants * each for name, each in effects.items()},
        from_cluster=sigma * model.unseen,
    )


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
    """Return the range around a value whose logarithm errs by `log_error` to either side."""
    return value * math.exp(-log_error), value * math.exp(log_error)
