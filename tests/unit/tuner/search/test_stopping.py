import numpy as np
import pytest

from tests.unit.tuner.search.test_observations import observations, ok, trial
from tuner.search.population import Population
from tuner.search.stopping import Budgets, StopReason, StopRule, decide


def decision(known, *, p_star=0.0, num_candidates=10, repeats=0, **budgets):
    """The decision of a search of tolerance 1% that asks for a confidence of 95%."""
    population = Population(fastest=np.zeros(1, dtype=np.int64), p_star=p_star, log_step_s=np.zeros((1, 1)))
    rule = StopRule(num_candidates=num_candidates, confidence=0.95, tolerance=0.01, repeats=repeats, proxies=None)
    return decide(known, population, rule, Budgets(**budgets))


CLEAR = [trial(0, 1, ok(1.0, 1.0, 1.0)), trial(1, 2, ok(2.0, 2.0, 2.0))]
CLOSE = [trial(0, 1, ok(1.0, 0.9, 1.1)), trial(1, 2, ok(1.001, 0.9, 1.1))]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"p_star": 0.95}, None),
        ({"p_star": 0.96}, "confident"),
        ({"num_candidates": 2}, "exhausted"),
        ({"max_trials": 3}, None),
        ({"max_trials": 2}, "max_trials"),
        ({"seconds_left": 0.1}, None),
        ({"seconds_left": 0.0}, "max_minutes"),
        ({"device_hours_left": 0.1}, None),
        ({"device_hours_left": 0.0}, "budget_device_hours"),
        ({"p_star": 0.96, "max_trials": 2, "num_candidates": 2}, "confident"),
        ({"max_trials": 2, "seconds_left": 0.0, "num_candidates": 2}, "max_trials"),
        ({"seconds_left": 0.0, "device_hours_left": 0.0}, "max_minutes"),
    ],
)
def test_each_reason_ends_a_search(options, reason):
    """A search ends above its confidence, without a budget, or without a candidate; confidence is named first,
    and needs a trial.
    """
    assert decision(observations(), p_star=1.0).reason is None
    assert decision(observations(*CLEAR), **options).reason == reason


def test_a_settled_search_replicates_before_it_ends():
    """Close candidates are measured again in turn once nothing new is worth a trial, unless a budget is spent."""
    known = observations(*CLOSE)

    found = decision(known, p_star=0.96, repeats=1)

    assert (found.reason, found.settled, found.replicate) == (None, StopReason.CONFIDENT, 1)
    assert decision(known, p_star=0.96, repeats=1, max_trials=2).reason is StopReason.CONFIDENT
    assert decision(known, num_candidates=2, repeats=1, max_trials=2).reason is StopReason.TRIALS
    assert decision(known, num_candidates=2, repeats=1).reason is None
    assert decision(known, repeats=1).replicate is None
    assert decision(observations(*CLEAR), p_star=0.96, repeats=1).reason is StopReason.CONFIDENT


def test_each_reason_has_a_sentence():
    """Whatever ends a search can be told to people."""
    assert all(reason.sentence for reason in StopReason)
