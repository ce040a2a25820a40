"""One sampler step: refit with 50 trials and 100 draws, on a large and on a middling space.

Targets on 2 cores: under 1 s on the 58,205 candidates of Pangu-135B, under 0.15 s on 3,000 candidates.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.timing import arguments, median_s, publish
from costmodels.features import configuration_features
from costmodels.memory import estimate_memory
from costmodels.operators import FloatArray
from costmodels.step_time import estimate_step
from tuner.config import load_study
from tuner.sampler import History, ThompsonSampler
from tuner.space import enumerate_space

STUDIES = Path(__file__).parents[1] / "configs" / "studies" / "flexparallel"


def step_s(
    sampler: ThompsonSampler, features: FloatArray, predicted_s: FloatArray, num_trials: int, repeats: int
) -> float:
    """Median time of one refit, 100 draws and the choice."""
    rng = np.random.default_rng(0)

    def step() -> int:
        tried = rng.choice(len(features), num_trials, replace=False)
        error = 0.2 * np.sin(3 * features[tried, 0]) + 0.02 * rng.standard_normal(num_trials)
        history = History(
            measured=tried,
            step_time_s=predicted_s[tried] * np.exp(error),
            explored=frozenset(tried.tolist()),
            impossible=frozenset(),
            misfits=frozenset(),
            pending=frozenset(),
            num_decisions=num_trials,
        )
        return sampler.choose(history)

    return median_s(step, repeats)


def main() -> None:
    """Times both spaces; the large one keeps what memory would drop."""
    options = arguments(__doc__ or "", repeats=5, trials=50)
    config = load_study(STUDIES / "pangu-135b-6144.yaml")
    setting = config.setting
    grid, _ = enumerate_space(setting, config.options)
    memory = estimate_memory(setting.job, setting.cluster, setting.runtime, grid)
    estimate = estimate_step(setting.job, setting.cluster, setting.runtime, grid, memory=memory)
    features = configuration_features(setting.job, setting.cluster, grid, estimate)
    rows = []
    for size in (3_000, len(grid)):
        chosen = np.arange(size)
        sampler = ThompsonSampler(
            grid.take(chosen),
            estimate.step_time_s[chosen],
            features[chosen],
            memory_share=(memory.needed_bytes / memory.capacity_bytes)[chosen],
        )
        seconds = step_s(sampler, features[chosen], estimate.step_time_s[chosen], options.trials, options.repeats)
        rows.append({"candidates": size, "seconds": seconds})
    publish(rows, as_json=options.json)


if __name__ == "__main__":
    main()
