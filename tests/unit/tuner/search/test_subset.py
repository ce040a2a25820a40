from dataclasses import replace

import numpy as np
import pytest

from tests.unit.tuner.search.test_posterior import observations
from tuner.search.subset import MAX_FAILURES, MAX_OBSERVATIONS, select_subset


@pytest.fixture
def features():
    """Where the candidates stand: a cloud around 0, and one candidate far from all others."""
    found = np.random.default_rng(0).normal(size=(1000, 3))
    found[700] = 50.0
    return found


def measured(count):
    """Observations of so many candidates, measured in the order of their positions, the later ones faster."""
    positions = np.arange(count)
    found = observations(positions, -0.001 * positions)
    return replace(
        found, num_completed=np.ones(count, dtype=np.int64), peaks_bytes={int(position): 1 for position in positions}
    )


def test_all_of_a_small_study_is_told(features):
    """Surrogates of a study with MAX_OBSERVATIONS candidates see its observations as it is."""
    found = measured(MAX_OBSERVATIONS)

    assert select_subset(found, features) is found


def test_the_fastest_and_the_far_ones_are_told(features):
    """Of more candidates MAX_OBSERVATIONS are told, once, in order: half the fastest, and the farthest among them."""
    found = measured(900)

    told = select_subset(found, features)

    assert len(set(told.measured.tolist())) == MAX_OBSERVATIONS
    assert told.measured.tolist() == sorted(told.measured.tolist())
    assert set(range(900 - MAX_OBSERVATIONS // 2, 900)) <= set(told.measured.tolist())
    assert 700 in told.measured
    assert told.peaks_bytes.keys() == set(told.measured.tolist())
    np.testing.assert_array_equal(told.log_step_s, -0.001 * told.measured)
    assert told.explored == found.explored


def test_failures_are_told_of_some(features):
    """Of many candidates that failed in one way MAX_FAILURES are told, and those that measured a step all."""
    failed = frozenset(range(100, 600))
    found = replace(measured(50), misfits=failed, crashed=frozenset({600}), limits_s={601: 2.0})

    told = select_subset(found, features)

    assert len(told.misfits) == MAX_FAILURES
    assert told.misfits < failed
    assert (told.crashed, told.limits_s, len(told.measured)) == ({600}, {601: 2.0}, 50)


def test_what_was_measured_stays_known(posterior, monkeypatch):
    """A candidate of which the surrogates are not told has its measured step time in every draw, within its error."""
    monkeypatch.setattr("tuner.search.subset.MAX_OBSERVATIONS", 60)
    positions = np.arange(80)
    log_step_s = np.log(posterior.predicted.step_time_s[:80]) + 0.3 * np.sin(7.0 * positions)
    found = replace(observations(positions, log_step_s), num_completed=np.ones(80, dtype=np.int64))
    told = select_subset(found, posterior.steps[0].points.features)
    untold = np.setdiff1d(positions, told.measured)

    drawn = posterior.draw(found, 20, np.random.default_rng(0))

    assert len(untold) == 20
    assert np.abs(drawn[:, untold] - log_step_s[untold]).max() < 5 * 0.005
