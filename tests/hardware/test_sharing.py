"""Transfers that share links: their rates at one moment, and when they end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from hardware.sharing import fair_rates, transfer_ends


@st.composite
def networks(draw):
    """A few transfers over a few resources: which each crosses, and the capacities."""
    num_transfers, num_resources = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    crosses = rng.random((num_transfers, num_resources)) < 0.5
    crosses[np.arange(num_transfers), rng.integers(0, num_resources, num_transfers)] = True
    return crosses, rng.uniform(0.5, 10.0, num_resources)


@given(networks())
def test_no_resource_carries_more_than_its_capacity(network):
    """Rates on each resource add up to its capacity at most (equation 7), and every transfer has some."""
    crosses, capacity = network
    rates = fair_rates(crosses, capacity)

    assert (rates @ crosses <= capacity * (1 + 1e-9)).all()
    assert (rates > 0).all()


@given(networks())
def test_every_transfer_has_a_bottleneck(network):
    """Each crosses a full resource on which nobody is faster: what makes rates max-min fair."""
    crosses, capacity = network
    rates = fair_rates(crosses, capacity)
    is_full = rates @ crosses >= capacity * (1 - 1e-9)

    for rate, crossed in zip(rates, crosses, strict=True):
        fastest = [rates[crosses[:, at]].max() for at in np.flatnonzero(crossed & is_full)]
        assert any(rate >= other * (1 - 1e-9) for other in fastest)


@given(networks())
def test_the_smallest_rate_is_the_largest_there_can_be(network):
    """A linear program that makes the slowest transfer as fast as possible makes it no faster."""
    crosses, capacity = network
    num_transfers, num_resources = crosses.shape
    # maximise z with rate_t >= z and the capacities
    limits = np.block(
        [[crosses.T.astype(float), np.zeros((num_resources, 1))], [-np.eye(num_transfers), np.ones((num_transfers, 1))]]
    )
    best = linprog(
        np.r_[np.zeros(num_transfers), -1.0], A_ub=limits, b_ub=np.r_[capacity, np.zeros(num_transfers)], method="highs"
    )

    assert fair_rates(crosses, capacity).min() == pytest.approx(-best.fun)


def test_a_short_path_takes_what_a_long_one_leaves():
    """Of three transfers, the one that crosses both links gets half of the narrow one, and the wide one's other user
    gets all that is left.
    """
    crosses = np.array([[True, True], [True, False], [False, True]])

    assert fair_rates(crosses, np.array([2.0, 10.0])).tolist() == [1.0, 1.0, 9.0]


def test_two_on_one_link_take_twice_as_long():
    """Equal transfers that begin together end together, at half the rate each; alone, one takes half of that."""
    link = np.array([100.0])

    both = transfer_ends(np.zeros(2), np.array([100.0, 100.0]), np.ones((2, 1), dtype=bool), link)
    alone = transfer_ends(np.zeros(1), np.array([100.0]), np.ones((1, 1), dtype=bool), link)

    assert both.tolist() == [2.0, 2.0]
    assert alone.tolist() == [1.0]


def test_a_late_one_slows_the_first_down_only_while_it_runs():
    """The first has half of its bytes through when the second begins; they share until that is done."""
    ends = transfer_ends(np.array([0.0, 0.5]), np.array([100.0, 10.0]), np.ones((2, 1), dtype=bool), np.array([100.0]))

    assert ends == pytest.approx([1.1, 0.7])


def test_parallel_links_do_not_share():
    """Two transfers over two links of one pair each get all of theirs."""
    ends = transfer_ends(np.zeros(2), np.array([100.0, 100.0]), np.eye(2, dtype=bool), np.array([100.0, 50.0]))

    assert ends.tolist() == [1.0, 2.0]


def test_what_crosses_a_dead_link_never_ends():
    """A link without capacity holds up its transfers and nobody else's."""
    ends = transfer_ends(np.zeros(2), np.array([100.0, 100.0]), np.eye(2, dtype=bool), np.array([0.0, 50.0]))

    assert ends.tolist() == [np.inf, 2.0]


def test_an_empty_transfer_ends_as_it_begins():
    """What carries nothing takes no time and slows nobody down."""
    ends = transfer_ends(np.array([0.3, 0.0]), np.array([0.0, 50.0]), np.ones((2, 1), dtype=bool), np.array([50.0]))

    assert ends.tolist() == [0.3, 1.0]


@given(networks(), st.integers(0, 2**32 - 1))
def test_all_bytes_arrive_and_no_capacity_is_exceeded(network, seed):
    """Over any time no resource carries more than it can, none starts early, and a busy bottleneck is never idle: all
    is done no later than if the transfers ran one after the other.
    """
    crosses, capacity = network
    rng = np.random.default_rng(seed)
    start_s, size_bytes = rng.uniform(0, 2, len(crosses)), rng.uniform(0.1, 20, len(crosses))

    ends = transfer_ends(start_s, size_bytes, crosses, capacity)

    alone_s = size_bytes / np.where(crosses, capacity, np.inf).min(axis=1)
    assert (ends >= (start_s + alone_s) * (1 - 1e-9)).all()
    assert ends.max() <= start_s.max() + alone_s.sum() + 1e-9
    for at in range(len(capacity)):
        users = crosses[:, at]
        if users.any():
            assert size_bytes[users].sum() <= capacity[at] * (ends[users].max() - start_s[users].min()) * (1 + 1e-9)
