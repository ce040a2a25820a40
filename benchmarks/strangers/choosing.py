"""Choice of the constants of the search (costmodels/surrogates/search_constants.py), with each publisher left out.

A setting is good if a few trials predict the untried candidates well: the score is the mean logarithm of the
probability density of their measured step times. Trials are drawn among the candidates predicted to be fast, as a
search draws them. Each publisher counts alike.

Letters: m untried candidates, h hypotheses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.special import logsumexp
from scipy.stats import exponnorm, norm

from benchmarks.strangers.left_out import strange_setting
from benchmarks.support.problems import Group
from costmodels.calibration.fidelity import by_setting
from costmodels.calibration.sources import source_of
from costmodels.job.runtime import UNKNOWN, RuntimeProfile
from costmodels.surrogates.hypotheses import step_hypotheses
from costmodels.surrogates.search_constants import CATALOG_FILE, SearchConstants, search_constants
from costmodels.surrogates.surrogate import Fitted, Seen, after
from hardware.arrays import FloatArray, IntArray
from tuner.search.prior import alternative, predict_parts

FEWEST_CANDIDATES = 4
"""Fewest measured candidates of a group that counts."""

MOST_GROUPS = 6
"""Most groups of one publisher, spread evenly over its groups."""

TRIALS = (1, 3, 8)
"""Numbers of trials after which the others are predicted."""

MEASUREMENT_ERROR = 0.01
"""Standard deviation of the log of a measured step time (assumed)."""

FEWEST_PUBLISHERS = 3
"""Fewest publishers with such groups from which constants are chosen."""

NUM_SETTINGS = 48
"""Number of settings that are compared, drawn from all combinations of CHOICES."""

CHOICES: Mapping[str, Sequence[float | tuple[float, float]]] = {
    "noise": (0.03, 0.06, 0.1),
    "rough_length": (0.4, 0.6, 1.0, 1.6),
    "rough_chance": (0.5, 1.0, 2.0, 4.0),
    "alternative_chance": (0.02, 0.05, 0.1, 0.2, 0.4),
    "outliers": ((1.0, 19.0), (2.0, 8.0)),
    "doubt": (0.0, 3.0, 6.0, 12.0),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored:
    """Groups of one publisher to predict under each of some settings: the work of one process.

    Attributes:
        groups: Groups of the publisher.
        profiles: Profiles without the publisher, by name.
        settings: Constants to compare.
    """

    groups: Sequence[Group]
    profiles: Mapping[str, RuntimeProfile]
    settings: Sequence[SearchConstants]


def settings_to_compare() -> tuple[SearchConstants, ...]:
    """Return the catalog's constants, and NUM_SETTINGS - 1 combinations of CHOICES."""
    every = [SearchConstants(**dict(zip(CHOICES, each, strict=True))) for each in product(*CHOICES.values())]
    drawn = np.random.default_rng(0).choice(len(every), NUM_SETTINGS - 1, replace=False)
    return (search_constants(), *(every[place] for place in sorted(drawn.tolist())))


def scores_of(work: Scored) -> FloatArray | None:
    """Return the score of every setting on the publisher's groups; None if none is large enough."""
    large = [group for group in work.groups if np.isfinite(group.step_time_s).sum() >= FEWEST_CANDIDATES]
    if not large:
        return None
    spread = np.unique(np.linspace(0, len(large) - 1, MOST_GROUPS).round().astype(int))
    return np.mean([_scores_of_group(large[place], work) for place in spread], axis=0)


def choose(scores: Mapping[str, FloatArray | None], settings: Sequence[SearchConstants]) -> SearchConstants:
    """Return the setting with the best mean score over publishers; the catalog's if these are too few."""
    known = [score for score in scores.values() if score is not None]
    if len(known) < FEWEST_PUBLISHERS:
        return search_constants()
    return settings[int(np.argmax(np.mean(known, axis=0)))]


def write_constants(chosen: SearchConstants, scores: Mapping[str, FloatArray | None]) -> None:
    """Write the constants into the catalog, under the comment that the file begins with."""
    comment = [line for line in CATALOG_FILE.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    entries = ", ".join(
        f"{name}: {list(value) if isinstance(value, tuple) else value}" for name, value in chosen.model_dump().items()
    )
    publishers = ", ".join(sorted(name for name, score in scores.items() if score is not None))
    lines = [f"constants: {{{entries}}}", f"chosen_on: 'groups of {publishers}'"]
    CATALOG_FILE.write_text("\n".join([*comment, *lines]) + "\n", encoding="utf-8")


def _scores_of_group(group: Group, work: Scored) -> FloatArray:
    """Return the score of every setting on one group, under the right profile and under none."""
    names = (source_of(group.runs[0]).runtime, UNKNOWN)
    return np.mean([_scores_under(group, work, work.profiles[name]) for name in names], axis=0)


def _scores_under(group: Group, work: Scored, profile: RuntimeProfile) -> FloatArray:
    parts = [
        (measured, np.array(at))
        for measured, at in by_setting([strange_setting(run, profile) for run in group.runs]).items()
    ]
    log_time = np.log(group.step_time_s)
    predicted = predict_parts(parts, group.grid)
    others = [each for each in work.profiles.values() if each.name != profile.name]
    alternatives = [alternative(parts, group.grid, each) for each in others]
    scores = np.zeros(len(work.settings))
    for place, constants in enumerate(work.settings):
        steps = step_hypotheses(predicted, None, alternatives, constants)
        by_prediction = np.argsort(steps[0].log_predicted, kind="stable")
        by_prediction = by_prediction[np.isfinite(log_time[by_prediction])]
        for number in TRIALS:
            if number < len(by_prediction):
                # every second of the candidates that are predicted to be fast is tried
                tried = np.sort(by_prediction[: 2 * number : 2])
                untried = np.setdiff1d(by_prediction, tried)
                posterior = after(steps, seen_of(tried, log_time))
                densities = [log_density(each, log_time[untried], untried) for each in posterior.fitted]
                weights = np.log(np.maximum(posterior.probabilities, 1e-300))[:, None]
                scores[place] += np.mean(logsumexp(np.array(densities) + weights, axis=0)) / len(TRIALS)
    return scores


def seen_of(tried: IntArray, log_time: FloatArray) -> Seen:
    """Return what trials of these candidates measure, of all of which the log step times are given."""
    none = np.zeros(0)
    return Seen(
        measured=tried,
        log_value=log_time[tried],
        variance=np.full(len(tried), MEASUREMENT_ERROR**2),
        bounded=none.astype(np.int64),
        log_edge=none,
        side=none,
        mishap=none,
    )


def log_density(fitted: Fitted, log_time: FloatArray, at: IntArray) -> FloatArray:
    """Return the log density of measured log times [m] of untried candidates under one hypothesis.

    An outlier's excess is exponential on top of the Gaussian error, as in `Fitted.draw`.
    """
    mean, deviation = fitted.mean_and_deviation(at)
    usual = norm.logpdf(log_time, mean, deviation)
    if fitted.hypothesis.outliers is None:
        return np.asarray(usual)
    rate, size = fitted.outlier_rate(fitted.hypothesis.outliers), fitted.outlier_size()
    outlying = exponnorm.logpdf(log_time, size / deviation, loc=mean, scale=deviation)
    return np.asarray(np.logaddexp(np.log1p(-rate) + usual, np.log(rate) + outlying))
