"""Posterior of a study's candidates before any trial, whatever the study trains; it loads the surrogates."""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from tuner.own_step import predictions as own
from tuner.search.earlier_runs import Past
from tuner.search.posterior import Posterior
from tuner.search.prior import OnProgress, ignore_progress, initial_posterior
from tuner.study_file.config import StudyConfig


def first_posterior(
    config: StudyConfig, grid: ConfigGrid, past: Past | None, *, on_progress: OnProgress = ignore_progress
) -> Posterior:
    """Return the posterior of a study's candidates before any trial, with what its history teaches.

    Args:
        config: Study.
        grid: Grid of its candidates.
        past: History of the study; none is known of a step of the user's own.
        on_progress: Function that is told what takes seconds.
    """
    if config.own_step is not None:
        return own.posterior_before_trials(config.own_step, grid)
    everywhere = np.arange(len(grid))
    return initial_posterior([(config.measured_setting, everywhere)], grid, past, on_progress=on_progress)
