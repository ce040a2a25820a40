"""What a search makes of rehearsals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tuner.search.observations import observations_of
from tuner.search.rehearsed import MOST_REFUSED, OWN_ERROR, SHARED_ERROR, Told, after_trials, memory_error
from tuner.search.sampler import ThompsonSampler

GIB = 2**30


def told_of(told, *, ran=(), measured=None, capacity=80.0, many=1000):
    """What rehearsals tell after some trials; sizes in GiB."""
    return after_trials(
        told,
        ran=frozenset(ran),
        measured_bytes={at: size * GIB for at, size in (measured or {}).items()},
        capacity_bytes=dict.fromkeys(told.needed_bytes, capacity * GIB),
        num_candidates=many,
    )


def needs(**sizes):
    """Accepted candidates with the memory that each needs [GiB], named a0, a1, and so on."""
    needed = {int(name[1:]): round(size * GIB) for name, size in sizes.items()}
    return Told(accepted=frozenset(needed), needed_bytes=needed)


def test_before_any_trial_the_error_is_both_priors():
    """The common factor and that of each candidate are independent, so that their variances add up."""
    error = memory_error([])

    assert error.offset == 0
    assert error.deviation == pytest.approx(math.hypot(SHARED_ERROR, OWN_ERROR))


def test_peaks_teach_the_common_factor():
    """Of equal errors at many candidates, nothing but the offset is left; one such error is believed by half."""
    assert memory_error([0.04]).offset == pytest.approx(0.02)
    many = memory_error([0.04] * 100)
    assert many.offset == pytest.approx(0.04, rel=0.02)
    assert many.deviation < OWN_ERROR / 4


def test_peaks_that_differ_keep_the_error_wide():
    """Errors of 5% in both directions are each candidate's own, and stay."""
    found = memory_error([0.05, -0.05] * 50)

    assert found.offset == pytest.approx(0, abs=1e-12)
    assert found.deviation == pytest.approx(0.05, rel=0.05)


def test_what_needs_more_than_there_is_is_too_large():
    """A need above the capacity rules a candidate out, one below it does not, and the offset moves the edge."""
    told = needs(a0=79.0, a1=81.0, a2=40.0)

    assert told_of(told).too_large == {1}
    assert told_of(told, measured={2: 44.0}).too_large == {0, 1}
    assert told_of(told, measured={2: 36.0}).too_large == set()


def test_refusals_count_until_a_refused_candidate_runs():
    """A rehearsal that refuses what runs is not believed; one that refuses much and accepts something is."""
    some = Told(refused=frozenset({1, 2}))
    assert told_of(some).refused == {1, 2}
    assert told_of(some, ran={3}).refused == {1, 2}
    assert told_of(some, ran={2}).refused == set()
    everything = Told(refused=frozenset(range(MOST_REFUSED)))
    assert told_of(everything).refused == set()
    assert told_of(replace(everything, accepted=frozenset({99}))).refused == everything.refused
    assert told_of(some, many=4).refused == set()


@pytest.fixture
def sampler(grid, posterior):
    """A sampler of these candidates."""
    return ThompsonSampler(grid, posterior, draws=200, seed=3)


def needed_bytes(posterior, sizes):
    """Rehearsed needs of candidates, as shares of their devices' memory."""
    return {at: round(share * posterior.predicted.capacity_bytes[at]) for at, share in sizes.items()}


def test_refused_and_too_large_candidates_are_never_chosen(sampler, posterior, grid):
    """The sampler's first choices, ruled out one after the other, are not chosen again, and none of it is a trial."""
    refused, large = set(), {}
    for turn in range(20):
        found = sampler.choose(sampler.observations([]))
        assert found not in refused | large.keys()
        if turn % 2:
            large[found] = 1.05
        else:
            refused.add(found)
        sampler.learn_rehearsals(
            Told(refused=frozenset(refused), accepted=frozenset(large), needed_bytes=needed_bytes(posterior, large))
        )
    observations = sampler.observations([])
    assert observations.dropped == refused | large.keys()
    assert (observations.num_decisions, observations.num_ended) == (0, 0)
    assert len(grid) > 40


def test_rehearsed_memory_is_nearly_certain(posterior):
    """Candidates predicted to be at the edge fit in nearly all draws if rehearsed at 90%, and in hardly any at 107%;
    rehearsed at the edge itself they fit in about half.
    """
    share = posterior.predicted.needed_bytes / posterior.predicted.capacity_bytes
    edge = np.flatnonzero((share > 0.9) & (share < 1.1))[:3].tolist()
    empty = observations_of([], lambda _: None)

    def fits(size):
        needed = needed_bytes(posterior, dict.fromkeys(edge, size))
        capacity = {at: float(posterior.predicted.capacity_bytes[at]) for at in edge}
        told = after_trials(
            Told(accepted=frozenset(edge), needed_bytes=needed),
            ran=(),
            measured_bytes={},
            capacity_bytes=capacity,
            num_candidates=1000,
        )
        # ruled out for good is another matter
        drawn = posterior.draw(
            replace(empty, rehearsed=replace(told, too_large=frozenset())), 300, np.random.default_rng(0)
        )
        return np.isfinite(drawn[:, edge]).mean()

    assert 0.2 < np.isfinite(posterior.draw(empty, 300, np.random.default_rng(0))[:, edge]).mean() < 0.8
    assert fits(0.90) > 0.98
    assert 0.3 < fits(1.0) < 0.7
    assert fits(1.07) < 0.05


def test_rehearsals_tell_of_candidates_like_them(posterior):
    """Rehearsed needs of 0.7 times the prediction make the others more likely to fit."""
    predicted = posterior.predicted
    share = predicted.needed_bytes / predicted.capacity_bytes
    edge = np.flatnonzero((share > 1.0) & (share < 1.25))
    rehearsed, others = edge[::2][:8].tolist(), edge[1::2]
    empty = observations_of([], lambda _: None)
    told = Told(
        accepted=frozenset(rehearsed), needed_bytes={at: round(0.7 * predicted.needed_bytes[at]) for at in rehearsed}
    )
    capacity = {at: float(predicted.capacity_bytes[at]) for at in rehearsed}
    rehearsed_ones = after_trials(
        told, ran=(), measured_bytes={}, capacity_bytes=capacity, num_candidates=len(predicted)
    )
    known = replace(empty, rehearsed=rehearsed_ones)

    before, after = (
        np.isfinite(posterior.draw(found, 300, np.random.default_rng(0))[:, others]).mean() for found in (empty, known)
    )

    assert after > before + 0.3


def test_refusals_speak_against_their_kind(posterior):
    """Where eight candidates of one kind are refused and eight without it accepted, others of it run in few draws; the
    accepted ones run as before.
    """
    at = next(at for at, name in enumerate(posterior.kinds.names) if 20 < posterior.kinds.holds[:, at].sum() < 100)
    holds = posterior.kinds.holds[:, at]
    share = posterior.predicted.needed_bytes / posterior.predicted.capacity_bytes
    small = share < 0.6
    refused = frozenset(np.flatnonzero(holds & small)[:8].tolist())
    accepted = frozenset(np.flatnonzero(~holds & small)[:8].tolist())
    told = told_of(Told(refused=refused, accepted=accepted))
    empty = observations_of([], lambda _: None)

    runs = np.isfinite(posterior.draw(replace(empty, rehearsed=told), 300, np.random.default_rng(0))).mean(axis=0)

    others = holds & small
    others[sorted(refused)] = False
    assert runs[sorted(refused)].max() == 0
    assert runs[others].mean() < 0.2
    assert runs[sorted(accepted)].min() > 0.9


def test_the_next_candidates_are_those_that_would_be_chosen(sampler):
    """The first of them is the choice itself, and none appears twice."""
    observations = sampler.observations([])

    following = sampler.likely_next(observations, 5)

    assert following[0] == sampler.choose(observations)
    assert len(set(following)) == 5


@pytest.mark.parametrize("in_use", [True, False])
def test_a_refused_first_candidate_runs_only_if_it_is_in_use(grid, posterior, in_use):
    """What runs today is tried whatever a rehearsal says; a baseline that is refused is not."""
    sampler = ThompsonSampler(grid, posterior, draws=50, first=grid.config(7), first_in_use=in_use)
    sampler.learn_rehearsals(Told(refused=frozenset({7})))

    assert (sampler.choose(sampler.observations([])) == 7) is in_use
