import math

import numpy as np
import pytest

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.predicted import Predicted
from tuner.search.observations import ObservationLog
from tuner.search.population import Population
from tuner.search.posterior import posterior_of
from tuner.search.prospect import prospect_of
from tuner.search.sampler import ThompsonSampler

GRID = ConfigGrid.from_configs([ParallelConfig(tp=8), ParallelConfig(tp=4, dp=2), ParallelConfig(pp=2, tp=4)], ())
STEP_S = np.array([[1.0, 2.0, 3.0], [1.0, 0.5, 0.25], [1.0, 0.6, math.inf], [1.0, 0.5, math.inf]])
"""Drawn step times of the three candidates [4, 3] [s]."""


@pytest.fixture
def choices():
    """The three candidates."""
    return ThompsonSampler(GRID, posterior_of(Predicted.of_times(np.ones(3), np.zeros((3, 1))), GRID)).choices


@pytest.fixture
def after_first(choices):
    """What is known once the first candidate has taken a second."""
    import optuna

    trial = optuna.trial.create_trial(
        value=1.0, params={"tp": 8, "dp": 1, "pp": 1}, distributions=choices_of(choices, ("tp", "dp", "pp"))
    )
    trial.number = 0
    return ObservationLog(choices.position_of, None).observations([trial], None, {})


def choices_of(choices, names):
    """Distributions of some dimensions."""
    return {name: choices.search_space[name] for name in names}


def test_a_prospect_counts_draws(choices, after_first):
    """Probabilities are shares of the draws, and the expected step is their median where it runs; candidates without a
    trial that some draw names are open.
    """
    fastest = np.argmin(STEP_S, axis=1)
    population = Population(fastest=fastest, p_star=0.25, log_step_s=np.log(STEP_S).astype(np.float32))

    second, third = (prospect_of(position, choices, after_first, population, is_timed=True) for position in (1, 2))

    assert (second.best_probability, third.best_probability) == (0.5, 0.25)
    assert (second.run_probability, third.run_probability) == (1.0, 0.5)
    assert second.expected_s == pytest.approx(math.sqrt(0.5 * 0.6))
    assert third.expected_s == pytest.approx(math.sqrt(3.0 * 0.25))
    assert second.num_open == third.num_open == 2
    assert second.first_with == ("tp", "dp")
    assert third.first_with == ("pp", "tp")
    assert not second.is_repeat
    assert prospect_of(0, choices, after_first, population, is_timed=True).is_repeat
    assert prospect_of(1, choices, after_first, population, is_timed=False).expected_s is None
