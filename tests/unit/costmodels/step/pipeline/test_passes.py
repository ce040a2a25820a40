"""The passes of a pipeline: each schedule's order, and when its passes run."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from costmodels.step.pipeline.passes import SCHEDULES, Kind, PassOrder, pass_order
from costmodels.step.pipeline.schedules import idle_time_s, stage_in_flight
from tests.support.settings.pass_times import pass_times


@st.composite
def sizes(draw):
    """Any schedule, its numbers of stages and chunks, and one of micro-batches that it can run."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.integers(1, 6))
    vpp = draw(st.integers(1, 3)) if schedule == "1f1b" else 1
    micro_batches = draw(st.integers(pp, 4 * pp + 3)) if vpp > 1 else draw(st.integers(1, 16))
    return schedule, pp, vpp, micro_batches


orders = sizes().map(lambda size: pass_order(*size))


def equal_times(order, forward_s=1.0, backward_s=2.0, weights_s=0.0):
    """Times of a pipeline whose stages are alike; the whole stage takes as long as is said, a chunk its share."""
    num_virtual = order.pp * order.vpp
    pass_s = np.tile(np.array([[forward_s], [backward_s], [weights_s]]) / order.vpp, num_virtual)
    return pass_times(order, pass_s, np.zeros((2, num_virtual - 1)))


@given(orders)
def test_each_stage_runs_each_pass_once(order):
    """Every micro-batch goes once forward and once backward through every chunk of every stage, whatever the order."""
    passes = list(zip(order.stage, order.kind, order.micro_batch, order.chunk, strict=True))
    kinds = 1 + int(order.kind.max())

    assert len(set(passes)) == len(passes) == order.pp * order.vpp * order.num_micro_batches * kinds
    assert (np.diff(order.stage) >= 0).all()


@given(orders, st.integers(0, 2**32 - 1))
def test_passes_wait_for_what_they_need(order, seed):
    """No pass starts before its stage is free and its input is there, and none starts later than it could."""
    rng = np.random.default_rng(seed)
    num_virtual = order.pp * order.vpp
    pass_s = rng.uniform(0.1, 2.0, (3, num_virtual))
    transfer_s = rng.uniform(0.0, 0.5, (2, num_virtual - 1))

    times = pass_times(order, pass_s, transfer_s)

    end_of = {
        (kind, micro_batch, virtual): end_s
        for kind, micro_batch, virtual, end_s in zip(
            order.kind, order.micro_batch, (order.chunk * order.pp + order.stage), times.end_s, strict=True
        )
    }
    free_s = np.zeros(order.pp)
    for at, (stage, kind, micro_batch, virtual) in enumerate(
        zip(order.stage, order.kind, order.micro_batch, (order.chunk * order.pp + order.stage), strict=True)
    ):
        arrives_s = 0.0
        if kind == Kind.FORWARD and virtual:
            arrives_s = end_of[Kind.FORWARD, micro_batch, virtual - 1] + transfer_s[0, virtual - 1]
        elif kind == Kind.BACKWARD and virtual == num_virtual - 1:
            arrives_s = end_of[Kind.FORWARD, micro_batch, virtual]
        elif kind == Kind.BACKWARD:
            arrives_s = end_of[Kind.BACKWARD, micro_batch, virtual + 1] + transfer_s[1, virtual]
        elif kind == Kind.WEIGHTS:
            arrives_s = end_of[Kind.BACKWARD, micro_batch, virtual]
        assert times.start_s[at] == pytest.approx(max(free_s[stage], arrives_s))
        assert times.end_s[at] == pytest.approx(times.start_s[at] + pass_s[kind, virtual])
        free_s[stage] = times.end_s[at]


@given(schedule=st.sampled_from(["gpipe", "1f1b"]), pp=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_equal_stages_lose_all_but_one_micro_batch(schedule, pp, micro_batches):
    """With equal stages the bubble is (pp - 1) passes both ways (Narayanan et al. 2021, section 2.2.1)."""
    times = equal_times(pass_order(schedule, pp, 1, micro_batches))

    assert times.makespan_s == pytest.approx((micro_batches + pp - 1) * 3.0)


@given(pp=st.integers(2, 6), vpp=st.integers(2, 4), rounds=st.integers(1, 4))
def test_interleaving_divides_the_bubble(pp, vpp, rounds):
    """Chunks make the bubble smaller by their number (section 2.2.2); the closed form of step times says the same."""
    times = equal_times(pass_order("1f1b", pp, vpp, rounds * pp))

    passes_s, silent = np.full((2, pp, 1), [[[1.0]], [[2.0]]]), (np.zeros((pp - 1, 1)),) * 2
    bubble = float(idle_time_s(*passes_s, silent, np.array([rounds * pp]), np.array([vpp])).max())
    assert times.makespan_s == pytest.approx(rounds * pp * 3.0 + bubble)


@given(st.lists(st.floats(0.2, 3.0), min_size=1, max_size=6), st.integers(1, 20))
def test_the_slowest_stage_sets_the_pace(stage_s, micro_batches):
    """With unlike stages 1F1B takes at least what the closed form says, which is what each stage needs with the others'
    first and last passes, and at most the slowest one's work with one micro-batch through all others.
    """
    pp = len(stage_s)
    order = pass_order("1f1b", pp, 1, micro_batches)
    times = pass_times(order, np.outer([1.0, 2.0, 0.0], stage_s), np.zeros((2, pp - 1)))

    each_s = 3.0 * np.array(stage_s)
    passes_s, silent = (each_s[:, None] / 3, each_s[:, None] * 2 / 3), (np.zeros((pp - 1, 1)),) * 2
    idle_s = idle_time_s(*passes_s, silent, np.array([micro_batches]), np.array([1]))[:, 0]
    most_s = (micro_batches - 1) * each_s.max() + each_s.sum()
    assert (micro_batches * each_s + idle_s).max() - 1e-9 <= times.makespan_s <= most_s + 1e-9


@given(pp=st.integers(1, 8), micro_batches=st.integers(1, 24))
def test_weight_gradients_fill_the_bubble(pp, micro_batches):
    """ZB-H1 leaves (pp - 1) * (forward + backward - weights) of the bubble, a third of 1F1B's where all three are equal
    (Qi et al. 2023, section 2).
    """
    assume(micro_batches >= 2 * pp)
    times = equal_times(pass_order("zero-bubble", pp, 1, micro_batches), backward_s=1.0, weights_s=1.0)

    assert times.makespan_s == pytest.approx(3.0 * micro_batches + (pp - 1))


def peak_in_flight(order):
    """Peak number of micro-batches whose activations a stage holds until their last backward pass [p]."""
    last = order.kind.max()  # a schedule that splits backward passes ends with the gradients of the weights
    change = (order.kind == Kind.FORWARD).astype(np.int64) - (order.kind == last)
    peaks = [np.cumsum(change[order.stage == stage]).max() for stage in range(order.pp)]
    return np.array(peaks, dtype=np.float64) / order.vpp


@given(sizes())
def test_activations_in_flight_are_those_of_the_memory_model(size):
    """Every schedule holds at its peak what `stage_in_flight` says, stage by stage."""
    schedule, pp, vpp, micro_batches = size

    expected = stage_in_flight(np.arange(pp), pp, vpp, np.array(micro_batches), schedule)

    assert peak_in_flight(pass_order(*size)).tolist() == expected.tolist()


@given(pp=st.integers(1, 8), micro_batches=st.integers(1, 24))
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(pp, micro_batches):
    """Late weight gradients keep activations, but on no stage more than on the first of 1F1B (Qi et al. 2023)."""
    held = peak_in_flight(pass_order("zero-bubble", pp, 1, micro_batches))

    assert held.max() <= peak_in_flight(pass_order("1f1b", pp, 1, micro_batches)).max()


@pytest.mark.parametrize(
    ("schedule", "vpp", "micro_batches", "told"),
    [("gpipe", 2, 4, "vpp must be 1"), ("zero-bubble", 2, 4, "vpp must be 1")],
)
def test_schedules_say_what_they_cannot_do(schedule, vpp, micro_batches, told):
    """A schedule without chunks is refused with the number that is wrong."""
    with pytest.raises(ValueError, match=told):
        pass_order(schedule, 4, vpp, micro_batches)


def test_no_order_beats_the_exhaustive_best():
    """Of all orders in which two stages can run two micro-batches, none is shorter than 1F1B's with equal stages."""
    order = pass_order("1f1b", 2, 1, 2)
    pass_s, transfer_s = np.outer([1.0, 2.0, 0.0], np.ones(2)), np.zeros((2, 1))
    of_stage = [np.flatnonzero(order.stage == stage) for stage in range(2)]
    found = []
    for rows in itertools.product(*(itertools.permutations(part.tolist()) for part in of_stage)):
        at = np.concatenate(rows)
        arrays = {name: getattr(order, name)[at] for name in ("stage", "kind", "micro_batch", "chunk")}
        turned = PassOrder(pp=2, vpp=1, num_micro_batches=2, **arrays)
        try:
            found.append(pass_times(turned, pass_s, transfer_s).makespan_s)
        except ValueError:
            continue

    assert len(found) > 1
    assert pass_times(order, pass_s, transfer_s).makespan_s == pytest.approx(min(found))
