"""Uncertainty of a predicted step time and of predicted memory: intervals of their logarithms.

A profile's constants were fitted on clusters of others, and a user's cluster differs from all of them. The error of a
prediction there has two parts: what differs even where every constant is known, and the effects of the constants'
errors, which are larger where a step depends on constants that no run has determined. Both are estimated over all
sources of measured runs, each predicted by profiles that had not seen it (costmodels/step/error_models.py). Its tails
are heavy, so the error has Student's t distribution.

A profile that was fitted to runs of the user's own cluster states the error of its own held-out runs. It includes the
typical errors of constants, so the larger of the two counts, and its distribution is normal.

Letters: n configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import CONSTANTS, RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.operators.kernels import cached_kernel_s
from costmodels.step.error_models import error_models, memory_error_of, student_cdf
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.overheads import stalled_share
from costmodels.step.placement import spanned_domains
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray

SIGMA, WIDE = 0.6827, 0.95
"""Probabilities of the two central intervals that are stated."""

HOST_SPREAD = 0.34
"""Deviation of the log of `launch_s` over kinds of hosts (`python -m benchmarks.calibration.host_time`). A fit to the
clusters of others tells their mean, and a cluster that no fit has seen has hosts of its own."""

IMPOSSIBLE = 1e-12
"""Chance of stalls below which they cannot be told from the predicted step time."""


@cache
def half_width(freedom: int | None, probability: float) -> float:
    """Return half the width of the central interval of this probability, in scales.

    Args:
        freedom: Degrees of freedom of Student's t distribution; None for a normal one.
        probability: Probability of the interval.
    """
    width = 0.0
    while True:
        # the probability inside is concave in the width, so Newton's method nears the root from 0 without passing it
        inside, density = _inside(freedom, width)
        step = (probability - inside) / density
        if step <= 1e-14 * width:
            return width
        width += step


def _inside(freedom: int | None, width: float) -> tuple[float, float]:
    """Return the probability of the central interval of this half-width [scales], and its derivative."""
    if freedom is None:
        return math.erf(width * math.sqrt(0.5)), math.sqrt(2 / math.pi) * math.exp(-(width**2) / 2)
    ratio = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = math.exp(ratio - (freedom + 1) / 2 * math.log1p(width**2 / freedom)) / math.sqrt(freedom * math.pi)
    return 2 * float(student_cdf(np.array(width), freedom)) - 1, 2 * density


def memory_half_width(runtime: RuntimeProfile, probability: float) -> float:
    """Return half the width of the central interval of the log of true over predicted memory under a profile."""
    error = memory_error_of(runtime)
    return error.scale * half_width(error.freedom, probability)


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

    def dominant(self, position: int) -> tuple[tuple[str, float], ...]:
        """Return the three constants that contribute most to one configuration's error, with contributions."""
        effects = {name: float(effect[position]) for name, effect in self.from_constants.items()}
        ordered = sorted(effects.items(), key=lambda entry: -entry[1])
        return tuple((name, effect) for name, effect in ordered[:3] if effect > 0)


def step_uncertainty(setting: Setting, grid: ConfigGrid, *, memory: MemoryEstimate) -> StepUncertainty:
    """Compute the uncertainty of `estimate_step` on a grid."""
    effects = {name: np.abs(effect) for name, effect in constant_effects(setting, grid, memory=memory).items()}
    # constants err independently, so their effects add up in squares
    effect = np.sqrt(np.sum([each**2 for each in effects.values()], axis=0))
    if setting.runtime.knows_cluster:
        error = np.maximum(setting.runtime.step_error, effect)
        return StepUncertainty(
            log_error=error, log_error_95=half_width(None, WIDE) * error, from_constants=effects, from_cluster=0.0
        )
    model = error_models().step
    scale, sigma = model.scale(effect), half_width(model.freedom, SIGMA)
    return StepUncertainty(
        log_error=sigma * scale,
        log_error_95=half_width(model.freedom, WIDE) * scale,
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
    for name, fitted in runtime.log_errors:
        value = float(getattr(runtime, name))
        is_others = name == "launch_s" and fitted > 0 and not runtime.knows_cluster
        log_error = max(fitted, HOST_SPREAD) if is_others else fitted
        # a fact of the run may fix a constant at zero, and then it has no error
        moved = _move(name, value, log_error) if value > 0 and log_error > 0 else value
        if moved == value:
            effects[name] = np.zeros(len(grid))
            continue
        effects[name] = (log_step(runtime.with_constants({name: moved})) - base) / math.log(moved / value) * log_error
    return effects


def stall_variance(
    setting: Setting, grid: ConfigGrid, step_time_s: FloatArray, *, memory: MemoryEstimate
) -> FloatArray:
    """Compute the variance of the log step time that comes from stalls which may happen or not [n].

    A prediction contains the expected stalls, but almost all micro-batches of a run stall, or none does. If they stall
    with probability s and the log step time is then r longer, its variance is s (1 - s) r^2.

    Args:
        setting: Job, cluster and runtime.
        grid: Configurations [n].
        step_time_s: Predicted step times [n].
        memory: Memory of the same configurations.
    """
    calm = replace(setting, runtime=replace(setting.runtime, stall_s=0.0))
    calm_s = estimate_step(calm, grid, kernel_time=cached_kernel_s(), memory=memory).step_time_s
    share = stalled_share(setting.cluster, setting.runtime, spanned_domains(setting.cluster, grid, "pp"), memory)
    stalls_s = (step_time_s - calm_s) / np.maximum(share, IMPOSSIBLE)
    return np.asarray(share * (1 - share) * np.log1p(stalls_s / calm_s) ** 2)


def _move(name: str, value: float, log_error: float) -> float:
    """Return the constant one standard deviation away, inside its bounds, on the side with more room."""
    bounds = CONSTANTS[name]
    up = min(value * math.exp(log_error), bounds.upper)
    down = max(value * math.exp(-log_error), bounds.lower)
    return up if up / value >= value / down else down


def likely_range(value: float, log_error: float) -> tuple[float, float]:
    """Return the range around a value whose logarithm errs by `log_error` to either side."""
    return value * math.exp(-log_error), value * math.exp(log_error)
