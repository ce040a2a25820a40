from dataclasses import replace

import numpy as np
import pytest

from costmodels.calibration.sources import MeasuredSetting
from costmodels.step.error_models import MemoryErrorModel, memory_error_of
from costmodels.step.memory.peak import MEMORY_PARTS, estimate_memory
from costmodels.step.step_time import estimate_step
from costmodels.surrogates.features import FEATURES
from costmodels.surrogates.predicted import Predicted, predict, together
from tests.support.settings.small_spaces import setting_of
from tuner.space.enumeration import enumerate_space


@pytest.fixture(scope="module")
def problem():
    """A setting and its candidates."""
    setting, options = setting_of("megatron", batch=32)
    grid, _ = enumerate_space(setting, options)
    measured = MeasuredSetting(setting=setting, memory="reserved", stage="fullest")
    return measured, grid


@pytest.fixture(scope="module")
def predicted(problem):
    """What is predicted of them."""
    return predict(*problem)


def test_it_is_what_the_models_say(problem, predicted):
    """Step times, need, capacity and peak are those of estimate_step and estimate_memory.

    The shares of what a candidate needs are none below zero, and sum to one. Memory that the caller gives is believed.
    """
    measured, grid = problem
    memory = estimate_memory(measured.setting, grid)
    step = estimate_step(measured.setting, grid, memory=memory)

    assert np.array_equal(predicted.step_time_s, step.step_time_s)
    assert np.array_equal(predicted.needed_bytes, memory.needed_bytes)
    assert np.array_equal(predicted.capacity_bytes, memory.capacity_bytes)
    assert np.array_equal(predicted.peak_bytes, memory.peak_as("reserved"))
    assert predicted.memory_error == memory_error_of(measured.setting.runtime)
    assert predicted.features.shape == (len(grid), len(FEATURES))
    assert predicted.constant_effects.shape == (len(grid), len(measured.setting.runtime.log_errors))
    assert predicted.memory_shares.shape == (len(predicted), len(MEMORY_PARTS))
    assert (predicted.memory_shares >= 0).all()
    assert predicted.memory_shares.sum(axis=1) == pytest.approx(1.0)
    small = predict(measured, grid, memory=replace(memory, capacity_bytes=0.5 * memory.capacity_bytes))
    assert np.array_equal(small.needed_bytes, predicted.needed_bytes)
    assert np.array_equal(small.capacity_bytes, 0.5 * predicted.capacity_bytes)


def test_parts_go_back_to_their_places(problem, predicted):
    """Candidates that are predicted in two parts, one of them alone, are, together, what they are in one."""
    measured, grid = problem
    order = np.random.default_rng(0).permutation(len(grid))
    at = [order[:1], order[1:]]

    merged = together([predict(measured, grid.take(part)) for part in at], at)

    assert merged.memory_error == predicted.memory_error
    for name in set(Predicted.__slots__) - {"memory_error"}:
        assert np.allclose(getattr(merged, name), getattr(predicted, name), rtol=1e-9, atol=1e-9), name


def test_the_larger_error_of_memory_counts():
    """Of settings whose memory is predicted unlike well, the candidates take the larger error."""
    bare = Predicted.of_times(np.ones(1), np.zeros((1, 2)))
    parts = [replace(bare, memory_error=MemoryErrorModel(scale=scale)) for scale in (0.05, 0.2, 0.1)]

    assert together(parts, [np.array([at]) for at in (1, 0, 2)]).memory_error.scale == 0.2


def test_bare_times_know_no_memory(predicted):
    """Whoever has step times alone gets candidates that always fit, no constants, and their own features.

    Features must have a row for every step time; the message says how many were given.
    """
    features = np.arange(6.0).reshape(3, 2)

    bare = Predicted.of_times(np.array([3, 1, 2]), features)

    assert len(bare) == 3
    assert predicted.knows_memory
    assert not bare.knows_memory
    assert (bare.needed_bytes < bare.capacity_bytes).all()
    assert bare.constant_effects.shape == (3, 0)
    assert np.array_equal(bare.features, features)
    with pytest.raises(ValueError, match="each of 3 step times, but got 2"):
        Predicted.of_times(np.ones(3), np.zeros((2, 1)))
