"""Errors of predictions on clusters that no fit has seen, as the catalog states them, and the error of memory.

They are fitted to all sources of measured runs, each predicted by profiles that had not seen it. Tails are heavy, so
the logs of true over predicted values have Student's t distribution. A profile that was fitted to runs of the user's
own cluster states the spread that it left there, which is normal.

Letters: n configurations.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from costmodels.job.runtime import UNKNOWN, RuntimeProfile
from costmodels.step.normal_distribution import normal_cdf
from hardware.arrays import FloatArray
from hardware.io.config_file import StrictModel, read_mapping, validate_mapping

CATALOG_FILE = Path(__file__).parents[1] / "catalog" / "errors.yaml"


class ErrorModel(StrictModel):
    """Error of a predicted step time on a cluster that no fit has seen.

    The log of true over predicted step time has Student's t distribution of `freedom` degrees of freedom, with the
    scale sqrt(unseen^2 + (constants * effect)^2), where `effect` is that of the errors of all constants of the profile.
    """

    unseen: Annotated[float, Field(gt=0)]
    constants: Annotated[float, Field(ge=0)]
    freedom: Annotated[int, Field(ge=1)]

    def scale(self, effect: FloatArray) -> FloatArray:
        """Return the scale of the distribution for the effects of all constants together [n]."""
        return np.sqrt(self.unseen**2 + (self.constants * effect) ** 2)


class MemoryErrorModel(StrictModel):
    """Error of predicted memory: the distribution of the log of true over predicted memory.

    It is Student's t with `freedom` degrees of freedom, times `scale`; normal where `freedom` is None.
    """

    scale: Annotated[float, Field(ge=0)]
    freedom: Annotated[int, Field(ge=1)] | None = None

    def probability_below(self, log_margin: FloatArray) -> FloatArray:
        """Return the probability that the log of true over predicted memory is at most each value [n]."""
        standardised = log_margin / self.scale
        return normal_cdf(standardised) if self.freedom is None else student_cdf(standardised, self.freedom)


class ErrorModels(StrictModel):
    """Grammar of CATALOG_FILE.

    `memory` is the error under the profile of the framework, `unknown_memory` that under the profile for frameworks
    that the catalog lacks.
    """

    step: ErrorModel
    memory: MemoryErrorModel
    unknown_memory: MemoryErrorModel
    fitted_on: str


@cache
def error_models() -> ErrorModels:
    """Return the catalog's error models."""
    return validate_mapping(ErrorModels, read_mapping(CATALOG_FILE), file=str(CATALOG_FILE))


def memory_error_of(runtime: RuntimeProfile) -> MemoryErrorModel:
    """Return the error of memory predicted with a profile."""
    if runtime.knows_memory:
        return MemoryErrorModel(scale=runtime.memory_error)
    models = error_models()
    return models.unknown_memory if runtime.name == UNKNOWN else models.memory


def student_cdf(standardised: FloatArray, freedom: int) -> FloatArray:
    """Return the probability that a variable of Student's t distribution is at most each value [n].

    `scipy.special.stdtr` gives the same values; see normal_distribution.py. Source: Abramowitz and Stegun, 26.7.3 and
    26.7.4, finite sums for whole degrees of freedom.
    """
    sine = standardised / np.sqrt(freedom + standardised**2)
    cosine = np.sqrt(freedom / (freedom + standardised**2))
    is_odd = freedom % 2
    # each term is the one before times cos^2 and a ratio of neighbouring whole numbers
    term = cosine if is_odd else np.ones_like(cosine)
    total = term if freedom > 1 else np.zeros_like(cosine)
    for number in range(1 + is_odd, freedom - 2, 2):
        term = term * cosine**2 * number / (number + 1)
        total = total + term
    central = sine * total
    if is_odd:
        central = (np.arctan(standardised / np.sqrt(freedom)) + central) * 2 / np.pi
    return np.asarray(np.clip(0.5 + central / 2, 0.0, 1.0))
