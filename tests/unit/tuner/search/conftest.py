"""Provide the candidates that many tests of the search share, and what is believed of them."""

import numpy as np
import pytest

from costmodels.calibration.sources import MeasuredSetting
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
