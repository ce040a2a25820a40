import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.operators import OpKind, Phase
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


def test_only_memory_and_crashes_remove_a_candidate():
    """A machine's failure, a time-out or an early end say nothing final about a candidate."""
    assert {status for status in Status if status.removes_candidate} == {Status.OUT_OF_MEMORY, Status.CRASHED}


def test_a_log_keeps_its_end():
    """A long log is cut at its beginning, because the reason stands at its end."""
    tail = tail_of("x" * 100_000 + "the reason")

    assert len(tail) == MAX_LOG_TAIL
    assert tail.endswith("the reason")
