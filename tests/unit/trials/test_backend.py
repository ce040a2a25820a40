import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.blocks.operator import OpKind, Phase
from trials.backend import MAX_LOG_TAIL, Observation, OperatorSample, Status, tail_of

seconds = st.floats(min_value=1e-9, max_value=1e9)
samples = st.builds(
    OperatorSample,
    kind=st.sampled_from(OpKind),
    phase=st.sampled_from(Phase),
    shape=st.lists(st.floats(min_value=0.125, max_value=1e12), min_size=1, max_size=5).map(tuple),
    time_s=seconds,
    count=st.integers(min_value=1, max_value=10**6),
    name=st.text(max_size=20),
)
observations = st.builds(
    Observation,
    status=st.sampled_from(Status),
    step_times_s=st.lists(seconds, min_size=1, max_size=6).map(tuple),
    expected_steps=st.none() | st.integers(min_value=1, max_value=1000),
    elapsed_s=st.none() | seconds,
    measured_after_s=st.none() | seconds,
    lost_s=st.just(0.0) | seconds,
    time_limit_s=st.none() | seconds,
    peak_memory_bytes=st.none() | st.integers(min_value=0, max_value=2**45),
    operator_samples=st.lists(samples, max_size=3).map(tuple),
    log_tail=st.text(max_size=50),
    reason=st.text(max_size=50),
    origin=st.sampled_from(["measured", "synthetic"]),
)


@given(observation=observations)
def test_an_observation_survives_json(observation):
    """What is written to a study as JSON text comes back equal."""
    assert Observation.from_json(json.loads(json.dumps(observation.as_json()))) == observation


def test_the_step_time_is_the_median():
    """One slow step does not move the step time."""
    observation = Observation(status=Status.OK, step_times_s=(2.0, 1.0, 90.0))

    assert observation.step_time_s == 2.0


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_only_ok_has_a_step_time(status):
    """The steps of a trial that did not end well are no measurement."""
    assert Observation(status=status, step_times_s=(1.0,)).step_time_s is None


def test_a_log_keeps_its_end():
    """A long log is cut at its beginning, because the reason stands at its end."""
    tail = tail_of("x" * 100_000 + "the reason")

    assert len(tail) == MAX_LOG_TAIL
    assert tail.endswith("the reason")


def test_an_older_observation_is_read():
    """What was stored before trials were stopped early is still an observation."""
    stored = Observation(status=Status.OK, step_times_s=(1.0,)).as_json()
    for key in ("expected_steps", "elapsed_s", "measured_after_s", "lost_s", "time_limit_s", "killed_by"):
        del stored[key]

    assert Observation.from_json(stored) == Observation(status=Status.OK, step_times_s=(1.0,))


def test_stopping_early_saves_the_steps_that_were_left():
    """Seven steps not measured save seven times the median step; nothing is claimed where their number is unknown."""
    pruned = Observation(status=Status.PRUNED, step_times_s=(2.0, 9.0, 3.0), expected_steps=10)

    assert pruned.saved_s == 7 * 3.0
    assert dataclasses.replace(pruned, expected_steps=None).saved_s == 0.0
    assert dataclasses.replace(pruned, step_times_s=()).saved_s == 0.0
    assert dataclasses.replace(pruned, status=Status.OK).saved_s == 0.0


def test_a_time_limit_bounds_the_step_only_where_none_ended():
    """A trial that was cut off in its first step says that the step is slower than the limit less the start-up; steps
    that ended before the limit are measurements, and say more than a bound.
    """
    cut_off = Observation(status=Status.TIMEOUT, time_limit_s=60.0, elapsed_s=60.0)

    assert cut_off.censored_above_s(20.0) == 40.0
    assert cut_off.censored_above_s(60.0) is None
    assert dataclasses.replace(cut_off, step_times_s=(5.0,)).censored_above_s(20.0) is None
    assert Observation(status=Status.PRUNED).censored_above_s(20.0) is None


def test_start_up_is_what_the_steps_do_not_explain():
    """A trial of 30 s with two steps of 10 s and 12 s has spent 8 s before them."""
    observation = Observation(status=Status.OK, step_times_s=(10.0, 12.0), elapsed_s=30.0)

    assert observation.startup_s == 8.0
    assert dataclasses.replace(observation, elapsed_s=None).startup_s is None
    assert dataclasses.replace(observation, status=Status.TIMEOUT).startup_s is None
