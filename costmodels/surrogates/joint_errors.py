"""Joint draws of the errors of predictions on several clusters, for comparisons between clusters.

Each prediction alone errs as `uncertainty.step_uncertainty` states. Together they err alike where they depend on the same
things: a constant of the profile errs by the same amount everywhere, and what distinguishes a cluster from those that
were fitted distinguishes all its sizes (assumed). Heavy tails are common to all predictions of a draw.

Letters: n predictions, c constants, M draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.error_models import error_models
from costmodels.step.memory import estimate_memory
from costmodels.surrogates.uncertainty import constant_effects
from hardware.arrays import FloatArray
from hardware.cluster import Cluster


def draw_log_errors(
    predictions: Sequence[tuple[Setting, ParallelConfig]], num_draws: int, rng: np.random.Generator
) -> FloatArray:
    """Draw the logs of true over predicted step time jointly [M, n].

    The distribution of each prediction is the one whose intervals `step_uncertainty` returns.

    Args:
        predictions: Setting and configuration of each prediction.
        num_draws: Number M of draws.
        rng: Source of the draws.
    """
    effects = [_effects(setting, config) for setting, config in predictions]
    names = sorted({name for each in effects for name in each})
    kinds = list(dict.fromkeys(_kind_of(setting.cluster) for setting, _ in predictions))
    of_constants = rng.standard_normal((num_draws, len(names)))
    of_kind = rng.standard_normal((num_draws, len(kinds)))
    model = error_models().step
    tail = np.sqrt(model.freedom / rng.chisquare(model.freedom, num_draws))
    drawn = np.empty((num_draws, len(predictions)))
    for at, ((setting, _), each) in enumerate(zip(predictions, effects, strict=True)):
        effect = np.array([each.get(name, 0.0) for name in names])
        own = of_kind[:, kinds.index(_kind_of(setting.cluster))]
        if setting.runtime.knows_cluster:  # normal, and at least as wide as the errors of its held-out runs
            rest = max(setting.runtime.step_error**2 - float(effect @ effect), 0.0)
            drawn[:, at] = of_constants @ effect + np.sqrt(rest) * own
        else:
            drawn[:, at] = tail * (model.constants * (of_constants @ effect) + model.unseen * own)
    return drawn


def _effects(setting: Setting, config: ParallelConfig) -> dict[str, float]:
    """Return the change of the log step time per standard deviation of each constant, by its name."""
    grid = ConfigGrid.from_configs([config])
    memory = estimate_memory(setting, grid)
    return {name: float(effect[0]) for name, effect in constant_effects(setting, grid, memory=memory).items()}


def _kind_of(cluster: Cluster) -> tuple[object, ...]:
    """Return what the sizes of one cluster have in common."""
    return tuple((group.device, group.intra_links, group.nic_links) for group in cluster.groups)
