"""Time one suggestion of the sampler: refit, 100 joint draws of all candidates, and the choice.

    python -m benchmarks.speed.sampler [--repeats 5] [--sizes 2] [--json]

Optuna's GPSampler is timed for comparison: it suggests a trial after as many trials of the same degrees. Targets on 2
cores: under 0.2 s at 3,000 candidates and 50 trials, under 1.5 s on all 58,205 of Pangu-135B and 200 trials.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import optuna

from benchmarks.support.timing import arguments, median_s, publish
from costmodels.job.parallel_config import DEGREES, ConfigGrid
from costmodels.surrogates.predicted import Predicted, predict
from tuner.search.observations import Observations
from tuner.search.posterior import Posterior
from tuner.search.prior import initial_posterior
from tuner.search.sampler import ThompsonSampler
from tuner.space.enumeration import enumerate_space
from tuner.study_file.config import load_study

STUDIES = Path(__file__).parents[2] / "configs" / "studies" / "flexparallel"


def main() -> None:
    """Time both spaces; the large one includes candidates that memory pruning would drop."""
    options = arguments(__doc__ or "", repeats=5, sizes=2)
    config = load_study(STUDIES / "pangu-135b-6144.yaml")
    grid, _ = enumerate_space(config.problem.setting, config.problem.options)
    rows = []
    for size, num_trials in ((3_000, 50), (len(grid), 200))[: options.sizes]:
        some = grid.take(np.arange(size))
        predicted = predict(config.problem.subject.measured_setting, some)
        posterior = initial_posterior([(config.problem.subject.measured_setting, np.arange(size))], some)
        own_s = _sampler_s(posterior, some, num_trials, options.repeats)
        peer_s = _peer_s(predicted, some, num_trials, options.repeats)
        rows.append(
            {"candidates": size, "trials": num_trials, "seconds": own_s, "optuna_gp_s": peer_s, "ratio": peer_s / own_s}
        )
    publish(rows, as_json=options.json)


def _sampler_s(posterior: Posterior, grid: ConfigGrid, num_trials: int, repeats: int) -> float:
    """Measure the median time of one refit, 100 draws and the choice [s]; every fifth trial ran out of memory."""
    sampler, predicted = ThompsonSampler(grid, posterior), posterior.predicted
    rng = np.random.default_rng(0)

    def step() -> int:
        tried = rng.choice(len(grid), num_trials, replace=False)
        measured, misfits = tried[num_trials // 5 :], tried[: num_trials // 5]
        # A smooth error of 20% that the surrogate can learn, and 2% noise.
        error = 0.2 * np.sin(3 * predicted.features[measured, 0]) + 0.02 * rng.standard_normal(len(measured))
        return sampler.choose(
            Observations(
                measured=measured,
                log_step_s=np.log(predicted.step_time_s[measured]) + error,
                variance=np.full(len(measured), 0.01**2),
                num_completed=np.ones(len(measured), dtype=np.int64),
                num_trials=dict.fromkeys(tried.tolist(), 1),
                best_s=float(predicted.step_time_s[measured].min()),
                limits_s={},
                peaks_bytes={int(at): int(predicted.peak_bytes[at] * 1.1) for at in measured},
                explored=frozenset(measured.tolist()),
                misfits=frozenset(misfits.tolist()),
                crashed=frozenset(),
                pending=frozenset(),
                samples=(),
                num_decisions=num_trials,
            )
        )

    return median_s(step, repeats)


def _peer_s(predicted: Predicted, grid: ConfigGrid, num_trials: int, repeats: int) -> float:
    """Measure the median time in which Optuna's GPSampler suggests the degrees of one trial [s]."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.IntDistribution(1, int(getattr(grid, name).max()), log=True) for name in DEGREES
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(sampler=optuna.samplers.GPSampler(seed=0))
    rng = np.random.default_rng(0)
    for at in rng.choice(len(grid), num_trials, replace=False):
        params = {name: int(getattr(grid, name)[at]) for name in DEGREES}
        study.add_trial(
            optuna.trial.create_trial(
                params=params, distributions=distributions, value=float(predicted.step_time_s[at])
            )
        )

    def ask() -> None:
        trial = study.ask(fixed_distributions=distributions)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)

    return median_s(ask, repeats)


if __name__ == "__main__":
    main()
