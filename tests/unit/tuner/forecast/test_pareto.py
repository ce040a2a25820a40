import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tuner.forecast.pareto import front_chances, pareto_front

tables = arrays(
    np.float64, st.tuples(st.integers(1, 8), st.integers(1, 3)), elements=st.integers(0, 4) | st.just(np.inf)
)


def front_by_definition(values):
    """Whether no other entry is at most as large everywhere and smaller somewhere, entry by entry."""
    return [
        bool(np.isfinite(own).all())
        and not any(np.isfinite(other).all() and (other <= own).all() and (other < own).any() for other in values)
        for own in values
    ]


@given(values=tables)
def test_the_front_is_what_nobody_beats(values):
    """The front is that of the definition, applied to each pair."""
    assert pareto_front(values).tolist() == front_by_definition(values)


@given(values=tables, seed=st.integers(0, 99))
def test_the_order_of_the_entries_does_not_matter(values, seed):
    """Entries are on the front or not, wherever they stand in the table."""
    order = np.random.default_rng(seed).permutation(len(values))

    assert pareto_front(values[order]).tolist() == pareto_front(values)[order].tolist()


def test_chances_are_shares_of_the_draws():
    """An entry that is on the front of one of two draws has a chance of a half."""
    draws = np.array([[[1.0, 1.0], [2.0, 2.0]], [[2.0, 1.0], [1.0, 2.0]]])

    assert front_chances(draws) == pytest.approx([1.0, 0.5])
