import json

import numpy as np
import optuna
import pytest
from optuna.trial import create_trial

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from tests.support.studies.broken_studies import study
from tuner.forecast.candidates import candidates_of
from tuner.run.studies import make_sampler, open_study, prepared_of
from tuner.search.parameters import params_of
from tuner.search.population import (
    MAX_SHARES,
    POPULATION,
    POPULATION_AT_START,
    Moment,
    as_json,
    from_json,
    in_lines,
    read_moments,
    shares,
)
from tuner.study_file.config import load_study

optuna.logging.set_verbosity(optuna.logging.ERROR)


def grid_of(num_candidates):
    """Candidates that differ in dp and in how they recompute."""
    configs = [
        ParallelConfig(dp=1 + number // 2, recompute=("none", "full")[number % 2]) for number in range(num_candidates)
    ]
    return ConfigGrid.from_configs(configs, ("recompute",))


def test_a_probability_is_the_share_of_the_draws_that_name_a_candidate():
    """Ten draws name three candidates: their frequencies are their probabilities, the largest first, and equals in the
    order of the grid.
    """
    found = shares(np.array([4, 2, 4, 4, 0, 4, 2, 4, 4, 2]), grid_of(6).values, explored={2, 3})

    assert [(share.config["dp"], share.config["recompute"], share.probability, share.tried) for share in found] == [
        (3, "none", 0.6, False),
        (2, "none", 0.3, True),
        (1, "none", 0.1, False),
    ]
    equals = shares(np.array([5, 1, 3]), grid_of(6).values, ())
    assert [share.config["dp"] for share in equals] == [1, 2, 3]
    assert equals == shares(np.array([3, 5, 1]), grid_of(6).values, ())


def test_p_star_is_the_sum_over_the_tried():
    """The moment's p_star is equation 6 of the draws that it came from, also where not all candidates were kept."""
    rng = np.random.default_rng(0)
    fastest, explored = rng.integers(0, 200, 100), set(range(0, 200, 3))

    moment = from_json(7, as_json(shares(fastest, grid_of(200).values, explored)))

    assert moment.rest_tried > 0
    assert moment.rest_untried > 0
    assert moment.p_star == pytest.approx(np.mean([position in explored for position in fastest]))
    kept = sum(share.probability for share in moment.shares)
    assert kept + moment.rest_tried + moment.rest_untried == pytest.approx(1.0)


def test_what_is_stored_is_read_back():
    """Through JSON, the kept shares are those that were computed, the dimensions' types included."""
    found = shares(np.array([4, 2, 4, 5]), grid_of(6).values, explored={2})

    moment = from_json(None, json.loads(json.dumps(as_json(found))))

    assert moment == Moment(trial=None, shares=found, rest_tried=0.0, rest_untried=0.0)


def test_a_population_is_small_enough_for_an_attribute():
    """However many candidates 10,000 draws name, no more than the 30 most probable are kept, in under 3 kB."""
    found = shares(np.random.default_rng(1).integers(0, 5000, 10_000), grid_of(5000).values, explored=set(range(2500)))

    stored = as_json(found)

    assert len(stored["shares"]) == MAX_SHARES
    assert from_json(1, stored).shares == found[:MAX_SHARES]
    assert len(json.dumps(stored)) < 3000


def test_moments_stand_in_the_order_of_the_ends():
    """Trials that ran side by side are read in the order in which they ended, after what stood before the first, also
    where an earlier version kept them on the study; what a driver that died while it ended a trial has left behind does
    not count, nor does what was never stored.
    """
    kept = optuna.create_study()
    trials = [kept.ask() for _ in range(5)]
    stored = as_json(shares(np.array([0, 1]), grid_of(2).values, ()))
    kept.set_user_attr(POPULATION_AT_START, stored)
    kept.set_user_attr(f"{POPULATION}:0", stored)  # as earlier versions kept it
    for number in (1, 2, 4):
        trials[number].set_user_attr(POPULATION, stored)

    for number in (2, 0, 1, 3):
        kept.tell(trials[number], 1.0)

    assert [moment.trial for moment in read_moments(kept)] == [None, 2, 0, 1]


def test_the_lines_name_the_leaders_and_sum_up_the_rest():
    """A terminal gets the most probable candidates, which of them are untried, and what all others have together."""
    found = shares(np.array([5] * 4 + [3] * 3 + [1] * 2 + [0]), grid_of(6).values, explored={5})

    lines = in_lines(from_json(4, as_json(found)), "after 5 trials", lambda values: f"dp={values['dp']}", top=2)

    assert lines == [
        "Probability of being the fastest, after 5 trials:",
        "   40.0%  dp=3",
        "   30.0%  dp=2  (not tried yet)",
        "   30.0%  all others",
    ]
    assert len(in_lines(from_json(None, as_json(found[:1])), "before the first trial", str)) == 2  # of one candidate


@pytest.mark.slow
def test_status_shows_the_newest_population(tmp_path, meshtune):
    """`meshtune status` prints the leading candidates after the last trial, and with --json all that is stored."""
    file = tmp_path / "study.yaml"
    file.write_text(study(), encoding="utf-8")
    config = load_study(file, storage=f"sqlite:///{tmp_path / 'study.db'}")
    candidates = candidates_of(config.problem)
    sampler = make_sampler(config)
    opened = open_study(prepared_of(config), sampler)
    grid = candidates.space.grid
    found = shares(np.array([0] * 3 + [1]), grid.values, explored={0})
    opened.set_user_attr(POPULATION_AT_START, as_json(found[1:]))
    opened.add_trial(
        create_trial(
            value=1.0,
            params=params_of(grid.values(0)),
            distributions=sampler.search_space,
            user_attrs={POPULATION: as_json(found)},
        )
    )

    shown, told = (meshtune("status", file, "--storage", config.storage.url, *more) for more in ((), ("--json",)))

    leader = ",".join(f"{name}={value}" for name, value in grid.values(0).items() if value != "")
    assert "Probability of being the fastest, after 1 trial:\n" in shown.out
    assert f"   75.0%  {leader}\n" in shown.out
    assert told.json["population"]["trial"] == 0
    assert told.json["population"]["shares"][0] == {"config": grid.values(0), "probability": 0.75, "tried": True}
