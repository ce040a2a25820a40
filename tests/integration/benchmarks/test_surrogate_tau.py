import numpy as np
import pytest

from benchmarks.calibration import surrogate_tau
from benchmarks.calibration.surrogate_tau import _compare
from tests.support.benchmark_runs import RUNS, TIMES_S


@pytest.fixture
def told(answered, write):
    """Runs the benchmark on the made-up group; its object."""
    return lambda *options: answered(
        surrogate_tau, "--workers", "1", "--min-candidates", "2", "--measured", str(write("runs.csv", *RUNS)), *options
    )


def test_ranks_are_held_against_what_ran():
    """A failed candidate has no rank; a tried one counts among all, and not among the untried."""
    expected, measured = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.0, np.inf, 3.0])

    found = _compare(expected, measured, [1])

    assert (found["tau"], found["tau_untried"]) == (1.0, 1.0)
    assert found["median_error_untried"] == pytest.approx(1 / 6)
    assert _compare(-expected, measured, [])["tau"] == -1.0
    assert np.isnan(_compare(expected, measured, [0, 1, 3])["tau_untried"])


def test_a_group_that_was_tried_whole_is_ranked_right(told):
    """After as many trials as there are candidates the surrogate knows their order; more are no row."""
    found = told("--trials", "0", str(len(TIMES_S)), "1000", "--seeds", "2")

    first, last = found["rows"]
    assert (first["trials"], last["trials"]) == (0, len(TIMES_S))
    assert last["tau"] > 0.95
    assert last["tau_untried"] is None
    assert first["tau"] <= 1
