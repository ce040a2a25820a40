"""What a log of observations keeps of ended trials: the same figures as when all of them are read again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import Observation, OperatorSample, Status
from tuner.search import observations as module
from tuner.search.observations import FAILS_ALIKE, OBSERVATION, STATUS, ObservationLog, Observations, observations_of
from tuner.search.proxy.proxy_trials import PROXY, Proxy
from tuner.search.standing import Standing

SAMPLE = OperatorSample(kind=OpKind.MATMUL, phase=Phase.FORWARD, shape=(1.0, 512.0, 0.5, 64.0), time_s=2e-3, count=32)
SMALLER = Proxy(config=ParallelConfig(pp=1, tp=1, dp=1), reduction=Reduction(hosts=1, layers=4, global_batch_size=8))


def position_of(params):
    """Candidates by their only parameter; trials without it name none."""
    return params.get("tp")


@st.composite
def endings(draw):
    """The observation and the attributes of a trial, by chance."""
    status = draw(st.sampled_from([Status.OK, Status.OK, Status.OK, *Status]))
    has_steps = status in (Status.OK, Status.PRUNED)
    steps_s = tuple(draw(st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=1, max_size=3))) if has_steps else ()
    observation = Observation(
        status=status,
        step_times_s=steps_s,
        peak_memory_bytes=draw(st.sampled_from([None, 10, 20])),
        elapsed_s=draw(st.sampled_from([None, 8.0, 9.0])),
        operator_samples=(SAMPLE,) * draw(st.integers(0, 2)),
    )
    attributes = {OBSERVATION: observation, STATUS: str(status)}
    if not draw(st.integers(0, 4)):
        attributes[PROXY] = SMALLER.as_json()
    return observation, attributes


@st.composite
def histories(draw):
    """Candidates of trials by number, the order in which they end, and how each ends."""
    positions = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    order = draw(st.permutations(range(len(positions))))
    excused = draw(st.sampled_from([None, None, None, *range(len(positions))]))
    return positions, order, [draw(endings()) for _ in positions], excused


def same(one, other):
    """Whether two observations are equal."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        if isinstance(getattr(one, name), np.ndarray)
        else getattr(one, name) == getattr(other, name)
        for name in Observations.__slots__
    )


@given(history=histories())
@settings(max_examples=150)
def test_what_is_kept_is_what_reading_everything_gives(history):
    """In whatever order trials end, their figures are those of all trials read at once, and so is a study resumed."""
    positions, order, ends, excused = history
    running = {}
    for number, position in enumerate(positions):
        trial = create_trial(
            state=TrialState.RUNNING, params={"tp": position}, distributions={"tp": IntDistribution(0, 9)}
        )
        trial.number = number
        running[number] = trial
    standing, log = Standing(ended=[], running=running), ObservationLog(position_of)
    for number in order:
        observation, attributes = ends[number]
        trial = running[number]
        trial.user_attrs = attributes | ({FAILS_ALIKE: [excused, number]} if number == excused else {})
        is_whole = observation.status is Status.OK and PROXY not in attributes
        state = TrialState.COMPLETE if is_whole else TrialState.FAIL
        values = [observation.step_time_s] if is_whole else None
        finishing = (trial, state, values)
        others = [each for each in (*standing.ended, *running.values()) if each is not trial]
        expected = observations_of([*((each, each.state, each.values) for each in others), finishing], position_of)

        assert same(log.observations_of(standing, but=number, finishing=finishing), expected)

        del running[number]
        trial.state, trial.values = state, values
        standing.ended.append(trial)
        assert same(log.observations_of(standing), expected)
    assert same(ObservationLog(position_of).observations(standing.ended), expected)
    some = standing.ended[: len(order) // 2]
    assert same(log.observations(some), observations_of([(t, t.state, t.values) for t in some], position_of))
    assert same(log.observations_of(standing), expected)


def test_an_ended_trial_is_read_once(monkeypatch):
    """However many trials have ended, the next decision reads those that are new or that run, and no others."""
    read = []
    parse = module._parse_trial
    monkeypatch.setattr(
        module, "_parse_trial", lambda ending, *how: (read.append(ending[0].number), parse(ending, *how))[1]
    )
    standing, log = Standing(ended=[], running={}), ObservationLog(position_of)
    for number in range(50):
        trial = create_trial(value=1.0, params={"tp": number % 10}, distributions={"tp": IntDistribution(0, 9)})
        trial.number = number
        standing.ended.append(trial)
        log.observations_of(standing)

    assert read == [*range(50)]
