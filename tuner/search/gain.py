"""Gain of a study's best over its reference, as the posterior of both step times has it, given all trials.

The best is the fastest of several noisy measurements, and so a lucky one: the ratio of two measured step times says too
much. The posterior knows the noise of the trials and the predictions, and takes the luck out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from costmodels.job.parallel_config import Value
from hardware.arrays import FloatArray
from tuner.search.observations import Observations

GAIN = "gain"
"""Study attribute with the `KnownGain` after the last trial that changed it, as `as_json`."""

GAIN_DRAWS = 400
"""Number of joint draws of two step times, whose quantiles the gain is."""

SHARED = 0.5
"""Weight of the mean variance of all trials in that of each one: as if they told as much as its own steps (assumed,
after Smyth 2004, section 3; checked in test_gain.py and on simulated worlds)."""

COVERED = 0.9
"""Probability that the interval of a gain holds the true one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGain:
    """Number of times that the best is as fast as the reference.

    Attributes:
        best: Values that identify the best.
        reference: Values that identify the configuration that it is compared with.
        median: Median of the posterior.
        low: Lower end of the interval that holds the true gain with probability COVERED.
        high: Upper end of that interval.
        trials: Number of trials that it knows.
    """

    best: dict[str, Value]
    reference: dict[str, Value]
    median: float
    low: float
    high: float
    trials: int

    @property
    def interval(self) -> tuple[float, float]:
        """Interval that holds the true gain with probability COVERED."""
        return self.low, self.high

    def as_json(self) -> dict[str, Any]:
        """Return the gain as the study keeps it."""
        return asdict(self)


def with_shared_noise(observations: Observations) -> Observations:
    """Return the observations with variances that lean on those of all trials.

    A few steps tell the variance of a trial badly, and the fastest trial is often one whose steps happened to agree.
    """
    variance = observations.variance
    if not len(variance):
        return observations
    return replace(observations, variance=(1 - SHARED) * variance + SHARED * float(variance.mean()))


def known_gain(
    best: Mapping[str, Value], reference: Mapping[str, Value], log_gains: FloatArray, *, trials: int
) -> KnownGain:
    """Return the gain that draws of its logarithm show [M]."""
    low, median, high = gain_quantiles(log_gains)
    return KnownGain(best=dict(best), reference=dict(reference), median=median, low=low, high=high, trials=trials)


def gain_quantiles(log_gains: FloatArray) -> tuple[float, float, float]:
    """Return both ends of the interval and, between them, the median of a gain, from draws of its logarithm [M]."""
    beyond = (1 - COVERED) / 2
    low, median, high = np.exp(np.quantile(log_gains, [beyond, 0.5, 1 - beyond])).tolist()
    return low, median, high


def gain_in(attributes: Mapping[str, Any]) -> KnownGain | None:
    """Return the gain among a study's attributes; None where no driver has kept one."""
    stored = attributes.get(GAIN)
    return KnownGain(**{each.name: stored[each.name] for each in fields(KnownGain)}) if stored else None
