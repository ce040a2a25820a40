"""Transfers that share links: their rates at one moment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hardware.sharing import fair_rates


@st.composite
def networks(draw):
    """A few transfers over a few resources: what each takes, the most that each may have, and the capacities."""
    num_transfers, num_resources = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    amounts = rng.uniform(0.2, 3.0, (num_transfers, num_resources)) * (rng.random((num_transfers, num_resources)) < 0.5)
    amounts[np.arange(num_transfers), rng.integers(0, num_resources, num_transfers)] = 1.0
    limits = np.where(rng.random(num_transfers) < 0.5, 1.0, rng.uniform(0.1, 1.0, num_transfers))
    return amounts, limits, rng.uniform(0.1, 4.0, num_resources)


def rates_of(amounts, limits, capacity):
    """The fair rates of transfers that are given as a matrix."""
    uses = [tuple((at, float(row[at])) for at in np.flatnonzero(row)) for row in amounts]
    return np.array(fair_rates(uses, list(limits), dict(enumerate(capacity))))


@given(networks())
def test_rates_are_fair(network):
    """No resource carries more than its capacity (equation 7), and every transfer gets on: it has all it may have, or
    crosses a full resource on which nobody is faster.
    """
    amounts, limits, capacity = network
    rates = rates_of(amounts, limits, capacity)
    is_full = rates @ amounts >= capacity * (1 - 1e-9)

    assert (rates @ amounts <= capacity * (1 + 1e-9)).all()
    assert (rates <= limits * (1 + 1e-9)).all()
    assert (rates > 0).all()
    for rate, limit, crossed in zip(rates, limits, amounts > 0, strict=True):
        fastest = [rates[amounts[:, at] > 0].max() for at in np.flatnonzero(crossed & is_full)]
        assert rate >= limit * (1 - 1e-9) or any(rate >= other * (1 - 1e-9) for other in fastest)


@given(networks())
@settings(max_examples=30)
def test_the_smallest_rate_is_the_largest_there_can_be(network):
    """A linear program that makes the slowest transfer as fast as possible makes it no faster."""
    amounts, limits, capacity = network
    num_transfers, num_resources = amounts.shape
    # maximise z with rate_t >= z, the limits and the capacities
    rows = np.block([[amounts.T, np.zeros((num_resources, 1))], [-np.eye(num_transfers), np.ones((num_transfers, 1))]])
    best = linprog(
        np.r_[np.zeros(num_transfers), -1.0],
        A_ub=rows,
        b_ub=np.r_[capacity, np.zeros(num_transfers)],
        bounds=[*((0.0, limit) for limit in limits), (0.0, None)],
        method="highs",
    )

    assert rates_of(amounts, limits, capacity).min() == pytest.approx(-best.fun)


def test_a_short_path_takes_what_a_long_one_leaves():
    """The one that crosses both links gets half of the narrow one, and the wide one's other user all that is left."""
    uses = [((0, 1.0), (1, 1.0)), ((0, 1.0),), ((1, 1.0),)]

    assert fair_rates(uses, [1.0, 1.0, 1.0], {0: 0.2, 1: 1.0}) == pytest.approx([0.1, 0.1, 0.9])


def test_nothing_crosses_a_link_that_is_down():
    """Transfers over it stand still, others do not."""
    assert fair_rates([((0, 1.0), (1, 1.0)), ((1, 1.0),)], [1.0, 1.0], {0: 0.0, 1: 1.0}) == [0.0, 1.0]
