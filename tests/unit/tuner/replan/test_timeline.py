import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.replan.timeline import Choices, best_timeline, steps_of, unforeseen_timeline


def choices_of(count, options, *, steps, begin, end, runs):
    """Choices from flat lists of numbers; the last option can always run, as waiting can."""
    shape = (count, options)
    can_run = np.array(runs, dtype=bool).reshape(shape)
    can_run[:, -1] = True
    made = np.where(can_run, np.array(steps, dtype=float).reshape(shape), 0.0)
    return Choices(
        runs=can_run,
        steps=made,
        begin_steps=np.array(begin, dtype=float).reshape(shape),
        end_steps=np.array(end, dtype=float).reshape(shape),
    )


@st.composite
def small_choices(draw):
    """Up to four stretches and four options, prices and losses of all kinds."""
    count, options = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    size = count * options

    def numbers(most):
        return draw(st.lists(st.integers(0, most), min_size=size, max_size=size))

    runs = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return choices_of(count, options, steps=numbers(20), begin=numbers(9), end=numbers(9), runs=runs)


@given(small_choices())
def test_the_best_timeline_is_that_of_exhaustive_search(choices):
    """No sequence of options that can run makes more steps; what is chosen stretch by stretch is one of them."""
    count, options = choices.runs.shape
    every = [
        timeline
        for timeline in itertools.product(range(options), repeat=count)
        if all(choices.runs[at, option] for at, option in enumerate(timeline))
    ]

    found = best_timeline(choices)

    assert found in every
    assert unforeseen_timeline(choices, np.ones(count)) in every
    assert steps_of(choices, found).sum() == pytest.approx(max(steps_of(choices, one).sum() for one in every))


@pytest.mark.parametrize(("price", "expected"), [(9.0, (0, 1)), (10.0, (0, 0)), (11.0, (0, 0))])
def test_a_change_pays_only_above_its_price(price, expected):
    """Ten more steps are worth nine of change, and not eleven; a change that gains what it costs is left out."""
    choices = choices_of(2, 2, steps=[50, 40, 40, 50], begin=[0, 0, 0, price], end=[0] * 4, runs=[True] * 4)

    assert best_timeline(choices) == expected


def test_a_loss_can_be_foreseen():
    """Where the end of an option by a loss costs more than its lead, the other runs from the start."""
    runs = [True, True, False, True]
    cheap, dear = (choices_of(2, 2, steps=[9, 5, 0, 5], begin=[0] * 4, end=[0, 0, end, 0], runs=runs) for end in (3, 5))

    assert best_timeline(cheap) == (0, 1)
    assert best_timeline(dear) == (1, 1)


def test_choices_without_one_that_runs_are_a_mistake_of_ours():
    """Waiting is an option, so some option can always run."""
    nothing = np.zeros((1, 1))

    with pytest.raises(AssertionError, match="some option can run"):
        Choices(runs=nothing.astype(bool), steps=nothing, begin_steps=nothing, end_steps=nothing)


def test_a_change_is_weighed_against_all_the_time_that_seems_left():
    """It pays for the rest of ten stretches, not for the single one in which it turns out to be better."""
    steps = [[10, 9], *[[9, 10]], *[[10, 9]] * 8]
    choices = choices_of(10, 2, steps=steps, begin=[[0, 0], *[[5, 5]] * 9], end=[[0, 0]] * 10, runs=[[True, True]] * 10)

    assert unforeseen_timeline(choices, np.ones(10))[:3] == (0, 1, 0)
    assert best_timeline(choices) == (0,) * 10
