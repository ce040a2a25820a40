"""Fit of the error models to the errors of left-out sources (costmodels/step/error_models.py).

Letters: n runs, k known ones of all publishers together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml
from scipy.optimize import minimize
from scipy.stats import t as student

from costmodels.step.error_models import CATALOG_FILE, ErrorModel, ErrorModels, MemoryErrorModel, error_models
from hardware.arrays import FloatArray
from tuner.atlas.accuracy import ACCURACY_FILE

MOST_COUNTED = 20
"""Runs that one publisher counts as, at most: those of one cluster share much of their error."""

FREEDOMS = (3, 4, 6, 10, 30)
"""Degrees of freedom that are tried."""

FEWEST_PUBLISHERS = 5
"""Fewest publishers whose errors determine a model."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeftOutErrors:
    """Errors of the predictions of one publisher's runs, by profiles that had not seen them.

    Attributes:
        log_error: Log of measured over predicted step time; nan without a measurement [n].
        effect: Effect of the errors of all constants of the profile on the log step time [n].
        log_memory: Log of measured over predicted memory peak; nan without a measurement [n].
        log_unknown_memory: The same where the study names no profile (`runtime: unknown`) [n].
    """

    log_error: FloatArray
    effect: FloatArray
    log_memory: FloatArray
    log_unknown_memory: FloatArray


def fit_errors(errors: Mapping[str, LeftOutErrors]) -> ErrorModels:
    """Fit the error models by maximum likelihood, each publisher weighing as at most MOST_COUNTED runs.

    A model with fewer than FEWEST_PUBLISHERS publishers is the catalog's.

    Args:
        errors: Errors by publisher.
    """
    of_steps = [each.log_error for each in errors.values()]
    of_memory = [each.log_memory for each in errors.values()]
    timed, peaks = ([int(np.isfinite(each).sum()) for each in some] for some in (of_steps, of_memory))
    return ErrorModels(
        step=_fit_steps(of_steps, [each.effect for each in errors.values()]),
        memory=_fit_memory(of_memory, error_models().memory),
        unknown_memory=_fit_memory(
            [each.log_unknown_memory for each in errors.values()], error_models().unknown_memory
        ),
        fitted_on=f"{sum(timed):,} runs of {sum(count > 0 for count in timed)} publishers, and {sum(peaks):,} memory "
        f"peaks of {sum(count > 0 for count in peaks)} of them",
    )


def _fit_steps(log_errors: Sequence[FloatArray], effects: Sequence[FloatArray]) -> ErrorModel:
    """Fit the model of step times to the errors and effects of each publisher, each [n]."""
    known = _known(log_errors)
    if known is None:
        return error_models().step
    log_error, weight, at = known
    effect = np.concatenate(effects)[at]

    def scale(theta: FloatArray) -> FloatArray:
        """Return the scale of each run [k] at the logarithms of both scales."""
        unseen, constants = np.exp(theta)
        return ErrorModel(unseen=unseen, constants=constants, freedom=FREEDOMS[0]).scale(effect)

    (unseen, constants), freedom = _most_likely(log_error, weight, scale, guess=(0.15, 0.5))
    return ErrorModel(unseen=unseen, constants=constants, freedom=freedom)


def _fit_memory(log_errors: Sequence[FloatArray], catalog: MemoryErrorModel) -> MemoryErrorModel:
    """Fit a model of memory to the errors of each publisher, each [n]; with few publishers it is the catalog's."""
    known = _known(log_errors)
    if known is None:
        return catalog
    log_error, weight, _ = known
    (scale,), freedom = _most_likely(log_error, weight, np.exp, guess=(0.15,))
    return MemoryErrorModel(scale=scale, freedom=freedom)


def _known(log_errors: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray, np.ndarray] | None:
    """Return the measured errors of all publishers [k], their weights [k] and a mask of them; None for too few."""
    kept = [np.isfinite(each) for each in log_errors]
    if sum(at.any() for at in kept) < FEWEST_PUBLISHERS:
        return None
    weight = np.concatenate([np.full(at.sum(), min(1.0, MOST_COUNTED / max(at.sum(), 1))) for at in kept])
    every = np.concatenate(kept)
    return np.concatenate(log_errors)[every], weight, every


def _most_likely(
    log_error: FloatArray, weight: FloatArray, scale: Callable[[FloatArray], FloatArray], *, guess: Sequence[float]
) -> tuple[list[float], int]:
    """Return the most likely parameters of the scale, and degrees of freedom, for errors with weights [k]."""

    def cost(theta: FloatArray, freedom: int) -> float:
        """Return the negative weighted log likelihood at the logarithms of the parameters."""
        scales = scale(theta)
        return float(-np.sum(weight * (student.logpdf(log_error / scales, freedom) - np.log(scales))))

    def search(freedom: int) -> tuple[float, list[float], int]:
        """Return the least cost for these degrees of freedom, and where it is."""
        found = minimize(cost, np.log(guess), args=(freedom,), method="Nelder-Mead")
        return float(found.fun), np.exp(found.x).tolist(), freedom

    _, parameters, freedom = min((search(freedom) for freedom in FREEDOMS), key=lambda each: each[0])
    return parameters, freedom


def write_errors(models: ErrorModels) -> None:
    """Write the models into the catalog, under the comment that the file begins with."""
    comment = [line for line in CATALOG_FILE.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    of_models = [
        f"{name}: {{{', '.join(f'{key}: {value:.4g}' for key, value in model)}}}"
        for name, model in models
        if name != "fitted_on"
    ]
    lines = [*comment, *of_models, f"fitted_on: '{models.fitted_on}'"]
    CATALOG_FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_accuracy(predicted: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Write the errors of each source into the catalog, for the atlas.

    Args:
        predicted: Figures by source, as `--json` has them.
    """
    rows = [
        {
            "source": source,
            "tuned_by": figures["tuned_by"],
            "runs": figures["n"],
            **{name: _rounded(figures[of]) for name, of in _FIGURES.items()},
            "peaks": figures["memory_n"],
            "peak_error": _rounded(figures["memory_median_ape"]),
        }
        for source, figures in predicted
    ]
    head = "# Errors of predictions for each source of measured runs, by profiles fitted without its publisher.\n"
    text = yaml.safe_dump(
        {"made_with": "python -m benchmarks.strangers --predict", "sources": rows},
        sort_keys=False,
        default_flow_style=None,
        width=240,
    )
    ACCURACY_FILE.write_text(head + text, encoding="utf-8")


_FIGURES = {"step_error": "median_ape", "step_signed": "bias", "after_one": "after_one", "inside_95": "covered_95"}
"""Keys of the catalog's file, and those of the figures that they hold."""


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
