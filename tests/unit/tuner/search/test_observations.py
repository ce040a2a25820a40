import math
import statistics

import numpy as np
import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import Observation, OperatorSample, Status
from tuner.search.observations import LEAST_NOISE, OBSERVATION, STATUS, STEP_NOISE, observations_of
from tuner.search.proxy.proxy_trials import PROXY, Proxy

SAMPLE = OperatorSample(kind=OpKind.MATMUL, phase=Phase.FORWARD, shape=(1.0, 512.0, 0.5, 64.0), time_s=2e-3, count=32)


def trial(number, candidate, observation=None, *, state=None, value=None, status=None):
    """A trial of a candidate, as the study's loop leaves it behind its observation."""
    attributes = {} if observation is None else {OBSERVATION: observation.as_json()}
    if status or (observation and observation.status is not Status.OK):
        attributes[STATUS] = str(status or observation.status)
    if observation is not None:
        value = observation.step_time_s if value is None else value
    if state is None:
        state = TrialState.COMPLETE if value is not None else TrialState.FAIL
    made = create_trial(
        state=state,
        value=value,
        params={} if candidate is None else {"tp": candidate},
        distributions={} if candidate is None else {"tp": IntDistribution(0, 99)},
        user_attrs=attributes,
    )
    made.number = number
    return made


def observations(*trials, finishing=()):
    """What these trials tell; candidates from 50 on are none of this study's."""
    endings = [(one, one.state, one.values) for one in trials]
    return observations_of([*endings, *finishing], lambda params: params["tp"] if params.get("tp", 99) < 50 else None)


def ok(*step_times_s, **details):
    """A trial that ended well."""
    return Observation(status=Status.OK, step_times_s=step_times_s, **details)


def failed(status, *step_times_s, **details):
    """One that did not."""
    return Observation(status=status, step_times_s=step_times_s, **details)


def test_a_trial_that_ended_well_is_measured():
    """Its candidate is explored, its step time is the median, and its peak is kept; no trial tells nothing."""
    nothing, found = observations(), observations(trial(0, 7, ok(1.0, 3.0, 1.5, peak_memory_bytes=2**30)))

    assert len(nothing.measured) == len(nothing.log_step_s) == len(nothing.variance) == nothing.num_decisions == 0
    assert nothing.measured.dtype == np.int64
    assert (nothing.best_s, nothing.closed) == (None, frozenset())
    assert found.measured.tolist() == [7]
    assert found.log_step_s == pytest.approx([math.log(1.5)])
    assert (found.best_s, found.explored, found.impossible) == (1.5, {7}, frozenset())
    assert found.peaks_bytes == {7: 2**30}


@pytest.mark.parametrize(
    ("status", "explored", "misfits", "crashed"),
    [
        (Status.OUT_OF_MEMORY, set(), {3}, set()),
        (Status.CRASHED, set(), set(), {3}),
        (Status.TIMEOUT, {3}, set(), set()),
        (Status.PRUNED, {3}, set(), set()),
        (Status.INCIDENT, set(), set(), set()),
        (Status.CANCELLED, set(), set(), set()),
    ],
)
def test_each_ending_says_what_it_says(status, explored, misfits, crashed):
    """Only memory and crashes speak against a candidate, and an incident or the study's end says nothing of it; steps
    before a stop are measurements, and no best, those before a failure are none.
    """
    stopped = failed(status, 2.0, 2.2, 2.1, peak_memory_bytes=5, time_limit_s=100.0)

    found = observations(trial(0, 3, stopped), trial(1, 4, ok(3.0)))

    assert (found.explored - {4}, found.misfits, found.crashed) == (explored, misfits, crashed)
    assert found.measured.tolist() == [*sorted(explored), 4]
    assert found.log_step_s == pytest.approx(np.log([2.1, 3.0][-len(found.measured) :]))
    assert (found.best_s, found.peaks_bytes, found.limits_s, found.num_decisions) == (3.0, {}, {}, 2)


def test_a_time_out_without_a_step_bounds_the_step():
    """Start-up as usual in this study, whenever it was told, is no part of the limit that a step took at least; of two
    time-outs the longer limit holds, and a measurement ends it.
    """
    cut_off = [trial(at, 9, failed(Status.TIMEOUT, time_limit_s=limit_s)) for at, limit_s in enumerate((60.0, 90.0))]
    well = [trial(2 + at, at, ok(1.0, 1.0, elapsed_s=elapsed_s)) for at, elapsed_s in enumerate((12.0, 22.0, 14.0))]

    assert observations(cut_off[0], *well).limits_s == {9: 60.0 - 12.0}
    assert observations(*cut_off, *well).limits_s == {9: 90.0 - 12.0}
    assert observations(*cut_off, *well).measured.tolist() == [0, 1, 2]
    assert observations(*cut_off, *well, trial(5, 9, ok(85.0))).limits_s == {}


def test_a_time_out_says_nothing_where_no_start_up_is_known():
    """The limit may be all start-up: there is no bound without a trial that ended well, or within its start-up."""
    cut_off = trial(0, 9, failed(Status.TIMEOUT, time_limit_s=60.0))

    assert observations(cut_off).explored == {9}
    for others in ((), (trial(1, 1, ok(1.0)),), (trial(1, 1, ok(1.0, elapsed_s=90.0)),)):
        assert observations(cut_off, *others).limits_s == {}


def test_repeats_are_averaged():
    """A candidate that was tried twice is seen once, at the mean of the logarithms, with half the variance, or where
    the trials differ by more than their steps explain, as uncertain as they differ.
    """
    once = observations(trial(0, 5, ok(1.0, 1.1, 1.2)))
    twice = observations(trial(0, 5, ok(1.0, 1.1, 1.2)), trial(1, 6, ok(9.0)), trial(2, 5, ok(1.01, 1.111, 1.212)))

    assert twice.measured.tolist() == [5, 6]
    assert twice.log_step_s[0] == pytest.approx(math.log(1.1 * 1.111) / 2)
    assert twice.variance[0] == pytest.approx(once.variance[0] / 2)
    assert twice.best_s == pytest.approx(math.sqrt(1.1 * 1.111))
    assert twice.num_completed.tolist() == [2, 1]
    assert twice.num_trials == {5: 2, 6: 1}
    assert twice.num_decisions == 3
    apart = observations(trial(0, 5, ok(1.0, 1.001, 1.0)), trial(1, 5, ok(1.1, 1.101, 1.1)))
    assert apart.variance[0] == pytest.approx(math.log(1.1) ** 2 / 2 / 2)


def test_endings_of_one_candidate_are_weighed():
    """A candidate that failed and ran, in any order, is one that runs; memory that ran out explains another crash."""
    crashed, misfit, ran = failed(Status.CRASHED), failed(Status.OUT_OF_MEMORY), ok(1.0)
    endings = [(1, crashed), (1, ran), (2, ran), (2, misfit), (3, crashed), (3, misfit)]

    found = observations(*(trial(number, candidate, end) for number, (candidate, end) in enumerate(endings)))

    assert (found.explored, found.misfits, found.crashed) == ({1, 2}, {3}, frozenset())
    assert found.impossible == {3}


def test_trials_of_no_candidate_tell_nothing():
    """A trial whose parameters name no candidate of this study is no decision, and nothing that it found counts."""
    foreign = [trial(0, 60, ok(0.1, elapsed_s=10.1, operator_samples=(SAMPLE,))), trial(1, None, ok(0.1))]

    found = observations(*foreign, trial(2, 4, failed(Status.TIMEOUT, time_limit_s=50.0)))

    assert found.measured.tolist() == []
    assert found.best_s is None
    assert found.samples == ()
    assert found.limits_s == {}
    assert found.num_decisions == 1


def test_trials_that_run_are_pending():
    """Running and waiting trials close their candidates and count as decisions, and tell nothing else; a trial whose
    end the storage does not hold yet counts by the state and value it is about to have, at the place of its number.
    """
    ended, waiting = trial(4, 1, ok(1.0)), trial(5, 3, state=TrialState.WAITING)
    running = trial(3, 8, ok(2.0, 2.0), state=TrialState.RUNNING, value=None)

    before = observations(ended, running, waiting)
    after = observations(ended, waiting, finishing=[(running, TrialState.COMPLETE, [2.0])])

    assert (before.pending, before.closed, before.num_decisions) == ({3, 8}, {1, 3, 8}, 3)
    assert before.measured.tolist() == [1]
    assert (after.pending, after.best_s) == ({3}, 1.0)
    assert after.measured.tolist() == [8, 1]


def test_operator_times_of_all_trials_are_kept():
    """Samples of failed trials count as those of others do; a time that is none is left out."""
    broken = OperatorSample(kind=OpKind.NORM, phase=Phase.FORWARD, shape=(1.0, 2.0), time_s=math.nan, count=1)
    found = observations(
        trial(0, 1, ok(1.0, operator_samples=(SAMPLE, broken))),
        trial(1, 2, failed(Status.CRASHED, operator_samples=(SAMPLE,))),
    )

    assert found.samples == (SAMPLE, SAMPLE)


def test_variance_is_that_of_a_median():
    """Over 4,000 trials of seven normal steps the median varies as the formula says within 15%, on top of what the
    steps of one trial share; a single step, or a value without an observation, has the assumed noise.
    """
    assert observations(trial(0, 1, ok(1.0)), trial(1, 2, value=2.0)).variance == pytest.approx([STEP_NOISE**2] * 2)
    rng = np.random.default_rng(0)
    steps = np.exp(0.05 * rng.standard_normal((4000, 7)))

    found = [observations(trial(0, 0, ok(*some))).variance[0] - LEAST_NOISE**2 for some in steps[:400].tolist()]

    assert statistics.mean(found) == pytest.approx(np.var(np.median(np.log(steps), axis=1)), rel=0.15)


# Loops that are not ours


def test_values_of_a_plain_loop_are_enough():
    """In a loop that keeps no observation a value is a step time; a failure or infinity is a crash of the candidate."""
    found = observations(trial(0, 1, value=2.0), trial(1, 2, state=TrialState.FAIL), trial(2, 3, value=math.inf))

    assert found.measured.tolist() == [1]
    assert found.log_step_s == pytest.approx([math.log(2.0)])
    assert (found.crashed, found.best_s) == ({2, 3}, 2.0)


def test_a_loop_may_prune():
    """A trial that a plain loop pruned was slow and did not crash: the steps that it has reported are measurements."""
    study = optuna.create_study()

    def objective(plain):
        plain.suggest_int("tp", 3, 3)
        for step, step_time_s in enumerate((4.0, 2.0, 2.5)):
            plain.report(step_time_s, step)
        raise optuna.TrialPruned

    study.optimize(objective, n_trials=1)
    found = observations(*study.trials)

    assert found.explored == {3}
    assert found.crashed == frozenset()
    assert found.log_step_s == pytest.approx([math.log(2.5)])
    assert found.best_s is None


# Smaller jobs in place of candidates

SMALLER = Proxy(
    reduction=Reduction(hosts=1, layers=4, global_batch_size=8), config=ParallelConfig(pp=2, tp=2, dp=2, mbs=2)
)


def proxy_trial(number, candidate, observation, proxy=SMALLER):
    """A trial that ran a smaller job, as the study's loop leaves it; it runs still without an observation."""
    if observation is None:
        made = trial(number, candidate, state=TrialState.RUNNING)
    else:
        state = TrialState.PRUNED if observation.status is Status.OK else TrialState.FAIL
        made = trial(number, candidate, observation, state=state, status=observation.status)
        made.values = None
    made.user_attrs = {**made.user_attrs, PROXY: proxy.as_json()}
    return made


def test_a_proxy_is_no_measurement_of_its_candidate():
    """What a smaller job measured stands apart: its candidate is neither measured nor explored, and it is no best."""
    found = observations(proxy_trial(0, 7, ok(1.0, 1.0, peak_memory_bytes=2**30, operator_samples=(SAMPLE,))))

    assert found.measured.tolist() == []
    assert (found.explored, found.best_s, found.peaks_bytes) == (frozenset(), None, {})
    (seen,) = found.proxies
    assert (seen.proxy, seen.positions, seen.peak_bytes) == (SMALLER, (7,), 2**30)
    assert seen.log_step_s == pytest.approx(0.0)
    assert found.samples == (SAMPLE,)
    assert (found.num_decisions, found.num_proxies, found.num_at_full_size) == (1, 1, 0)
    assert found.proxied == {7}


def test_equal_proxies_of_two_candidates_are_one():
    """Trials that ran the same smaller job are one measurement, with a smaller variance, of both candidates' proxy."""
    alone = observations(proxy_trial(0, 7, ok(1.0)))
    both = observations(proxy_trial(0, 7, ok(1.0)), proxy_trial(1, 8, ok(1.0)))

    (seen,) = both.proxies
    assert seen.positions == (7, 8)
    assert seen.variance == pytest.approx(alone.proxies[0].variance / 2)


@pytest.mark.parametrize(
    ("status", "tells", "ran_out", "crashed"),
    [
        (Status.OUT_OF_MEMORY, True, True, False),
        (Status.CRASHED, True, False, True),
        (Status.TIMEOUT, True, False, False),
        (Status.INCIDENT, False, False, False),
        (Status.CANCELLED, False, False, False),
    ],
)
def test_what_the_failure_of_a_proxy_says(status, tells, ran_out, crashed):
    """No failure of a smaller job removes its candidate, and those of the machine say nothing at all."""
    found = observations(proxy_trial(0, 7, failed(status)))

    assert (found.impossible, found.explored) == (frozenset(), frozenset())
    assert [(seen.ran_out, seen.crashed) for seen in found.proxies] == ([(ran_out, crashed)] if tells else [])
    assert set(found.crashed_by_proxy) == ({7} if crashed else set())


def test_a_proxy_in_flight_closes_its_candidate():
    """While a smaller job runs, nobody asks for its candidate, and full size can wait for it."""
    found = observations(proxy_trial(0, 7, None))

    assert found.pending == found.proxies_pending == {7}
    assert (found.num_proxies, found.proxies) == (1, ())
