"""The benchmark of the step-level surrogate's calibration: its metric, what it looks at, and its command line."""

from functools import partial

import numpy as np
import pytest

from benchmarks.calibration import step_calibration
from benchmarks.calibration.step_calibration import HeldOut, figures, held_out, run_and_look
from benchmarks.support.problems import problem_of, read_groups
from tests.support.benchmark_runs import FAILED, RUNS

ROW = {"trials", "groups", "n", "coverage", "worst_tenth", "error", "width"}


@pytest.fixture
def told(answered):
    """Runs the benchmark in one process; its object."""
    return partial(answered, step_calibration, "--workers", "1")


def held(num_trials, is_inside, error=0.1, width=0.5):
    """A look at candidates that all have the same error and width."""
    return HeldOut(
        num_trials=num_trials,
        is_inside=np.array(is_inside, dtype=np.bool_),
        error=np.full(len(is_inside), error),
        width=np.full(len(is_inside), width),
    )


# The metric


def test_an_interval_runs_from_quantile_to_quantile():
    """The 95% interval of draws 0, 0.01 ... 4 is 0.1 to 3.9, both ends inside; the error is that of the median draw."""
    log_measured = np.array([0.11, 0.09, 3.89, 3.91])
    drawn = np.tile(np.linspace(0, 4, 401)[:, None], len(log_measured))
    found = held_out(drawn, log_measured, 3)

    assert found.num_trials == 3
    assert found.is_inside.tolist() == [True, False, True, False]
    assert found.width == pytest.approx(3.8)
    assert found.error == pytest.approx(np.abs(np.exp(2) / np.exp(log_measured) - 1))


def test_draws_are_calibrated_if_the_truth_is_one_of_them():
    """Truths drawn as the draws were are covered 95% of the time; those from twice the width, two thirds of it."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(0.0, 0.1, (400, 5000))

    covered = [held_out(drawn, rng.normal(0.0, spread, 5000), 0).is_inside.mean() for spread in (0.1, 0.2)]

    assert covered == pytest.approx([0.95, 0.67], abs=0.02)


def test_figures_are_over_candidates_and_the_worst_tenth_over_groups():
    """Every held-out time counts alike in the coverage; each number of trials has its row, with the groups it has."""
    large = [held(0, [True] * 9 + [False]), held(0, [True] * 10), held(3, [True] * 4, error=0.3, width=0.1)]
    little = [held(0, [False] * 5, error=0.7, width=0.9)]
    at_start, later = figures([large, little])

    assert (at_start["trials"], at_start["groups"], at_start["n"]) == (0, 2, 25)
    assert at_start["coverage"] == pytest.approx(19 / 25)
    assert at_start["worst_tenth"] == pytest.approx(0.1 * 0.95)
    assert (at_start["error"], at_start["width"]) == (0.1, 0.5)
    assert (later["trials"], later["groups"], later["n"], later["coverage"]) == (3, 1, 4, 1.0)
    assert (later["error"], later["width"]) == (0.3, 0.1)


# What it looks at


def test_timed_candidates_that_were_not_tried_are_looked_at(write):
    """Failed and tried candidates are not looked at, and a group ends with its last timed candidate."""
    path = write("runs.csv", *RUNS)
    write("runs_failed.csv", *FAILED)
    (group,), _ = read_groups([path], 10)
    found = run_and_look(group, problem_of(group, ()), 0, (0, 4, 100))

    assert [look.num_trials for look in found] == [0, 4]
    assert len(found[0].is_inside) == len(RUNS)
    assert len(RUNS) - 4 <= len(found[1].is_inside) <= len(RUNS) - 2
    assert all(np.isfinite(look.width).all() for look in found)


def test_trials_narrow_the_interval(write):
    """After four trials the intervals are narrower than before any."""
    (group,), _ = read_groups([write("runs.csv", *RUNS)], 2)
    before, later = run_and_look(group, problem_of(group, ()), 0, (0, 4))

    assert np.median(later.width) < np.median(before.width)


# The program


def test_the_keys_of_the_json(told, write):
    """Groups, sources and the whole have a row for each number of trials; sources are told apart."""
    own, other = (write(f"{name}.csv", *({**run, "source": name} for run in RUNS)) for name in ("mosaic", "another"))
    result = told("--measured", own, other, "--seeds", 2, "--trials", "2,0", "--min-candidates", 2)

    assert result.keys() == {"groups", "sources", "overall", "skipped", "settings"}
    assert [row["trials"] for row in result["overall"]] == [0, 2]
    assert [row["source"] for row in result["sources"]] == ["mosaic", "mosaic", "another", "another"]
    assert all(row.keys() >= ROW for name in ("groups", "sources", "overall") for row in result[name])
    assert [row["n"] for row in result["overall"]] == [4 * len(RUNS), 4 * (len(RUNS) - 2)]
    assert result["settings"]["trials"] == [0, 2]
