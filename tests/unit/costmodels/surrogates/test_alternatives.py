"""Predictions of other profiles as hypotheses: which there are, what the trials make of them, and what they cost."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.step.error_models import MemoryErrorModel
from costmodels.surrogates.hypotheses import (
    MEMORY_MULTIPLES,
    Alternative,
    SimulatedSteps,
    memory_hypotheses,
    step_hypotheses,
)
from costmodels.surrogates.predicted import Predicted
from costmodels.surrogates.search_constants import search_constants
from costmodels.surrogates.surrogate import MOST_FITTED, Seen, after

COUNT = 40


@pytest.fixture
def predicted(rng):
    """Predictions of forty candidates, whose features say nothing of another profile's."""
    return replace(
        Predicted.of_times(rng.uniform(1, 4, COUNT), rng.normal(size=(COUNT, 2))),
        memory_error=MemoryErrorModel(scale=0.05),
    )


def alternatives(predicted, rng, *, count=3, spread=0.4):
    """Return profiles that order the candidates in ways of their own."""
    return [
        Alternative(
            step_time_s=predicted.step_time_s * np.exp(rng.normal(0, spread, COUNT)),
            needed_bytes=predicted.needed_bytes * np.exp(rng.normal(0, spread, COUNT)),
        )
        for _ in range(count)
    ]


def seen(positions, log_values):
    """Return measurements of candidates, without any bound."""
    nothing = np.zeros(0)
    return Seen(
        measured=np.array(positions, dtype=np.int64),
        log_value=np.array(log_values),
        variance=np.full(len(positions), 1e-4),
        bounded=np.zeros(0, dtype=np.int64),
        log_edge=nothing,
        side=nothing,
        mishap=nothing,
    )


def test_trials_find_the_profile_that_they_follow(predicted, rng):
    """Six trials that follow another profile at half its speed put the weight on it, and its order on the rest."""
    others = alternatives(predicted, rng)
    truth = np.log(2 * others[1].step_time_s)
    surrogate = after(step_hypotheses(predicted, None, others), seen(range(6), truth[:6]))

    mean, _ = surrogate.mean_and_deviation(np.arange(6, COUNT))
    of_truth = [
        fitted.hypothesis.change is not None and np.allclose(fitted.hypothesis.log_predicted, truth - np.log(2))
        for fitted in surrogate.fitted
    ]
    assert surrogate.probabilities[of_truth].sum() > 0.9
    assert np.corrcoef(mean, truth[6:])[0, 1] > 0.95


def test_trials_that_follow_the_own_profile_keep_it(predicted, rng):
    """Where the own predictions are right but for a factor, the others lose their weight."""
    truth = np.log(1.5 * predicted.step_time_s)
    surrogate = after(step_hypotheses(predicted, None, alternatives(predicted, rng)), seen(range(6), truth[:6]))

    assert surrogate.probabilities[[fitted.hypothesis.change is None for fitted in surrogate.fitted]].sum() > 0.95


def test_peaks_find_the_profile_that_they_follow(predicted, rng):
    """Measured peaks decide among the predictions of memory as step times do among those of steps."""
    others = alternatives(predicted, rng)
    truth = np.log(others[2].needed_bytes)
    hypotheses = memory_hypotheses(predicted, None, others)
    surrogate = after(hypotheses, seen(range(6), truth[:6]))

    mean, _ = surrogate.mean_and_deviation(np.arange(6, COUNT))
    assert len(hypotheses) == 4 * len(MEMORY_MULTIPLES)
    assert np.corrcoef(mean, truth[6:])[0, 1] > 0.9


def test_profiles_that_agree_are_one_hypothesis(predicted, rng):
    """Equal orders at other speeds are one step hypothesis, and the own order is none; for memory the factor counts."""
    (other,) = alternatives(predicted, rng, count=1)
    faster = Alternative(step_time_s=other.step_time_s / 3, needed_bytes=other.needed_bytes)
    own = Alternative(step_time_s=2 * predicted.step_time_s, needed_bytes=2 * predicted.needed_bytes)
    found = [one for one in step_hypotheses(predicted, None, [other, faster, own]) if one.change is not None]
    of_memory = [one for one in memory_hypotheses(predicted, None, [other, faster, own]) if one.change is not None]

    assert len(found) == 2
    assert found[0].chance == pytest.approx(2 * search_constants().alternative_chance)
    assert len(of_memory) == 2 * len(MEMORY_MULTIPLES)


def test_what_the_trials_rule_out_is_not_fitted(predicted, rng):
    """Of many hypotheses only a few are fitted after trials, and all of them count before."""
    hypotheses = step_hypotheses(predicted, None, alternatives(predicted, rng, count=12))
    truth = np.log(predicted.step_time_s)
    surrogate = after(hypotheses, seen(range(5), truth[:5]))

    assert len(hypotheses) == 26
    assert len(after(hypotheses, seen([], [])).fitted) == 26
    assert len(surrogate.fitted) <= MOST_FITTED
    assert [hypotheses[place] for place in surrogate.places] == [fitted.hypothesis for fitted in surrogate.fitted]
    assert surrogate.draw(20, rng, beside=[None] * 26).shape == (20, COUNT)


def test_trials_find_the_simulator_that_they_follow(predicted, rng):
    """Where the simulator orders the leaders otherwise, five trials that follow it put the weight on it."""
    leaders = np.argsort(predicted.step_time_s)[:12]
    simulated = SimulatedSteps(
        at=leaders, step_time_s=predicted.step_time_s[leaders] * np.exp(rng.normal(0, 0.3, len(leaders)))
    )
    truth = np.log(1.5 * simulated.step_time_s)
    surrogate = after(step_hypotheses(predicted, None, (), simulated), seen(leaders[:6], truth[:6]))

    mean, _ = surrogate.mean_and_deviation(leaders[6:])
    of_simulator = [fitted.hypothesis.change is not None for fitted in surrogate.fitted]
    assert surrogate.probabilities[of_simulator].sum() > 0.9
    assert np.corrcoef(mean, truth[6:])[0, 1] > 0.95


def test_a_simulator_that_agrees_is_no_hypothesis(predicted):
    """Simulated leaders in the predicted order, by a common factor slower, add no hypothesis."""
    leaders = np.arange(10)
    agrees = SimulatedSteps(at=leaders, step_time_s=1.1 * predicted.step_time_s[leaders])

    assert len(step_hypotheses(predicted, None, (), agrees)) == len(step_hypotheses(predicted))


def test_candidates_change_with_those_that_resemble_them(predicted):
    """A candidate beside a simulated one changes almost as that does, and one that resembles none by the mean."""
    features = np.zeros((COUNT, 2))
    features[1], features[2], features[3] = (10, 0), (0, 0.1), (50, 50)
    features[4:] = 20
    placed = replace(predicted, features=features)
    simulated = SimulatedSteps(at=np.array([0, 1]), step_time_s=placed.step_time_s[:2] * np.array([1.2, 1.0]))

    change = simulated.log_change(placed)
    assert change[[0, 1]].tolist() == pytest.approx([np.log(1.2), 0.0])
    assert np.log(1.2) / 2 < change[2] < np.log(1.2)
    assert change[3] == pytest.approx(np.log(1.2) / 2)
