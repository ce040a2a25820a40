import dataclasses
import math

import numpy as np
import pytest

from costmodels.blocks.operator import COLLECTIVES, OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.operators.kernels import collective_s, kernel_s
from costmodels.step.step_time import estimate_step
from costmodels.surrogates import operator_surrogate
from costmodels.surrogates.error_terms import step_terms
from costmodels.surrogates.operator_surrogate import (
    LEAST_FACTOR,
    Form,
    OperatorErrors,
    compose,
    fit_operators,
    timing_variance,
)
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import job_of, setting_for

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
MATMUL = (OpKind.MATMUL, FORWARD)


def products(rng, num_shapes, least=1024, most=16384):
    """Random shapes of products."""
    return np.rint(2 ** rng.uniform(np.log2(least), np.log2(most), (num_shapes, 3)))


def errors_of(shape, log_error, *, key=MATMUL, variance=1e-4):
    """Measurements of one kind, all with the same noise."""
    return OperatorErrors(
        kind=key[0],
        phase=key[1],
        shape=np.asarray(shape, dtype=np.float64),
        log_error=np.broadcast_to(np.asarray(log_error, dtype=np.float64), len(shape)),
        variance=np.full(len(shape), variance),
    )


def smooth_error(shape):
    """An error that all shapes share, and a part that changes with the inner size."""
    return 0.3 + 0.15 * np.sin(np.log2(shape[:, 1]))


@pytest.fixture
def learned(rng):
    """A surrogate of 60 products whose error is smooth, and their shapes."""
    shape = products(rng, 60)
    return fit_operators([errors_of(shape, smooth_error(shape))]), shape


@pytest.fixture(scope="module")
def setting():
    """A job on two hosts, some of its candidates, and the terms of their steps."""
    job = job_of()
    cluster, runtime = find_cluster("dgx-h100", hosts=2), find_runtime("megatron-core")
    layouts = [(tp, pp, 16 // tp // pp, mbs) for tp in (1, 2, 4, 8) for pp in (1, 2) for mbs in (1, 2)]
    grid = ConfigGrid.from_configs([ParallelConfig(tp=tp, pp=pp, dp=dp, mbs=mbs) for tp, pp, dp, mbs in layouts])
    return job, cluster, runtime, grid, step_terms(setting_for(job, cluster, runtime), grid)


def test_unseen_shapes_are_predicted_better_than_by_the_prior(learned, rng):
    """Held-out shapes in range come within 5% of their error in the median, where the prior is 30% off.

    Shapes 10 doublings away get an error near the mean of those measured, and twice the doubt of the seen range.
    """
    surrogate, shape = learned
    unseen = products(rng, 200)

    mean, _ = surrogate.mean_and_deviation(*MATMUL, unseen)
    of_far, far = surrogate.mean_and_deviation(*MATMUL, shape[:20] * [1, 2**10, 1])
    _, near = surrogate.mean_and_deviation(*MATMUL, shape + 8)

    assert np.median(np.abs(mean - smooth_error(unseen))) < 0.05
    assert np.median(np.abs(smooth_error(unseen))) > 0.25
    assert np.abs(of_far - smooth_error(shape).mean()).max() < 0.25
    assert np.median(far) > 2 * np.median(near)


def test_an_operator_of_no_size_is_no_more_uncertain_than_a_small_one(rng):
    """After messages of some MB, one of no bytes takes its start-up time, which small ones tell: its doubt is that
    of a message of 64 KB to a third, where it was four times as large.
    """
    shape = np.column_stack([2.0 ** rng.uniform(20, 30, 24), np.full(24, 8), np.ones(24)])
    surrogate = fit_operators([errors_of(shape, 0.2 + 0.02 * rng.standard_normal(24), key=(OpKind.SEND_RECV, FORWARD))])

    _, (nothing, small) = surrogate.mean_and_deviation(OpKind.SEND_RECV, FORWARD, np.array([[0, 8, 1], [2**16, 8, 1]]))

    assert small < nothing < 4 / 3 * small


def test_intervals_hold_what_they_promise(rng):
    """Over many smooth errors, 90% to 99.5% of unseen shapes lie in the 95% interval."""
    covered = []
    for _ in range(10):
        waves, start = rng.normal(0, 0.4, (3, 8)), rng.uniform(0, 6, 8)
        seen, unseen = products(rng, 40), products(rng, 60)
        truth = [0.1 * np.cos(np.log2(shape) @ waves + start).sum(axis=1) for shape in (seen, unseen)]
        surrogate = fit_operators([errors_of(seen, truth[0] + 0.02 * rng.standard_normal(40), variance=0.02**2)])
        mean, deviation = surrogate.mean_and_deviation(*MATMUL, unseen)
        covered.append(np.abs(truth[1] - mean) < 1.96 * deviation)

    assert 0.90 < np.mean(covered) < 0.995


def test_kinds_that_were_not_measured_are_absent(learned, setting, rng):
    """A surrogate knows the kind and phase that were measured and no other; no measurements, no kinds.

    One that knows nothing composes to no change of any candidate in any draw.
    """
    surrogate, _ = learned
    *_, grid, terms = setting

    known = {(kind, phase) for kind in OpKind for phase in Phase if surrogate.knows(kind, phase)}
    composed = compose(terms, fit_operators([]), 5, rng)

    assert known == {MATMUL}
    assert not fit_operators([]).processes
    assert not fit_operators([errors_of(np.zeros((0, 3)), 0.0)]).processes
    assert composed.mean == pytest.approx(np.zeros(len(grid)))
    assert composed.deviation.shape == (5, len(grid))
    assert not composed.deviation.any()


def test_one_process_serves_a_collective_in_both_phases():
    """What an all-reduce took in the backward pass is known of it in the forward pass, and with no phase at all."""
    shape = np.array([[2.0**power, 8, 1] for power in range(18, 26)])
    surrogate = fit_operators([errors_of(shape, 0.7, key=(OpKind.ALL_REDUCE, BACKWARD))])

    for phase in (FORWARD, BACKWARD, None):
        assert surrogate.knows(OpKind.ALL_REDUCE, phase)
        mean, _ = surrogate.mean_and_deviation(OpKind.ALL_REDUCE, phase, shape)
        assert mean == pytest.approx(0.7, abs=0.05)


@pytest.mark.parametrize("kind", list(OpKind))
def test_every_kind_can_be_learned(kind, rng):
    """Each kind of operator has features for its shapes, and learns a common factor from eight of them."""
    num_sizes = {OpKind.GROUPED_MATMUL: 4, OpKind.ATTENTION: 5, OpKind.NORM: 2, OpKind.ELEMENTWISE: 1}.get(kind, 3)
    shape = np.rint(2 ** rng.uniform(10, 14, (8, num_sizes)))
    surrogate = fit_operators([errors_of(shape, 0.5, key=(kind, FORWARD))])

    mean, deviation = surrogate.mean_and_deviation(kind, FORWARD, np.rint(shape * 1.5))

    assert mean == pytest.approx(0.5, abs=0.15)
    assert np.all((deviation > 0) & (deviation < 0.6))
    assert surrogate.draw(kind, FORWARD, shape, 7, rng).shape == (7, 8)


@pytest.mark.parametrize("form", list(Form))
def test_draws_have_the_mean_and_deviation(form, rng):
    """At shapes seen and unseen, 6,000 draws agree with the closed form, within the first order that it is."""
    shape = products(rng, 30)
    surrogate = fit_operators([errors_of(shape, 0.2 * smooth_error(shape), variance=1e-3)], form)
    asked = np.concatenate([shape[:5], products(rng, 15)])

    drawn = surrogate.draw(*MATMUL, asked, 6000, rng)

    mean, deviation = surrogate.mean_and_deviation(*MATMUL, asked)
    assert drawn.dtype == np.float32
    assert drawn.mean(axis=0) == pytest.approx(mean, abs=0.02)
    assert drawn.std(axis=0) == pytest.approx(deviation, rel=0.2)


@pytest.mark.parametrize("form", list(Form))
def test_draws_are_joint_over_shapes(learned, rng, form):
    """Equal shapes have equal errors in every draw, and neighbours far from the measured ones err together.

    In the paper's form the neighbours are drawn independently.
    """
    _, shape = learned
    surrogate = fit_operators([errors_of(shape, smooth_error(shape))], form)
    far = shape[:1] * [1, 2**8, 1]

    drawn = surrogate.draw(*MATMUL, np.concatenate([far, far, far + 8]), 500, rng)

    correlation = np.corrcoef(drawn[:, 0], drawn[:, 2])[0, 1]
    assert np.array_equal(drawn[:, 0], drawn[:, 1])
    assert abs(correlation) < 0.2 if form is Form.RELATIVE else correlation > 0.9


@pytest.mark.parametrize("form", list(Form))
def test_no_time_is_negative(form, rng):
    """With errors that scatter by a factor of ten, every drawn time is positive; in the paper's form by its cut."""
    shape = products(rng, 20)
    surrogate = fit_operators([errors_of(shape, rng.normal(0, 1.5, 20))], form)

    drawn = surrogate.draw(*MATMUL, products(rng, 50, 64, 2**18), 400, rng)

    assert np.isfinite(drawn).all()
    if form is Form.RELATIVE:
        assert drawn.min() >= math.log(LEAST_FACTOR) - 1e-6
        assert np.isclose(drawn, math.log(LEAST_FACTOR), atol=0.5).any()


def test_repetitions_of_a_shape_are_averaged(rng):
    """Nine measurements of each shape say what one says that has their mean and a ninth of their variance.

    Where they scatter more than their variances allow, the mean's variance grows. Shapes stand in order of arrival.
    """
    shape = products(rng, 12)
    nine = np.repeat(smooth_error(shape)[:, None], 9, axis=1) + 0.03 * rng.standard_normal((12, 9))
    nine += 0.03 * (np.arange(9) - 4)  # the spread that their variance of 0.1 promises, and no more

    each, once, scattered = (
        fit_operators(errors).processes[MATMUL]
        for errors in (
            [errors_of(shape, nine[:, i], variance=0.01) for i in range(9)],
            [errors_of(shape, nine.mean(axis=1), variance=0.01 / 9)],
            [errors_of(shape, nine[:, i] + 3 * (i - 4), variance=0.01) for i in range(9)],
        )
    )

    assert np.array_equal(each.shape, once.shape)
    assert each.process.values == pytest.approx(once.process.values)
    assert each.process.variance == pytest.approx(once.process.variance)
    assert scattered.process.values == pytest.approx(once.process.values)
    assert np.all(scattered.process.variance > 10 * once.process.variance)


def test_a_sample_weighs_by_its_count():
    """A mean over many executions outweighs a single one, and no count buys certainty."""
    shape = np.array([[4096.0, 4096.0, 4096.0]] * 2)
    of_many, of_one = timing_variance(np.array([10_000, 1]))
    errors = OperatorErrors(
        kind=MATMUL[0],
        phase=MATMUL[1],
        shape=shape,
        log_error=np.array([0.1, 0.3]),
        variance=np.array([of_many, of_one]),
    )

    values = fit_operators([errors]).processes[MATMUL].process.values

    assert values == pytest.approx([0.1], abs=0.005)
    assert timing_variance(np.array([10**9])) == pytest.approx([0.01**2], rel=1e-3)


def test_a_surrogate_is_a_function_of_the_measurements_in_order(rng):
    """Whatever was fitted in between, the same measurements give the same surrogate, in one piece or in several."""
    shape = products(rng, 21)
    pieces = [errors_of(shape[i : i + 7], smooth_error(shape[i : i + 7])) for i in range(0, 21, 7)]
    asked = products(rng, 10)
    step_by_step = [fit_operators(pieces[: i + 1]) for i in range(3)][-1]

    operator_surrogate._fit_hyperparameters.cache_clear()
    afresh = fit_operators([errors_of(shape, smooth_error(shape))])

    for ours, theirs in zip(
        step_by_step.mean_and_deviation(*MATMUL, asked), afresh.mean_and_deviation(*MATMUL, asked), strict=True
    ):
        assert np.array_equal(ours, theirs)


def test_hyperparameters_are_learned_anew_when_the_shapes_have_doubled(rng):
    """Hyperparameters stay as they are from 16 to 31 distinct shapes, and change with the 32nd."""
    shape = products(rng, 32)
    errors = errors_of(shape, smooth_error(shape) + 0.05 * rng.standard_normal(32))

    def hyper(num_shapes):
        some = {name: getattr(errors, name)[:num_shapes] for name in ("shape", "log_error", "variance")}
        return fit_operators([dataclasses.replace(errors, **some)]).processes[MATMUL].process.hyper

    assert hyper(16) is hyper(23) is hyper(31)
    assert hyper(32).amplitude != hyper(31).amplitude


def error_by_size(kind, shape):
    """Some percent, more for some kinds and sizes than for others."""
    return 0.05 * np.sin(np.log2(np.maximum(shape, 1)).sum(axis=1)) + 0.02 * (list(OpKind).index(kind) % 3)


def test_the_mean_of_a_composition_is_what_the_cost_model_says_with_those_errors(setting, rng):
    """Known errors of 5% in operators and collectives move every candidate's step as the exact estimate has it."""
    job, cluster, runtime, grid, terms = setting
    measured = [
        errors_of(term.shape, error_by_size(term.kind, term.shape), key=(term.kind, term.phase), variance=1e-6)
        for term in terms.terms
    ]

    composed = compose(terms, fit_operators(measured), 2, rng)

    def kernel_time(operator, device, job, runtime):
        seconds = kernel_s(operator, device, job, runtime)
        return seconds * np.exp(error_by_size(operator.kind, operator.shape))

    def collective_time(collective):
        seconds, shape = collective_s(collective), collective.shape
        error = error_by_size(collective.kind, shape.reshape(-1, 3)).reshape(shape.shape[:-1])
        return seconds * np.exp(error)

    exact = estimate_step(
        setting_for(job, cluster, runtime), grid, kernel_time=kernel_time, collective_time=collective_time
    )
    change = np.log(exact.step_time_s / estimate_step(setting_for(job, cluster, runtime), grid).step_time_s)
    assert change.std() > 0.005
    assert composed.mean == pytest.approx(change, abs=0.005)


def test_draws_of_a_composition_deviate_about_its_mean(setting, rng):
    """Deviations average to zero over the draws, and are wider for candidates far from the measured shapes.

    Two candidates that differ in pp alone run the same operators, and err alike in every draw.
    """
    *_, grid, terms = setting
    near = [
        errors_of(term.shape[:2], 0.1, key=(term.kind, term.phase))
        for term in terms.terms
        if term.kind not in COLLECTIVES
    ]
    alike = np.flatnonzero((grid.tp == 4) & (grid.mbs == 1))

    composed = compose(terms, fit_operators(near), 3000, rng)

    deviation = composed.deviation.std(axis=0)
    assert composed.deviation.dtype == np.float32
    assert composed.deviation.mean(axis=0) == pytest.approx(np.zeros(len(grid)), abs=0.01)
    assert deviation.max() > 1.5 * deviation.min()
    assert len(alike) == 2
    assert np.corrcoef(composed.deviation[:, alike].T)[0, 1] > 0.95


def test_times_alone_are_believed_before_any_trial(setting, rng):
    """Products that take a fifth longer alone make every candidate slower, and by what products are of its step."""
    job, cluster, runtime, grid, terms = setting
    shapes = {
        phase: [term for term in terms.terms if (term.kind, term.phase) == (OpKind.MATMUL, phase)] for phase in Phase
    }
    alone = [
        errors_of(np.concatenate([term.shape for term in of_phase]), math.log(1.2), key=(OpKind.MATMUL, phase))
        for phase, of_phase in shapes.items()
    ]

    composition = compose(terms, fit_operators([], alone=alone), 50, rng)

    def slow(operator, device, job, runtime):
        return kernel_s(operator, device, job, runtime) * (1.2 if operator.kind is OpKind.MATMUL else 1)

    before, after = (
        estimate_step(setting_for(job, cluster, runtime), grid, kernel_time=time).step_time_s
        for time in (kernel_s, slow)
    )
    np.testing.assert_allclose(composition.mean, np.log(after / before), atol=0.015)  # to first order


def test_training_corrects_what_alone_says(rng):
    """Where operators alone are 30% slower than predicted and in training 50%, the difference is learned from few."""
    shape = products(rng, 60)
    alone = errors_of(shape, smooth_error(shape))
    in_training = errors_of(shape[:6], smooth_error(shape[:6]) + 0.2)
    unseen = products(rng, 200)

    both = fit_operators([in_training], alone=[alone])
    errors = (
        both.processes[MATMUL].mean_and_deviation(unseen)[0] + both.alone[(*MATMUL, "")].mean_and_deviation(unseen)[0]
    )
    few = fit_operators([in_training]).mean_and_deviation(*MATMUL, unseen)[0]
    truth = smooth_error(unseen) + 0.2

    assert np.median(np.abs(errors - truth)) < 0.05
    assert np.median(np.abs(errors - truth)) < 0.7 * np.median(np.abs(few - truth))


def test_roles_of_elementwise_operators_are_apart_alone(setting):
    """A slow activation alone says nothing of the residual's addition, though both have as many elements."""
    terms = setting[-1]
    activation = next(term for term in terms.terms if term.name == "dense_mlp.activation")
    alone = dataclasses.replace(
        errors_of(activation.shape, 1.0, key=(OpKind.ELEMENTWISE, FORWARD)),
        roles=("activation",) * len(activation.shape),
    )

    surrogate = fit_operators([], alone=[alone])
    told = {term.name for term in terms.terms if surrogate.processes_of(term)}

    assert told == {"dense_mlp.activation"}
