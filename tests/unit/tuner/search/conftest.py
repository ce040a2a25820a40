"""Provide the candidates that many tests of the search share, and what is believed of them."""

import itertools

import numpy as np
import pytest

from costmodels.calibration.sources import MeasuredSetting
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from tests.support.settings.small_spaces import setting_of
from tuner.search.prior import initial_posterior
from tuner.space.enumeration import enumerate_space


@pytest.fixture(scope="package")
def problem():
    """A setting of two hosts, and all its candidates."""
    setting, options = setting_of("megatron", hosts=2, batch=32)
    grid, _ = enumerate_space(setting, options)
    return MeasuredSetting(setting=setting, memory="reserved", stage="fullest"), grid


@pytest.fixture(scope="package")
def grid(problem):
    """Those candidates."""
    return problem[1]


@pytest.fixture(scope="package")
def posterior(problem):
    """What is believed of them before any trial where no profile but their own is plausible."""
    measured, grid = problem
    return initial_posterior([(measured, np.arange(len(grid)))], grid, other_profiles=())


@pytest.fixture(scope="package")
def layouts():
    """All (pp, tp, dp, mbs) of 16 devices with small micro-batches: 30 candidates."""
    powers = (1, 2, 4, 8, 16)
    return ConfigGrid.from_configs(
        [
            ParallelConfig(pp=pp, tp=tp, dp=dp, mbs=mbs)
            for pp, tp, dp in itertools.product(powers, repeat=3)
            if pp * tp * dp == 16
            for mbs in (1, 2)
        ]
    )
