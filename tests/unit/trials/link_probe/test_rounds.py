"""Pairs of a probe and their rounds, and the rate of one transfer."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.link_probe.rounds import disjoint_rounds, pairs_of_ring
from trials.link_probe.transfer import median_rate

HOSTS = st.integers(1, 12).map(lambda count: [f"n{number}" for number in range(count)])


@given(hosts=HOSTS, besides=st.lists(st.tuples(st.sampled_from(["n0", "n3", "n7"]), st.sampled_from(["n1", "n5"]))))
def test_every_neighbour_is_measured_in_both_directions(hosts, besides):
    """Each pair occurs once, with its opposite; every host of three or more has two peers at least."""
    pairs = pairs_of_ring(hosts, besides)

    assert len(pairs) == len({*pairs})
    assert {*pairs} == {(receiver, sender) for sender, receiver in pairs}
    assert {pair for pair in besides if {*pair} <= {*hosts}} <= {*pairs}
    for host in hosts:
        assert len({receiver for sender, receiver in pairs if sender == host}) >= min(len(hosts) - 1, 2)


@given(hosts=HOSTS, besides=st.lists(st.tuples(st.sampled_from(["n0", "n3", "n7"]), st.sampled_from(["n1", "n5"]))))
def test_no_host_takes_part_twice_in_a_round(hosts, besides):
    """Rounds hold all pairs, and the pairs of a round have no host in common."""
    pairs = pairs_of_ring(hosts, besides)
    rounds = disjoint_rounds(pairs)

    assert sorted(pair for members in rounds for pair in members) == sorted(pairs)
    for members in rounds:
        busy = [name for pair in members for name in pair]
        assert len(busy) == len({*busy})


@pytest.mark.parametrize(("count", "rounds"), [(1, 0), (2, 2), (3, 6), (4, 4), (7, 6), (64, 4)])
def test_a_ring_needs_few_rounds(count, rounds):
    """A ring takes four rounds for an even number of hosts, and six for an odd one."""
    assert len(disjoint_rounds(pairs_of_ring([f"n{number}" for number in range(count)]))) == rounds


MARKS = st.lists(st.tuples(st.floats(1e-4, 1.0), st.integers(1, 10**7)), min_size=2, max_size=40).map(
    lambda steps: [
        (sum(one for one, _ in steps[:end]), sum(one for _, one in steps[:end])) for end in range(1, len(steps) + 1)
    ]
)


@given(marks=MARKS)
def test_the_rate_is_among_those_of_the_transfer(marks):
    """The median rate lies between the slowest and the fastest rate between two reads."""
    rates = [(more - fewer) / (later_s - sooner_s) for (sooner_s, fewer), (later_s, more) in pairwise(marks)]

    assert min(rates) * (1 - 1e-6) <= median_rate(marks) <= max(rates) * (1 + 1e-6)


def test_a_pause_does_not_count():
    """A transfer at an even rate has that rate, also if it stood still once for longer than it lasted."""
    even = [(at / 100, at * 1000) for at in range(1, 101)]
    paused = [(time_s + (5.0 if total > 40_000 else 0.0), total) for time_s, total in even]

    assert median_rate(even) == pytest.approx(1e5)
    assert median_rate(paused) == pytest.approx(1e5)
