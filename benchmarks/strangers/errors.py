"""Fit of the error model to the errors of left-out sources (costmodels/surrogates/uncertainty.py).

Letters: n runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.stats import t as student

from costmodels.surrogates.uncertainty import CATALOG_FILE, ErrorModel, error_model
from hardware.arrays import FloatArray

MOST_COUNTED = 20
"""Runs that one publisher counts as, at most: those of one cluster share much of their error."""

FREEDOMS = (3.0, 4.0, 6.0, 10.0, 30.0)
"""Degrees of freedom that are tried."""

FEWEST_PUBLISHERS = 5
"""Fewest publishers whose errors determine a model."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeftOutErrors:
    """Errors of the predictions of one publisher's runs, by profiles that had not seen them.

    Attributes:
        log_error: Log of measured over predicted step time; nan without a measurement [n].
        effect: Effect of the errors of all constants of the profile on the log step time [n].
    """

    log_error: FloatArray
    effect: FloatArray


def fit_errors(errors: Mapping[str, LeftOutErrors]) -> ErrorModel:
    """Fit the error model by maximum likelihood, each publisher weighing as at most MOST_COUNTED runs.

    With fewer than FEWEST_PUBLISHERS publishers it is the catalog's.

    Args:
        errors: Errors by publisher.
    """
    timed = [each for each in errors.values() if np.isfinite(each.log_error).any()]
    if len(timed) < FEWEST_PUBLISHERS:
        return error_model()
    kept = [np.isfinite(each.log_error) for each in timed]
    log_error = np.concatenate([each.log_error[at] for each, at in zip(timed, kept, strict=True)])
    effect = np.concatenate([each.effect[at] for each, at in zip(timed, kept, strict=True)])
    weight = np.concatenate([np.full(at.sum(), min(1.0, MOST_COUNTED / at.sum())) for at in kept])

    def cost(theta: FloatArray, freedom: float) -> float:
        """Return the negative weighted log likelihood at the logarithms of both scales."""
        unseen, constants = np.exp(theta)
        scale = ErrorModel(unseen=unseen, constants=constants, freedom=freedom).scale(effect)
        return float(-np.sum(weight * (student.logpdf(log_error / scale, freedom) - np.log(scale))))

    def search(freedom: float) -> tuple[float, ErrorModel]:
        """Return the least cost for these degrees of freedom, and its model."""
        found = minimize(cost, np.log([0.15, 0.5]), args=(freedom,), method="Nelder-Mead")
        unseen, constants = np.exp(found.x).tolist()
        return float(found.fun), ErrorModel(unseen=unseen, constants=constants, freedom=freedom)

    return min((search(freedom) for freedom in FREEDOMS), key=lambda each: each[0])[1]


def write_errors(model: ErrorModel, errors: Mapping[str, LeftOutErrors]) -> None:
    """Write the model into the catalog, under the comment that the file begins with."""
    timed = [int(np.isfinite(each.log_error).sum()) for each in errors.values()]
    comment = [line for line in CATALOG_FILE.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    entries = ", ".join(f"{name}: {value:.4g}" for name, value in model)
    lines = [
        f"step: {{{entries}}}",
        f"fitted_on: '{sum(timed):,} runs of {sum(count > 0 for count in timed)} publishers'",
    ]
    CATALOG_FILE.write_text("\n".join([*comment, *lines]) + "\n", encoding="utf-8")
