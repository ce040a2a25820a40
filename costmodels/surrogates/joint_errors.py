"""Joint draws of the errors of predictions on several clusters, for comparisons between clusters.

Each prediction alone errs as `uncertainty.step_uncertainty` states. Together they err alike where they depend on the
same things: a constant of the profile errs by the same amount everywhere, and what distinguishes a cluster from those
that were fitted distinguishes all its sizes (assumed). Heavy tails are common to all predictions of a draw.

Letters: n predictions, c constants, M draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.error_models import error_models
from costmodels.step.memory.peak import estimate_memory
from costmodels.surrogates.uncertainty import WIDE, constant_effects, half_width
from hardware.arrays import FloatArray
from hardware.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSources:
    """What the error of one prediction depends on.

    Attributes:
        setting: Setting of the prediction.
        effects: Change of the log step time per standard deviation of each constant, by its name.
    """

    setting: Setting
    effects: Mapping[str, float]

    @property
    def log_error_95(self) -> float:
        """Half-width of the 95% interval of the log of true over predicted step time, as `step_uncertainty` has it."""
        effect = math.sqrt(sum(each**2 for each in self.effects.values()))
        if self.setting.runtime.knows_cluster:
            return half_width(None, WIDE) * max(self.setting.runtime.step_error, effect)
        model = error_models().step
        return half_width(model.freedom, WIDE) * float(model.scale(np.array(effect)))


def error_sources(setting: Setting, config: ParallelConfig) -> ErrorSources:
    """Return what the error of a configuration's predicted step depends on."""
    grid = ConfigGrid.from_configs([config])
    effects = constant_effects(setting, grid, memory=estimate_memory(setting, grid))
    return ErrorSources(setting=setting, effects={name: float(effect[0]) for name, effect in effects.items()})


def draw_log_errors(sources: Sequence[ErrorSources], num_draws: int, rng: np.random.Generator) -> FloatArray:
    """Draw the logs of true over predicted step time jointly [M, n].

    The distribution of each prediction is the one whose intervals `step_uncertainty` returns.

    Args:
        sources: What the error of each prediction depends on [n].
        num_draws: Number M of draws.
        rng: Source of the draws.
    """
    names = sorted({name for each in sources for name in each.effects})
    kinds = list(dict.fromkeys(_kind_of(each.setting.cluster) for each in sources))
    of_constants = rng.standard_normal((num_draws, len(names)))
    of_kind = rng.standard_normal((num_draws, len(kinds)))
    model = error_models().step
    tail = np.sqrt(model.freedom / rng.chisquare(model.freedom, num_draws))
    drawn = np.empty((num_draws, len(sources)))
    for at, each in enumerate(sources):
        effect = np.array([each.effects.get(name, 0.0) for name in names])
        own, runtime = of_kind[:, kinds.index(_kind_of(each.setting.cluster))], each.setting.runtime
        if runtime.knows_cluster:  # normal, and at least as wide as the errors of its held-out runs
            rest = max(runtime.step_error**2 - float(effect @ effect), 0.0)
            drawn[:, at] = of_constants @ effect + np.sqrt(rest) * own
        else:
            drawn[:, at] = tail * (model.constants * (of_constants @ effect) + model.unseen * own)
    return drawn


def _kind_of(cluster: Cluster) -> tuple[object, ...]:
    """Return what the sizes of one cluster have in common."""
    return tuple((group.device, group.intra_links, group.nic_links) for group in cluster.groups)
