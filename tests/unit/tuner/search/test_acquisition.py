from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.io.errors import ConfigError
from tests.support.studies.broken_studies import study
from tuner.search.acquisition import (
    ACQUISITION_FUNCTIONS,
    DEFAULT,
    ConfidenceBound,
    ExpectedLoss,
    ImprovementPerSecond,
    PlainThompson,
    UnexploredDraws,
)
from tuner.study_file.config import load_study


def chosen(acquisition, log_step_s, *, closed=(), best_s=None, trial_s=None, seed=0):
    """The choice of an acquisition function with `closed` given by their positions."""
    num_candidates = log_step_s.shape[1]
    mask = np.zeros(num_candidates, dtype=bool)
    mask[list(closed)] = True
    return acquisition.choose(
        log_step_s,
        closed=mask,
        best_s=best_s,
        trial_s=np.ones(num_candidates) if trial_s is None else np.asarray(trial_s),
        rng=np.random.default_rng(seed),
    )


def draws_of(*fastest, num_candidates):
    """Draws whose order is that of `fastest`: in each, the named candidates take 1, 2, ... s and the others 9 s."""
    log_step_s = np.full((len(fastest), num_candidates), np.log(9.0), dtype=np.float32)
    for draw, order in zip(log_step_s, fastest, strict=True):
        draw[list(order)] = np.log(np.arange(1, len(order) + 1))
    return log_step_s


def shares_of(acquisition, log_step_s, *, closed):
    """How often each candidate is chosen, over many seeds."""
    counts = Counter(chosen(acquisition, log_step_s, closed=closed, seed=seed) for seed in range(800))
    return {position: count / 800 for position, count in counts.items()}


class AcquisitionContract:
    """Every acquisition function passes these. Subclass and give the attribute `acquisition`."""

    @settings(max_examples=30)
    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_no_closed_candidate_is_named_while_an_open_one_is_left(self, dtype, data, seed):
        """Whatever the draws hold possible, the choice is one of the open candidates."""
        num_draws, num_candidates = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 8)))
        rng = np.random.default_rng(seed)
        log_step_s = rng.normal(0, 2, (num_draws, num_candidates)).astype(dtype)
        log_step_s[rng.random(log_step_s.shape) < rng.random()] = np.inf
        closed = data.draw(st.sets(st.integers(0, num_candidates - 1), max_size=num_candidates - 1))
        best_s = data.draw(st.none() | st.floats(0.01, 100))

        position = chosen(self.acquisition, log_step_s, closed=closed, best_s=best_s, seed=seed)

        assert type(position) is int
        assert 0 <= position < num_candidates
        assert position not in closed

    def test_the_same_state_of_chance_gives_the_same_choice(self):
        """Two generators from one seed lead to one choice, for every seed."""
        log_step_s = np.random.default_rng(5).normal(size=(40, 30)).astype(np.float32)

        once, again = (
            [chosen(self.acquisition, log_step_s, closed=(3, 4), best_s=1.0, seed=seed) for seed in range(20)]
            for _ in range(2)
        )

        assert once == again

    def test_a_candidate_that_never_runs_is_passed_over(self):
        """A column of infinities is never the choice while another open candidate runs in some draw."""
        log_step_s = draws_of((2, 1), (2, 1), (2, 1), num_candidates=4)
        log_step_s[:, [0, 2]] = np.inf

        assert {chosen(self.acquisition, log_step_s, closed=(1,), seed=seed) for seed in range(20)} == {3}

    def test_something_is_chosen_where_nothing_seems_to_run(self):
        """If every draw says that no open candidate runs, one of them is tried all the same."""
        log_step_s = draws_of((0,), (0,), num_candidates=4)
        log_step_s[:, 1:] = np.inf

        assert {chosen(self.acquisition, log_step_s, closed=(0,), seed=seed) for seed in range(40)} <= {1, 2, 3}
        assert chosen(self.acquisition, np.full((3, 2), np.inf, dtype=np.float32)) in (0, 1)

    def test_a_draw_in_which_nothing_runs_names_nobody(self):
        """Draws that are infinite all over leave the choice to the others."""
        log_step_s = draws_of(*[(1,)] * 10, num_candidates=4)
        log_step_s[:9] = np.inf

        assert {chosen(self.acquisition, log_step_s, best_s=3.0, seed=seed) for seed in range(20)} == {1}

    def test_without_an_open_candidate_the_fastest_is_measured_again(self):
        """Once every candidate is closed, the fastest in each draw is named again; one alone is the choice."""
        log_step_s, alone = draws_of((2, 0), (2, 0), num_candidates=3), np.zeros((5, 1), dtype=np.float32)

        assert chosen(self.acquisition, log_step_s, closed=(0, 1, 2), best_s=2.0) == 2
        assert chosen(self.acquisition, alone) == chosen(self.acquisition, alone, closed=(0,), best_s=1.0) == 0

    def test_a_batch_has_different_candidates(self):
        """Asked again and again with what it named pending, it names each candidate once."""
        log_step_s = np.random.default_rng(2).normal(size=(50, 12)).astype(np.float32)
        pending = []
        for seed in range(12):
            pending.append(chosen(self.acquisition, log_step_s, closed=pending, best_s=0.2, seed=seed))

        assert sorted(pending) == list(range(12))

    def test_the_draws_stay_as_they_were(self):
        """Draws are kept between decisions, so an acquisition function leaves them untouched."""
        log_step_s = draws_of((2, 1), (1, 0), num_candidates=4)
        before = log_step_s.copy()

        chosen(self.acquisition, log_step_s, closed=(1, 2), best_s=2.0)

        np.testing.assert_array_equal(log_step_s, before)


class TestExpectedLoss(AcquisitionContract):
    """The rule that looks one trial ahead."""

    acquisition = ExpectedLoss()

    def test_it_loses_least_on_average(self):
        """Where everything runs, the choice minimizes the mean log slowdown of the best tried candidate after its
        trial, in a direct sum.
        """
        log_step_s = np.random.default_rng(3).normal(size=(60, 12))
        log_step_s[:, 0] = 0.4

        def loss(position):
            """Return the mean loss where candidates 0 and `position` have been tried."""
            return np.mean(np.minimum(0.4, log_step_s[:, position]) - log_step_s.min(axis=1))

        assert chosen(self.acquisition, log_step_s, closed=(0,), best_s=1.0) == min(range(1, 12), key=loss)

    def test_a_trial_is_priced_by_its_chance_to_run(self):
        """A gain of a factor of four in one draw of ten is worth less than one of 1% that is certain; one that is ten
        times as likely to run is worth more.
        """
        log_step_s = np.log([[1.0, 0.25, 0.99]] + [[1.0, np.inf, 0.99]] * 9)

        assert chosen(self.acquisition, log_step_s, closed=(0,), best_s=1.0) == 2
        assert chosen(self.acquisition, log_step_s[:1], closed=(0,), best_s=1.0) == 1

    def test_the_first_trial_weighs_speed_by_the_chance_to_run(self):
        """Before any result a candidate that is 10% slower and surely runs beats a faster one that may not fit."""
        log_step_s = np.log([[1.0, 1.1, 2.0]] * 5 + [[np.inf, 1.1, 2.0]] * 5)

        assert chosen(self.acquisition, log_step_s) == 1
        assert chosen(self.acquisition, log_step_s[:5]) == 0

    def test_pending_trials_count_as_tried(self):
        """Of two candidates that are fast in the same draws, the second gains nothing beside the pending first."""
        log_step_s = np.log([[4.0, 1.0, 1.01, 3.0], [4.0, 3.0, 3.0, 2.5]])

        assert chosen(self.acquisition, log_step_s, closed=(0,), best_s=4.0) == 1
        assert chosen(self.acquisition, log_step_s, closed=(0, 1), best_s=4.0) == 3

    def test_where_nothing_gains_the_draws_choose(self):
        """If every draw holds what was tried for the fastest, the runners-up of the draws are left."""
        log_step_s = draws_of((0, 1), (0, 2), num_candidates=4)

        found = {chosen(self.acquisition, log_step_s, closed=(0,), best_s=1.0, seed=seed) for seed in range(20)}
        assert found == {1, 2}


class TestUnexploredDraws(AcquisitionContract):
    """FlexParallel's rule."""

    acquisition = UnexploredDraws()

    def test_it_is_uniform_over_the_unexplored_draws(self):
        """Draws that name a closed candidate do not count, and of the others each counts once (FlexParallel 3.2)."""
        shares = shares_of(self.acquisition, draws_of(*[(0, 3)] * 6, *[(1,)] * 3, (2,), num_candidates=4), closed=(0,))

        assert shares == pytest.approx({1: 0.75, 2: 0.25}, abs=0.05)

    def test_without_an_unexplored_draw_the_runners_up_are_left(self):
        """Where every draw names a closed candidate, its fastest open one takes that place."""
        shares = shares_of(self.acquisition, draws_of(*[(0, 3)] * 6, *[(1, 2)] * 3, num_candidates=4), closed=(0, 1))

        assert shares == pytest.approx({3: 2 / 3, 2: 1 / 3}, abs=0.06)


class TestPlainThompson(AcquisitionContract):
    """Standard Thompson sampling."""

    acquisition = PlainThompson()

    def test_a_draw_that_names_a_closed_candidate_gives_its_next_best(self):
        """Unlike FlexParallel's rule it counts draws that name a closed candidate, by their runner-up."""
        shares = shares_of(self.acquisition, draws_of(*[(0, 3)] * 6, *[(1,)] * 3, (2,), num_candidates=4), closed=(0,))

        assert shares == pytest.approx({3: 0.6, 1: 0.3, 2: 0.1}, abs=0.06)


class TestConfidenceBound(AcquisitionContract):
    """Mean and spread of the draws."""

    acquisition = ConfidenceBound()

    def test_beta_trades_speed_for_doubt(self):
        """Without weight on the deviation the fastest in the mean is chosen, with much weight the most uncertain."""
        rng = np.random.default_rng(0)
        log_step_s = np.array([0.0, 0.3, 1.0]) + np.array([0.01, 0.2, 0.5]) * rng.standard_normal((500, 3))

        assert [chosen(ConfidenceBound(beta=beta), log_step_s) for beta in (0.0, 2.0, 100.0)] == [0, 1, 2]

    def test_it_is_the_equation_where_everything_runs(self):
        """The choice minimizes mean - beta * standard deviation over the draws (equation 3)."""
        log_step_s = np.random.default_rng(1).normal(size=(200, 20)) * np.linspace(0.1, 2, 20)
        bound = log_step_s.mean(axis=0) - 1.5 * log_step_s.std(axis=0)

        assert chosen(ConfidenceBound(beta=1.5), log_step_s) == np.argmin(bound)

    def test_what_seldom_runs_comes_last(self):
        """A fast candidate that runs in a tenth of the draws gives way to a slow one that always runs."""
        log_step_s = draws_of(*[(1,)] * 10, num_candidates=3)
        log_step_s[1:, 1] = np.inf
        log_step_s[:8, 2] = np.inf

        assert chosen(self.acquisition, log_step_s) == 0
        assert chosen(self.acquisition, log_step_s, closed=(0,)) == 2


class TestImprovementPerSecond(AcquisitionContract):
    """Expected improvement over the time it costs."""

    acquisition = ImprovementPerSecond()

    def test_of_two_equal_gains_the_cheaper_trial_is_run(self):
        """Two candidates that may gain as much differ in what their trials take, and the quicker one is chosen."""
        log_step_s = draws_of((0,), (1,), num_candidates=2)

        assert chosen(self.acquisition, log_step_s, best_s=4.0, trial_s=[20.0, 60.0]) == 0
        assert chosen(self.acquisition, log_step_s, best_s=4.0, trial_s=[60.0, 20.0]) == 1

    def test_it_is_the_mean_gain_over_the_seconds(self):
        """The choice maximizes mean(max(best - step, 0)) / seconds, where steps that cannot run gain nothing."""
        rng = np.random.default_rng(3)
        log_step_s, trial_s = rng.normal(size=(100, 15)), rng.uniform(1, 3, 15)
        log_step_s[rng.random(log_step_s.shape) < 0.3] = np.inf
        gain_s = np.maximum(0.8 - np.exp(log_step_s), 0).mean(axis=0)

        assert chosen(self.acquisition, log_step_s, best_s=0.8, trial_s=trial_s) == np.argmax(gain_s / trial_s)

    def test_a_gain_is_worth_its_size(self):
        """A large gain in a few draws beats a small one in most, which the share of draws alone would not see."""
        log_step_s = np.log(np.array([[9.0, 3.9]] * 8 + [[1.0, 3.9]] * 2))

        assert chosen(self.acquisition, log_step_s, best_s=4.0) == 0
        assert Counter(chosen(UnexploredDraws(), log_step_s, seed=seed) for seed in range(50)).most_common(1)[0][0] == 1


def test_a_study_names_its_acquisition_function(tmp_path):
    """`search.acquisition` takes exactly the names of ACQUISITION_FUNCTIONS, and DEFAULT is the default."""
    file = tmp_path / "study.yaml"
    file.write_text(study(), encoding="utf-8")

    for name in ACQUISITION_FUNCTIONS:
        assert load_study(file, overrides=[f"search.acquisition={name}"]).search.acquisition == name
    assert load_study(file).search.acquisition == DEFAULT
    with pytest.raises(ConfigError, match=r"search\.acquisition") as told:
        load_study(file, overrides=["search.acquisition=greedy"])
    assert all(name in str(told.value) for name in ACQUISITION_FUNCTIONS)
