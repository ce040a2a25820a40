"""Surrogate of operator times: a Gaussian process per kind and phase over measured operators (FlexParallel 3.1).

A process learns y = log(1 + e), where e = (t - t_hat) / t_hat is the relative error of a predicted time (equation 2).
A corrected time is therefore never negative:

    y(shape) = offset + m(features) + floors + own(shape)

All shapes of a kind share the offset. m is smooth in the features of `shape_features.py`. The floors are fixed times
that count in small operators. `own` is the independent residual of a shape, such as the kernel that a library picks for
it, or the last wave of tiles. Repeated measurements average noise away, but not the residual. Far from all measured
shapes the error returns to the offset, and its deviation to the prior's.

The most probable hyperparameters are too certain about shapes beyond the measured ones. Each third of every feature's
range is therefore predicted from the other two, and where the errors are larger than expected, all deviations are
widened.

Isolated operators, measured outside of training steps, have processes of their own, one for each role of elementwise
operators, which differ most. Measurements of training steps are then learned as the difference from these (Kennedy and
O'Hagan 2000, Predicting the output from a complex computer code when fast approximations are available, section 2.1,
with the factor 1).

Draws are joint over all shapes of a kind. A shape has the same error in every configuration and in every error term of
the step, and `compose` sums the errors to the change of a candidate's step time. The form that the paper prints is a
process on e itself, with draws that are independent between shapes (equation 5c); it is available for comparison, see
`Form`.

Letters: s measurements, t distinct measured shapes, k shapes asked for, d sizes of a shape, n candidates, M draws, r
distinct shapes of a term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from costmodels.blocks.operator import COLLECTIVES, OpKind, Phase
from costmodels.surrogates.error_terms import StepTerms, Term
from costmodels.surrogates.gaussian_process import GaussianProcess, Hyperparameters, HyperPrior, Points, fit, one_thread
from costmodels.surrogates.shape_features import feature_values, features_of, floor_columns
from hardware.arrays import FloatArray, IntArray

Key = tuple[OpKind, Phase | None]
"""Key of a process. A collective takes equally long in both phases and has one process for both."""

IsolatedKey = tuple[OpKind, Phase | None, str]
"""Key of a process of isolated operators, with the role of elementwise operators; empty for other kinds."""


OFFSET = 0.4
"""Standard deviation of the error that all shapes of a kind share, before its learned scale (assumed)."""

PRIOR = HyperPrior(amplitude=0.3, noise=0.05, spread=0.4)
"""Prior of every process; `noise` is the independent residual of a shape, and length scales are the features' own."""

FEWEST_LEARNED, MOST_LEARNED = 4, 128
"""Fewest and most distinct shapes that hyperparameters are learned from; the most is a power of two."""

NUM_RANGES = 3
GRANTED = 5
"""Pseudo-count of shapes whose errors agree with the deviations."""
LEAST_WIDENED = 1.5
"""Least factor on all variances, since hyperparameters are uncertain themselves. Chosen together with the features: of
seven settings of these constants, the one with the best coverage of the worst kind."""
FARTHEST = 3.0
"""Standard deviations at which an error is clipped, so that outliers widen nothing."""

NUM_SCALED = 1
"""Number of scaled linear columns: the offset is scaled, the floors are not."""

MOST_SHAPES = 1000
"""Most distinct shapes that a process keeps, the last to arrive. Its cost grows with their cube."""

LEAST_FACTOR = 0.05
"""Least ratio of a time to its prediction; only the paper's form needs this bound."""


class Form(StrEnum):
    """Form of the error that a process learns."""

    LOG = "log"
    """Logarithm log(1 + e), with joint draws."""
    RELATIVE = "relative"
    """Relative error e, cut off at 1 + e = LEAST_FACTOR, with independent draws (FlexParallel, equations 2 and 5c)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorErrors:
    """Errors of measured operators of one kind and phase, in order of arrival.

    Attributes:
        kind: Kind of operator, which selects the kernel model that predicted it.
        phase: Forward or backward; ignored for a collective.
        shape: Sizes of the operators, in the order of `costmodels.operators.layer_operators.Operator.shape` [s, d].
        log_error: Error log(measured / predicted) of each operator [s].
        variance: Noise variance of each error; `timing_variance` if nothing better is known [s].
        roles: Role of each elementwise operator, see `role_of` [s]; empty if unknown.
    """

    kind: OpKind
    phase: Phase | None
    shape: FloatArray
    log_error: FloatArray
    variance: FloatArray
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KindProcess:
    """Posterior of the errors of one kind of operator in one phase.

    Attributes:
        kind: Kind of operator.
        form: Form of the error that the process learns.
        shape: Distinct shapes that were measured [t, d].
        process: Process of offset, floors and smooth part; its noise is the independent residual of a shape.
    """

    kind: OpKind
    form: Form
    shape: FloatArray
    process: GaussianProcess

    def draw(self, shape: FloatArray, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return draws of log(1 + e) at `shape` [k, d] as [M, k]; equal shapes have equal errors."""
        first, row = distinct_shapes(shape)
        draw = self._draw_joint if self.form is Form.LOG else self._draw_each
        with one_thread():
            drawn = draw(shape[first], num_draws, rng)
        return np.asarray(drawn[:, row])

    def mean_and_deviation(self, shape: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return mean and deviation of log(1 + e) at `shape` [k, d], each [k]; to first order in the paper's form."""
        with one_thread():
            mean, deviation = self._moments(shape)
        if self.form is Form.LOG:
            return mean, deviation
        # the delta method: d log(1 + e) = de / (1 + e)
        factor = np.maximum(1 + mean, LEAST_FACTOR)
        return np.log(factor), deviation / factor

    def _moments(self, shape: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return posterior mean and deviation of the learned error at `shape` [k, d] with its residual, each [k]."""
        mean, deviation = self.process.mean_and_deviation(points_of(self.kind, shape))
        seen = self._find_measured(shape)
        at = seen[seen >= 0]
        share, own_variance = self._residual_moments()
        # a measured shape has the residual that its measurement shows, an unmeasured one that of the prior
        variance = deviation**2
        variance[seen < 0] += self.process.hyper.noise**2
        mean[seen >= 0] += share[at] * (self.process.values[at] - mean[seen >= 0])
        variance[seen >= 0] = (1 - share[at]) ** 2 * variance[seen >= 0] + own_variance[at]
        return mean, np.sqrt(variance)

    def _draw_joint(self, shape: FloatArray, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        smooth = self.process.draw(points_of(self.kind, shape), num_draws, rng)
        standard = rng.standard_normal(smooth.shape, dtype=np.float32)
        seen = self._find_measured(shape)
        at = seen[seen >= 0]
        share, own_variance = self._residual_moments()
        # given the smooth part, the residual of a measured shape depends on its own measurement alone
        mean = np.zeros_like(smooth)
        mean[:, seen >= 0] = share[at] * (self.process.values[at] - smooth[:, seen >= 0])
        deviation = np.full(len(shape), self.process.hyper.noise)
        deviation[seen >= 0] = np.sqrt(own_variance[at])
        return np.asarray(smooth + mean + deviation.astype(np.float32) * standard)

    def _draw_each(self, shape: FloatArray, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        mean, deviation = self._moments(shape)
        # inverse transform sampling of a normal distribution truncated at LEAST_FACTOR
        cut = ndtr((LEAST_FACTOR - 1 - mean) / deviation)
        quantile = cut + (1 - cut) * rng.random((num_draws, len(shape)))
        error = mean + deviation * ndtri(np.clip(quantile, 1e-12, 1 - 1e-12))
        return np.asarray(np.log(np.maximum(1 + error, LEAST_FACTOR)), dtype=np.float32)

    def _residual_moments(self) -> tuple[FloatArray, FloatArray]:
        """Return the share of noise-free residual in a deviation, and the residual's variance after it, each [t]."""
        own, noise = self.process.hyper.noise**2, self.process.variance
        return own / (own + noise), own * noise / (own + noise)

    def _find_measured(self, shape: FloatArray) -> IntArray:
        """Return the position among measured shapes of each of `shape` [k], or -1."""
        first, row = distinct_shapes(np.concatenate([self.shape, shape]))
        known = first[row[len(self.shape) :]]
        return np.where(known < len(self.shape), known, -1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorSurrogate:
    """Processes of all measured kinds and phases of operators.

    Attributes:
        processes: Processes of operators measured in training steps.
        alone: Processes of isolated operators; where there are both, the error is their sum.
    """

    processes: Mapping[Key, KindProcess]
    alone: Mapping[IsolatedKey, KindProcess] = field(default_factory=dict)

    def knows(self, kind: OpKind, phase: Phase | None) -> bool:
        """Return whether a training step measured any operator of this kind and phase."""
        return key_of(kind, phase) in self.processes

    def processes_of(self, term: Term) -> list[KindProcess]:
        """Return the processes whose sum is the error of a term: in training, and of the isolated operator."""
        key = key_of(term.kind, term.phase)
        found = (self.processes.get(key), self.alone.get((*key, role_of(term.name, term.kind))))
        return [process for process in found if process is not None]

    def draw(
        self, kind: OpKind, phase: Phase | None, shape: FloatArray, num_draws: int, rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return draws of log(1 + e) at `shape` [k, d] as [M, k], joint over the shapes of one call."""
        return self.processes[key_of(kind, phase)].draw(shape, num_draws, rng)

    def mean_and_deviation(self, kind: OpKind, phase: Phase | None, shape: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of log(1 + e) at `shape` [k, d], each [k]."""
        return self.processes[key_of(kind, phase)].mean_and_deviation(shape)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Composition:
    """Change of every candidate's step time by the errors of operators.

    Attributes:
        mean: Mean of the change of log(step time) [n].
        deviation: Draws of the change minus its mean [M, n].
    """

    mean: FloatArray
    deviation: NDArray[np.float32]


def key_of(kind: OpKind, phase: Phase | None) -> Key:
    """Return the key of the process for a kind and phase."""
    return kind, None if kind in COLLECTIVES else phase


def role_of(name: str, kind: OpKind) -> str:
    """Return the role that tells an elementwise operator apart from others; empty for other kinds."""
    return name.removesuffix(".gradient").rpartition(".")[2] if kind is OpKind.ELEMENTWISE else ""


def fit_operators(
    errors: Sequence[OperatorErrors], form: Form = Form.LOG, *, alone: Sequence[OperatorErrors] = ()
) -> OperatorSurrogate:
    """Fit one process for each kind and phase among `errors`.

    The surrogate depends on the errors and their order alone. Hyperparameters are learned from the first 2^j distinct
    shapes, with all measurements until the last of them arrived. They are fitted again only when the number of shapes
    has doubled.

    Args:
        errors: Errors of operators measured in training steps, in order of arrival.
        form: Form of the error that the processes learn.
        alone: Errors of isolated operators, each object of one role.
    """
    # isolated operators first: training steps then teach the difference from them
    by_role: dict[IsolatedKey, list[OperatorErrors]] = {}
    for some in alone:
        role = some.roles[0] if some.roles else ""
        by_role.setdefault((*key_of(some.kind, some.phase), role), []).append(some)
    lone = {key: _fit_kind(key[0], some, Form.LOG) for key, some in by_role.items()}
    by_key: dict[Key, list[OperatorErrors]] = {}
    for some in errors:
        if len(some.log_error):
            left = _subtract_isolated(some, lone) if lone else some
            by_key.setdefault(key_of(some.kind, some.phase), []).append(left)
    return OperatorSurrogate(processes={key: _fit_kind(key[0], some, form) for key, some in by_key.items()}, alone=lone)


def compose(
    terms: StepTerms,
    surrogate: OperatorSurrogate,
    num_draws: int,
    rng: np.random.Generator,
    *,
    aside: Sequence[StepTerms] = (),
) -> Composition:
    """Compute the change of every candidate's step time to first order (FlexParallel, equation 5a).

    Kinds that were never measured are assumed to be predicted correctly.

    Args:
        terms: Error terms of the steps of n candidates.
        surrogate: Posterior of the operators' errors.
        num_draws: Number of draws M.
        rng: Source of random numbers.
        aside: Error terms of further configurations, whose changes are appended to those of the candidates. A shape has
            the same error in all of them.
    """
    parts = (terms, *aside)
    every = [term for part in parts for term in part.terms]
    by_process: dict[int, tuple[KindProcess, list[int]]] = {}
    for index, term in enumerate(every):
        for process in surrogate.processes_of(term):
            by_process.setdefault(id(process), (process, []))[1].append(index)
    # the mean is the first row, so that one pass over the candidates sums it with the draws
    errors = [np.zeros((1 + num_draws, len(term.shape)), dtype=np.float32) for term in every]
    for process, indices in by_process.values():
        shapes = [every[index].shape for index in indices]
        # one draw per distinct shape of all terms, so that equal shapes err alike wherever they occur
        first, row = distinct_shapes(np.concatenate(shapes))
        distinct = np.concatenate(shapes)[first]
        mean, _ = process.mean_and_deviation(distinct)
        drawn = process.draw(distinct, num_draws, rng)
        together = np.concatenate([mean[None], drawn - mean]).astype(np.float32)
        ends = np.cumsum([len(shape) for shape in shapes])
        for index, of_term in zip(indices, np.split(row, ends[:-1]), strict=True):
            errors[index] += together[:, of_term]
    # each configuration's terms turn their errors into a change of its own step
    ends = np.cumsum([len(part.terms) for part in parts])
    changes = [part.log_change(errors[end - len(part.terms) : end]) for part, end in zip(parts, ends, strict=True)]
    change = changes[0] if len(changes) == 1 else np.concatenate(changes, axis=1)
    return Composition(mean=change[0].astype(np.float64), deviation=change[1:])


def timing_variance(count: NDArray[np.number]) -> FloatArray:
    """Return the noise variance of the log of a mean over `count` executions [s].

    One execution varies by 10%, and all those of a trial by 1% together, with clocks and neighbours (assumed).
    """
    return np.asarray(0.01**2 + 0.1**2 / np.maximum(count, 1))


def distinct_shapes(shape: FloatArray) -> tuple[IntArray, IntArray]:
    """Return first positions [t] of distinct rows of `shape` [s, d] in order of arrival, and each row's index [s]."""
    # a single code per row, column by column; renumbering after each keeps the codes below the number of rows
    code = np.zeros(len(shape), dtype=np.int64)
    for column in shape.T:
        values, rank = np.unique(column, return_inverse=True)
        code = np.unique(code * len(values) + rank, return_inverse=True)[1]
    _, first, row = np.unique(code, return_index=True, return_inverse=True)
    arrival = np.argsort(first)
    rank = np.empty_like(arrival)
    rank[arrival] = np.arange(len(arrival))
    return first[arrival], rank[row]


def points_of(kind: OpKind, shape: FloatArray) -> Points:
    """Return the inputs of the process for shapes [k, d]."""
    offset = np.full((len(shape), 1), OFFSET)
    return Points.alike(
        features=feature_values(kind, shape), linear=np.concatenate([offset, floor_columns(kind, shape)], axis=1)
    )


def _subtract_isolated(errors: OperatorErrors, alone: Mapping[IsolatedKey, KindProcess]) -> OperatorErrors:
    left = errors.log_error.copy()
    roles = np.array(errors.roles or [""] * len(left))
    # an operator of a role that was never measured alone keeps its whole error
    for role in np.unique(roles):
        process = alone.get((*key_of(errors.kind, errors.phase), str(role)))
        if process is not None:
            left[roles == role] -= process.mean_and_deviation(errors.shape[roles == role])[0]
    return replace(errors, log_error=left)


def _fit_kind(kind: OpKind, some: Sequence[OperatorErrors], form: Form) -> KindProcess:
    shape = np.concatenate([errors.shape for errors in some])
    values = np.concatenate([errors.log_error for errors in some])
    variance = np.concatenate([errors.variance for errors in some])
    if form is Form.RELATIVE:
        # e = exp(y) - 1, whose variance is to first order that of y times exp(2 y)
        values, variance = np.expm1(values), variance * np.exp(2 * values)
    # the largest power of two among the distinct shapes, so that hyperparameters are stable between doublings
    first, _ = distinct_shapes(shape)
    learned = min(MOST_LEARNED, 1 << (len(first).bit_length() - 1))
    until = int(first[learned - 1]) + 1
    hyper = _fit_hyperparameters(
        kind, shape[:until].tobytes(), values[:until].tobytes(), variance[:until].tobytes(), shape.shape[1]
    )
    # the oldest shapes are dropped, because the cost of a process grows with the cube of their number
    distinct, mean, left = (array[-MOST_SHAPES:] for array in _average_repetitions(shape, values, variance))
    process = GaussianProcess(
        at=points_of(kind, distinct), values=mean, variance=left, hyper=hyper, num_scaled=NUM_SCALED
    )
    return KindProcess(kind=kind, form=form, shape=distinct, process=process)


@lru_cache(maxsize=256)
def _fit_hyperparameters(kind: OpKind, shape: bytes, values: bytes, variance: bytes, num_sizes: int) -> Hyperparameters:
    """Fit hyperparameters to shape [s, d], values [s] and variance [s], given as bytes, since arrays have no hash."""
    sizes = np.frombuffer(shape).reshape(-1, num_sizes)
    distinct, mean, left = _average_repetitions(sizes, np.frombuffer(values), np.frombuffer(variance))
    prior = replace(PRIOR, length_scale=tuple(feature.length for feature in features_of(kind)))
    found = fit(
        points_of(kind, distinct), mean, prior=prior, variance=left, num_scaled=NUM_SCALED, min_to_learn=FEWEST_LEARNED
    )
    return _widen(found)


def _widen(process: GaussianProcess) -> Hyperparameters:
    """Return the hyperparameters with deviations widened to cover cross-validation errors along every feature."""
    widest = LEAST_WIDENED
    # the largest mean squared standardised error over all features, shrunk towards 1 by GRANTED pseudo-observations
    for feature in process.at.features.T:
        # parts are ranges of the feature, so that predicting one from the others is extrapolation
        part = np.searchsorted(np.quantile(feature, np.arange(1, NUM_RANGES) / NUM_RANGES), feature, side="right")
        if len(np.unique(part)) > 1:
            errors, deviations = process.left_out_errors(part)
            squares = np.minimum((errors / deviations) ** 2, FARTHEST**2)
            widest = max(widest, (GRANTED + squares.sum()) / (GRANTED + len(squares)))
    factor = float(np.sqrt(widest))
    hyper = process.hyper
    return replace(hyper, amplitude=factor * hyper.amplitude, noise=factor * hyper.noise, scale=factor * hyper.scale)


def _average_repetitions(
    shape: FloatArray, values: FloatArray, variance: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the distinct shapes [t, d] in order of arrival, with weighted mean and variance of their values, each [t].

    Where repeated measurements disagree more than their variances allow, the variances are multiplied by the Birge
    ratio, with a pseudo-count of five agreeing repetitions.
    """
    first, row = distinct_shapes(shape)
    # mean with inverse variances as weights, and the variance of that mean
    weight = 1 / variance
    total = np.bincount(row, weight)
    mean = np.bincount(row, weight * values) / total
    chi_square = float(np.sum(weight * (values - mean[row]) ** 2))
    birge = max(1.0, (5 + chi_square) / (5 + len(values) - len(first)))
    return shape[first], mean, birge / total
