"""Pipelines of unlike stages, timed pass by pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.step.pipeline.beside_passes import BesidePasses
from costmodels.step.pipeline.pass_by_pass import ROUNDS, ChunkTimes, join_times, pipeline_time_s
from costmodels.step.pipeline.passes import Kind, pass_order
from tests.support.settings.pass_times import pass_times

NUMBERS = st.lists(st.floats(0.2, 3.0), min_size=16, max_size=16)


def times_of(pp, vpp, forward, hop_s=0.0, leaves_host=None, **beside):
    """Passes of one configuration: backward passes take twice the forward ones, and all messages equally long.

    Messages leave their host at the boundaries that `leaves_host` names for messages forward and back [2 * pp].
    """
    forward_s = np.resize(np.array(forward), pp * vpp)[:, None]
    crosses = np.ones(2 * pp, dtype=bool) if leaves_host is None else np.array(leaves_host)
    return ChunkTimes(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        hop_s=np.full((2 * pp, 1), hop_s),
        hop_leaves_host=crosses[:, None],
        begin_s=np.zeros(1),
        beside=beside_of(pp, vpp, **beside),
    )


def beside_of(pp, vpp, gather_s=0.0, reduce_s=0.0, *, slowing=0.0, leaves_host=True, after_s=0.0, tied_s=0.0):
    """Traffic of weights of one configuration, alike for all chunks, which have four pieces each."""
    of_chunks, of_stages = np.ones((pp * vpp, 1)), np.ones((pp, 1))
    return BesidePasses(
        gather_s=gather_s * of_chunks,
        reduce_s=reduce_s * of_chunks,
        first_share=0.25 * of_chunks,
        piece_share=0.25 * of_chunks,
        slowing=slowing * of_stages,
        leaves_host=leaves_host * of_stages.astype(bool),
        first_layer_s=0.0 * of_stages,
        after_s=after_s * of_stages,
        tied_s=np.array([tied_s]),
    )


def time_of(pp, vpp, micro_batches, times, *, overlaps):
    """Time until all gradients are reduced, of the first configuration."""
    return pipeline_time_s(pp, vpp, micro_batches, times, overlaps_messages=overlaps)[0][0]


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
        found = time_of(2, 1, micro_batches, times, overlaps=False)
        assert found == pytest.approx(7.0 + (micro_batches - 1) * 3.5)


@given(pp=st.integers(2, 5), micro_batches=st.integers(1, 4), forward=NUMBERS, hop_s=st.floats(0.0, 2.0))
def test_passes_without_chunks_wait_for_their_messages(pp, micro_batches, forward, hop_s):
    """Steps that are timed whole take as long as a plain walk through their passes, unlike stages or not."""
    times = times_of(pp, 1, forward, hop_s)

    found = time_of(pp, 1, micro_batches * ROUNDS, times, overlaps=False)
    if micro_batches <= pp:
        assert found == pytest.approx(walked_s(pp, 1, micro_batches * ROUNDS, times, hop_s, waits=True))


@given(pp=st.integers(2, 4), vpp=st.integers(2, 4), rounds=st.integers(1, ROUNDS), forward=NUMBERS)
def test_unlike_chunks_delay_each_other(pp, vpp, rounds, forward):
    """Interleaved passes of unlike chunks take as long as a plain walk through them."""
    times = times_of(pp, vpp, forward)

    found = time_of(pp, vpp, rounds * pp, times, overlaps=True)
    assert found == pytest.approx(walked_s(pp, vpp, rounds * pp, times))


@given(pp=st.integers(2, 4), vpp=st.integers(1, 3), rounds=st.integers(5, 9), forward=NUMBERS)
def test_a_long_step_goes_on_as_it_began(pp, vpp, rounds, forward):
    """Rounds that are not timed are taken to be as long as the last that is: within 2% of a walk through all."""
    times = times_of(pp, vpp, forward)

    found = time_of(pp, vpp, rounds * pp, times, overlaps=vpp > 1)
    assert found == pytest.approx(walked_s(pp, vpp, rounds * pp, times), rel=0.02)


def test_any_number_of_micro_batches_is_timed():
    """More micro-batches take longer; with chunks, whose last round may be shorter, as long as a walk through all."""
    times = times_of(3, 1, [1.0, 0.4], 0.05)
    found = [time_of(3, 1, number, times, overlaps=False) for number in range(1, 30)]
    assert found == sorted(found)

    times = times_of(3, 2, [1.0, 0.4])
    for number in range(3, 30):
        assert time_of(3, 2, number, times, overlaps=True) == pytest.approx(walked_s(3, 2, number, times), rel=0.01)


def test_links_limit_the_pace():
    """Messages that take longer than the passes beside them leave one after the other, and set the pace."""
    slow, fast = (time_of(2, 2, 40, times_of(2, 2, [0.1], hop_s), overlaps=True) for hop_s in (1.0, 0.01))

    # the first stage sends both chunks' activations, and the gradients of the second
    assert slow > 40 * 3 * 1.0
    assert fast == pytest.approx(40 * 2 * 0.3, rel=0.1)


def test_messages_on_other_links_do_not_wait_for_each_other():
    """A stage that sends forward inside its host and back over the network sends both at once."""
    one_link = times_of(2, 2, [0.1], 0.5)
    two_links = times_of(2, 2, [0.1], 0.5, leaves_host=[False, False, True, True])

    assert time_of(2, 2, 40, two_links, overlaps=True) < 0.8 * time_of(2, 2, 40, one_link, overlaps=True)


def test_weights_by_hand():
    """Two stages of 1 s and 2 s, gathers of 4 s, reductions of 8 s: 4.25 s, 2 s back, then the last piece of 8 s.

    The first pass of both stages ends a piece (0.25 s) after its weights have come, at 4.25 s; the second stage's then
    begins. Its backward pass ends at 7.25 s; that of the first stage runs from there to 9.25 s. Its gradients leave
    from 7.75 s, when those of its last piece are ready, and take 8 s.
    """
    times = times_of(2, 1, [1.0], gather_s=4.0, reduce_s=8.0)

    assert time_of(2, 1, 1, times, overlaps=False) == pytest.approx(4.25 + 1.0 + 2.0 + 0.5 + 8.0)


def test_passes_hide_weights():
    """Traffic shorter than the passes beside it costs one piece at the begin and one at the end."""
    plain = time_of(3, 1, 8, times_of(3, 1, [1.0]), overlaps=False)
    beside = time_of(3, 1, 8, times_of(3, 1, [1.0], gather_s=0.4, reduce_s=0.4), overlaps=False)

    assert beside == pytest.approx(plain + 0.25 * 0.4 + 0.25 * 0.4)


def test_traffic_slows_down_the_passes_beside_it():
    """What runs beside a pass delays it by its slowing: here all hidden traffic of the first and the last passes."""
    hidden = time_of(2, 1, 8, times_of(2, 1, [1.0], gather_s=0.4, reduce_s=0.4), overlaps=False)
    slowed = time_of(2, 1, 8, times_of(2, 1, [1.0], gather_s=0.4, reduce_s=0.4, slowing=0.5), overlaps=False)

    # the first stage's gathers, and its own reductions at the end, are on the critical path
    assert 0.5 * 0.4 < slowed - hidden <= 4 * 0.5 * 0.4


def test_weights_delay_messages_on_the_same_links():
    """Gathers for the second chunks delay the first messages over the same network, and no messages inside the host."""
    inside, network = (
        time_of(2, 2, 2, times_of(2, 2, [1.0], 1.0, gather_s=2.0, leaves_host=[of_hops] * 4), overlaps=True)
        for of_hops in (False, True)
    )

    assert network > inside + 0.5


def test_a_tied_table_waits_for_both_ends():
    """The exchange of a tied table's gradients begins when the first and the last stage have reduced theirs."""
    times = times_of(3, 1, [1.0], after_s=0.5, tied_s=0.7)

    reduced_s, tied_s = pipeline_time_s(3, 1, 6, times, overlaps_messages=False)
    assert reduced_s[0] == pytest.approx(time_of(3, 1, 6, times_of(3, 1, [1.0]), overlaps=False) + 0.5)
    assert tied_s[0] == pytest.approx(0.7)


def test_configurations_are_timed_together():
    """A batch has the times that each of its configurations has alone."""
    one = times_of(4, 2, [1.0, 0.5, 2.0], 0.1, gather_s=0.3, reduce_s=2.0, slowing=0.2)
    two = times_of(4, 2, [0.3, 0.9], 0.2, gather_s=3.0)

    together, _ = pipeline_time_s(4, 2, 24, join_times([one, two]), overlaps_messages=True)
    alone = [time_of(4, 2, 24, times, overlaps=True) for times in (one, two)]
    assert together.tolist() == pytest.approx(alone)
