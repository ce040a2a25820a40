"""Pipelines of unlike stages, timed pass by pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.step.passes import Kind, pass_order
from costmodels.step.pipeline_time import ROUNDS, ChunkTimes, pipeline_time_s
from tests.support.settings.pass_times import pass_times

NUMBERS = st.lists(st.floats(0.2, 3.0), min_size=16, max_size=16)


def times_of(pp, vpp, forward, hop_s=0.0):
    """Passes of one configuration: backward passes take twice the forward ones, and all messages equally long."""
    forward_s = np.resize(np.array(forward), pp * vpp)[:, None]
    hops_s = np.full((pp, 1), hop_s)
    return ChunkTimes(
        forward_s=forward_s, backward_s=2 * forward_s, forward_hop_s=hops_s, backward_hop_s=hops_s, begin_s=np.zeros(1)
    )


def walked_s(pp, vpp, micro_batches, times, hop_s=0.0, *, waits=False):
    """Time of the same passes by a plain walk through their order."""
    pass_s = np.zeros((3, pp * vpp))
    pass_s[Kind.FORWARD], pass_s[Kind.BACKWARD] = times.forward_s[:, 0], times.backward_s[:, 0]
    order = pass_order("1f1b", pp, vpp, micro_batches)
    return pass_times(order, pass_s, np.full((2, pp * vpp - 1), hop_s), waits_for_receiver=waits).makespan_s


def test_a_pipeline_by_hand():
    """Two stages of 1 s and 2 s with messages of 0.5 s: the first micro-batch takes 7 s, and each further one 3.5 s."""
    times = times_of(2, 1, [1.0], hop_s=0.5)

    for micro_batches in (1, 2, 40):
        found = pipeline_time_s(2, 1, micro_batches, times, overlaps_messages=False)[0]
        assert found == pytest.approx(7.0 + (micro_batches - 1) * 3.5)


@given(pp=st.integers(2, 5), micro_batches=st.integers(1, 4), forward=NUMBERS, hop_s=st.floats(0.0, 2.0))
def test_passes_without_chunks_wait_for_their_messages(pp, micro_batches, forward, hop_s):
    """Steps that are timed whole take as long as a plain walk through their passes, unlike stages or not."""
    times = times_of(pp, 1, forward, hop_s)

    found = pipeline_time_s(pp, 1, micro_batches * ROUNDS, times, overlaps_messages=False)
    if micro_batches <= pp:
        assert found[0] == pytest.approx(walked_s(pp, 1, micro_batches * ROUNDS, times, hop_s, waits=True))


@given(pp=st.integers(2, 4), vpp=st.integers(2, 4), rounds=st.integers(1, ROUNDS), forward=NUMBERS)
def test_unlike_chunks_delay_each_other(pp, vpp, rounds, forward):
    """Interleaved passes of unlike chunks take as long as a plain walk through them."""
    times = times_of(pp, vpp, forward)

    found = pipeline_time_s(pp, vpp, rounds * pp, times, overlaps_messages=True)
    assert found[0] == pytest.approx(walked_s(pp, vpp, rounds * pp, times))


@given(pp=st.integers(2, 4), vpp=st.integers(1, 3), rounds=st.integers(5, 9), forward=NUMBERS)
def test_a_long_step_goes_on_as_it_began(pp, vpp, rounds, forward):
    """Rounds that are not timed are taken to be as long as the last that is: within 2% of a walk through all."""
    times = times_of(pp, vpp, forward)

    found = pipeline_time_s(pp, vpp, rounds * pp, times, overlaps_messages=vpp > 1)
    assert found[0] == pytest.approx(walked_s(pp, vpp, rounds * pp, times), rel=0.02)


@pytest.mark.parametrize("vpp", [1, 2])
def test_any_number_of_micro_batches_is_timed(vpp):
    """More micro-batches take longer, also where they make no equal rounds."""
    times = times_of(3, vpp, [1.0, 0.4], 0.05)

    found = [pipeline_time_s(3, vpp, number, times, overlaps_messages=vpp > 1)[0] for number in range(1, 30)]
    assert found == sorted(found)


def test_links_limit_the_pace():
    """Messages that take longer than the passes beside them leave one after the other, and set the pace."""
    slow, fast = (
        pipeline_time_s(2, 2, 40, times_of(2, 2, [0.1], hop_s), overlaps_messages=True)[0] for hop_s in (1.0, 0.01)
    )

    # the first stage sends both chunks' activations, and the gradients of the second
    assert slow > 40 * 3 * 1.0
    assert fast == pytest.approx(40 * 2 * 0.3, rel=0.1)


def test_configurations_are_timed_together():
    """A batch has the times that each of its configurations has alone."""
    one, two = times_of(4, 2, [1.0, 0.5, 2.0], 0.1), times_of(4, 2, [0.3, 0.9], 0.2)
    both = ChunkTimes(
        **{
            name: np.concatenate([getattr(one, name), getattr(two, name)], axis=-1)
            for name in ("forward_s", "backward_s", "forward_hop_s", "backward_hop_s", "begin_s")
        }
    )

    together = pipeline_time_s(4, 2, 24, both, overlaps_messages=True)
    alone = [pipeline_time_s(4, 2, 24, times, overlaps_messages=True)[0] for times in (one, two)]
    assert together.tolist() == pytest.approx(alone)
