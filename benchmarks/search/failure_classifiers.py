"""Judge classifiers of failures by the log loss of trials that they have not seen.

    python -m benchmarks.search.failure_classifiers [--measured C.csv ...] [--worlds 64,16] [--seeds 3] [--json]

Worlds are those of failing_trials.py: made-up ones, and published sweeps with failures. In each, the first 2, 4, 8, 16
and 32 candidates are tried in the order of their predicted step times, with 30% of noise, which a seed decides. Then
the chance to fail of each of the next quarter of the candidates, in that order, is held against what happens. No
classifier keeps anything from one world to another, so that every source is one that it has not seen.

- belief: what the memory model and the model of crashes say after the same trials, without a classifier.
- gaussian process: the classifier of the search (costmodels/surrogates/failure_classifier.py).
- logistic: a logistic regression on the same inputs. The belief counts as a few weighted trials all over the space.
- forest: a random forest, likewise.

Log losses are in nats, means over seeds; chances are held within 0.1% and 99.9%.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import optuna
from scipy.special import logit
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression

from benchmarks.search.failing_trials import MODELS, World, made_up, published
from benchmarks.support.timing import benchmark_parser, count_at_least, publish, tell
from costmodels.surrogates.failure_classifier import failure_chances
from hardware.arrays import FloatArray, IntArray
from trials.backend import Observation, Status
from tuner.search.observations import Observations, observations_of
from tuner.search.posterior import Posterior

TRIED = (2, 4, 8, 16, 32)
ORDER_NOISE = 0.3
"""Standard deviation of the log step time by which the order of trials differs from the predicted one."""
LEAST = 1e-3
SUREST = 0.02
"""Least chance to fail, or to run, that the belief counts as."""
IMAGINED, IMAGINED_WEIGHT = 40, 5.0
"""Candidates at which the belief counts as a trial, and the weight of all of them together in real trials."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Told:
    """What a classifier knows.

    Attributes:
        belief: Chance of each candidate to fail, as the models say after the same trials [n].
        features: Features of the candidates [n, d].
        ran: Candidates that ran.
        failed: Candidates that failed.
        mishap: Rate of mishaps.
    """

    belief: FloatArray
    features: FloatArray
    ran: IntArray
    failed: IntArray
    mishap: float


def _by_process(told: Told) -> FloatArray:
    return failure_chances(told.belief, told.features, told.ran, told.failed, mishap=told.mishap)


def _by_scikit(told: Told, classifier: LogisticRegression | RandomForestClassifier) -> FloatArray:
    belief = np.clip(told.belief, SUREST, 1 - SUREST)
    points = np.column_stack([logit(belief), told.features - told.features.mean(axis=0)])
    at = np.unique(np.linspace(0, len(points) - 1, IMAGINED).astype(np.int64))
    weight = IMAGINED_WEIGHT / len(at)
    classifier.fit(
        np.concatenate([points[told.ran], points[told.failed], points[at], points[at]]),
        np.repeat([False, True, False, True], [len(told.ran), len(told.failed), len(at), len(at)]),
        np.concatenate([np.ones(len(told.ran) + len(told.failed)), weight * (1 - belief[at]), weight * belief[at]]),
    )
    return np.asarray(classifier.predict_proba(points)[:, 1])


CLASSIFIERS: dict[str, Callable[[Told], FloatArray]] = {
    "belief": lambda told: told.belief,
    "gaussian process": _by_process,
    "logistic": lambda told: _by_scikit(told, LogisticRegression()),
    "forest": lambda told: _by_scikit(told, RandomForestClassifier(random_state=0)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each world, and the means of the published and of all worlds."""
    parser = benchmark_parser("search.failure_classifiers", __doc__)
    parser.add_argument("--worlds", default=",".join(MODELS), help="comma-separated made-up worlds (64,16)")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="files of published runs")
    parser.add_argument("--min-candidates", type=count_at_least(2), default=20, help="smallest sweep (20)")
    parser.add_argument("--seeds", type=count_at_least(1), default=3)
    given = parser.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    worlds = [made_up(name) for name in given.worlds.split(",") if name]
    worlds += published(given.measured, given.min_candidates) if given.measured else []
    rows = []
    for world in worlds:
        losses = [_losses(world, seed) for seed in range(given.seeds)]
        rows.append(
            {"world": world.name} | {name: float(np.mean([each[name] for each in losses])) for name in CLASSIFIERS}
        )
        tell(str(rows[-1]))
    rows.append({"world": "mean"} | {name: float(np.mean([row[name] for row in rows])) for name in CLASSIFIERS})
    publish(
        [{key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} for row in rows],
        as_json=given.json,
    )
    return 0


def _losses(world: World, seed: int) -> dict[str, float]:
    """Return the mean log loss of each classifier in a world."""
    posterior, rng = world.posterior, np.random.default_rng(seed)
    predicted, count = posterior.predicted, len(world.step_time_s)
    outcomes = [world.outcome(position, rng) for position in range(count)]
    fails = np.array([outcome.status is not Status.OK for outcome in outcomes])
    order = np.argsort(np.log(predicted.step_time_s) + ORDER_NOISE * rng.standard_normal(count))
    found: dict[str, list[float]] = {name: [] for name in CLASSIFIERS}
    for size in TRIED:
        rest = order[size : size + max(count // 4, 1)]
        if not len(rest):
            break
        told = _told(posterior, order[:size], outcomes)
        for name, classifier in CLASSIFIERS.items():
            chances = np.clip(classifier(told)[rest], LEAST, 1 - LEAST)
            found[name].append(float(-np.log(np.where(fails[rest], chances, 1 - chances)).mean()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _told(posterior: Posterior, tried: IntArray, outcomes: Sequence[Observation]) -> Told:
    observations = _observations(tried, outcomes)
    failed = np.array(sorted(observations.impossible), dtype=np.int64)
    return Told(
        belief=posterior.believed_to_fail(observations, np.random.default_rng(0)),
        features=posterior.predicted.features,
        ran=observations.measured,
        failed=failed,
        mishap=posterior.mishap_rate(observations),
    )


def _observations(tried: IntArray, outcomes: Sequence[Observation]) -> Observations:
    ran = [at for at in tried.tolist() if outcomes[at].status is Status.OK]

    def of_status(status: Status) -> frozenset[int]:
        return frozenset(at for at in tried.tolist() if outcomes[at].status is status)

    return replace(
        observations_of([], lambda _: None),
        measured=np.array(ran, dtype=np.int64),
        log_step_s=np.log([outcomes[at].step_time_s or 1.0 for at in ran]),
        variance=np.full(len(ran), 1e-4),
        peaks_bytes={at: peak for at in ran if (peak := outcomes[at].peak_memory_bytes) is not None},
        explored=frozenset(ran),
        misfits=of_status(Status.OUT_OF_MEMORY),
        crashed=of_status(Status.CRASHED),
    )


if __name__ == "__main__":
    sys.exit(main())
