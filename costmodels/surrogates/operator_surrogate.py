"""What measured operators say of those not yet measured: a Gaussian process per kind and phase (FlexParallel 3.1).

A process learns y = log(1 + e), where e = (t - t_hat) / t_hat is the relative error of a predicted time (equation 2),
so that a corrected time is never negative:

    y(shape) = offset + m(features) + floors + own(shape)

The offset is what all shapes of the kind share, m is smooth in the features of `shape_features.py`, the floors are what
a fixed time adds to small operators, and `own` is what a single shape has to itself: the kernel that a library picks
for it, the last wave of tiles. Repeating a measurement averages noise away, but not that. Far from all measured shapes
the error returns to the offset, and its deviation to the prior's.

The most likely hyperparameters are too sure of shapes beyond the measured ones. So each third of every feature's range
is predicted from the other two, and where the errors are larger than was thought, all deviations are widened.

What was measured of operators alone on the device comes below that: their errors have processes of their own, one for
each role of elementwise operators, which differ most, and what training steps measured is learned as the difference
from them (Kennedy and O'Hagan 2000, Predicting the output from a complex computer code when fast approximations are
available, section 2.1, with the factor 1).

Draws are joint over all shapes of a kind, and a shape has the same error in every configuration and in every term of
the step: `compose` adds them up to what they change of a candidate's step. The form that the paper prints, a process on
e itself whose draws are independent from shape to shape (equation 5c), is there to compare with: see `Form`.

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

from costmodels.operators.layer_operators import COLLECTIVES, OpKind, Phase
from costmodels.surrogates.error_terms import StepTerms, Term
from costmodels.surrogates.gaussian_process import GaussianProcess, Hyperparameters, HyperPrior, Points, fit, one_thread
from costmodels.surrogates.shape_features import feature_values, features_of, floor_columns
from hardware.arrays import FloatArray, IntArray

Key = tuple[OpKind, Phase | None]
"""What has a process of its own; a collective takes as long in both phases, and has one for both."""

LoneKey = tuple[OpKind, Phase | None, str]
"""The same of operators alone: with the role that tells elementwise operators apart, empty for other kinds."""


OFFSET = 0.4
"""Standard deviation of the error that all shapes of a kind share; times a hyperparameter (assumed)."""

PRIOR = HyperPrior(amplitude=0.3, noise=0.05, spread=0.4)
"""`noise` is the deviation of what a shape has to itself; length scales are the features' own."""

FEWEST_LEARNED, MOST_LEARNED = 4, 128
"""Distinct shapes that hyperparameters are learned from; the most is a power of two."""

NUM_RANGES = 3
GRANTED = 5
"""Shapes that are taken to agree with the deviations, however few there are."""
LEAST_WIDENED = 1.5
"""Least factor on all variances: hyperparameters are not as certain as if they were known. Chosen with the features, as
the one of seven settings of these constants with the best coverage of the worst kind."""
FARTHEST = 3.0
"""Deviations beyond which an error counts no more: outliers widen nothing."""

NUM_SCALED = 1
"""Of the linear columns the offset is scaled, the floors are not."""

MOST_SHAPES = 1000
"""Distinct shapes that a process remembers: the last ones to arrive. Its cost grows with their cube."""

LEAST_FACTOR = 0.05
"""A time is at least this share of its prediction; only the paper's form needs to be told so."""


class Form(StrEnum):
    """What a process learns."""

    LOG = "log"
    """log(1 + e); joint draws."""
    RELATIVE = "relative"
    """e itself, cut off at 1 + e = LEAST_FACTOR; each shape is drawn on its own (FlexParallel, equations 2 and 5c)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorErrors:
    """Measured operators of one kind and phase beside their predictions, in order of arrival.

    Attributes:
        kind: Which kernel model predicted them.
        phase: Forward or backward; of a collective it doesn't matter.
        shape: Their sizes, in the order of `costmodels.operators.layer_operators.Operator.shape` [s, d].
        log_error: log(measured / predicted) [s].
        variance: Noise variance of that; `timing_variance` where nothing better is known [s].
        roles: What tells elementwise operators apart (`role_of`) [s]; empty where that is not known.
    """

    kind: OpKind
    phase: Phase | None
    shape: FloatArray
    log_error: FloatArray
    variance: FloatArray
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KindProcess:
    """What is known of one kind of operator in one phase.

    Attributes:
        kind: Which kind.
        form: What the process learns.
        shape: The distinct shapes that were measured [t, d].
        process: The offset and the smooth part; its noise is what a shape has to itself.
    """

    kind: OpKind
    form: Form
    shape: FloatArray
    process: GaussianProcess

    def draw(self, shape: FloatArray, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Draws of log(1 + e) at `shape` [k, d] -> [M, k]; equal shapes have equal errors."""
        first, row = distinct_shapes(shape)
        draw = self._draw_joint if self.form is Form.LOG else self._draw_each
        with one_thread():
            drawn = draw(shape[first], num_draws, rng)
        return np.asarray(drawn[:, row])

    def mean_and_deviation(self, shape: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of log(1 + e) at `shape` [k, d], each [k]; to first order for e itself."""
        with one_thread():
            mean, deviation = self._moments(shape)
        if self.form is Form.LOG:
            return mean, deviation
        factor = np.maximum(1 + mean, LEAST_FACTOR)
        return np.log(factor), deviation / factor

    def _moments(self, shape: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Posterior mean and standard deviation of what the process learns, with what each shape has to itself."""
        mean, deviation = self.process.mean_and_deviation(points_of(self.kind, shape))
        seen = self._seen(shape)
        at = seen[seen >= 0]
        share, own_variance = self._own()
        variance = deviation**2
        variance[seen < 0] += self.process.hyper.noise**2
        mean[seen >= 0] += share[at] * (self.process.values[at] - mean[seen >= 0])
        variance[seen >= 0] = (1 - share[at]) ** 2 * variance[seen >= 0] + own_variance[at]
        return mean, np.sqrt(variance)

    def _draw_joint(self, shape: FloatArray, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        smooth = self.process.draw(points_of(self.kind, shape), num_draws, rng)
        standard = rng.standard_normal(smooth.shape, dtype=np.float32)
        seen = self._seen(shape)
        at = seen[seen >= 0]
        share, own_variance = self._own()
        # given the smooth part, what a measured shape has to itself depends on its own measurement alone
        mean = np.zeros_like(smooth)
        mean[:, seen >= 0] = share[at] * (self.process.values[at] - smooth[:, seen >= 0])
        deviation = np.full(len(shape), self.process.hyper.noise)
        deviation[seen >= 0] = np.sqrt(own_variance[at])
        return np.asarray(smooth + mean + deviation.astype(np.float32) * standard)

    def _draw_each(self, shape: FloatArray, num_draws: int, rng: np.random.Generator) -> NDArray[np.float32]:
        mean, deviation = self._moments(shape)
        cut = ndtr((LEAST_FACTOR - 1 - mean) / deviation)
        quantile = cut + (1 - cut) * rng.random((num_draws, len(shape)))
        error = mean + deviation * ndtri(np.clip(quantile, 1e-12, 1 - 1e-12))
        return np.asarray(np.log(np.maximum(1 + error, LEAST_FACTOR)), dtype=np.float32)

    def _own(self) -> tuple[FloatArray, FloatArray]:
        """Share of a residual that a measured shape has to itself, and how uncertain that remains, each [t]."""
        own, noise = self.process.hyper.noise**2, self.process.variance
        return own / (own + noise), own * noise / (own + noise)

    def _seen(self, shape: FloatArray) -> IntArray:
        """The measured shape that each of `shape` is, or -1 [k]."""
        first, row = distinct_shapes(np.concatenate([self.shape, shape]))
        known = first[row[len(self.shape) :]]
        return np.where(known < len(self.shape), known, -1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorSurrogate:
    """One process per key that was measured.

    Attributes:
        processes: Those of what training steps measured.
        alone: Those of what was measured of operators alone; where there are both, the error is their sum.
    """

    processes: Mapping[Key, KindProcess]
    alone: Mapping[LoneKey, KindProcess] = field(default_factory=dict)

    def knows(self, kind: OpKind, phase: Phase | None) -> bool:
        """Whether a training step measured any operator of this kind and phase."""
        return key_of(kind, phase) in self.processes

    def processes_of(self, term: Term) -> list[KindProcess]:
        """The processes whose sum is the error of a term: what is known of its operator in training, and alone."""
        key = key_of(term.kind, term.phase)
        found = (self.processes.get(key), self.alone.get((*key, role_of(term.name, term.kind))))
        return [process for process in found if process is not None]

    def draw(
        self, kind: OpKind, phase: Phase | None, shape: FloatArray, num_draws: int, rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Draws of log(1 + e) at `shape` [k, d] -> [M, k], joint over the shapes of one call."""
        return self.processes[key_of(kind, phase)].draw(shape, num_draws, rng)

    def mean_and_deviation(self, kind: OpKind, phase: Phase | None, shape: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of log(1 + e) at `shape` [k, d], each [k]."""
        return self.processes[key_of(kind, phase)].mean_and_deviation(shape)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Composition:
    """What the errors of operators change of every candidate's step time.

    Attributes:
        mean: Mean of the change of log(step time) [n].
        deviation: Draws of how far the change is from its mean [M, n].
    """

    mean: FloatArray
    deviation: NDArray[np.float32]


def key_of(kind: OpKind, phase: Phase | None) -> Key:
    """The process that a kind and phase belongs to."""
    return kind, None if kind in COLLECTIVES else phase


def role_of(name: str, kind: OpKind) -> str:
    """What tells the operator of that name apart from others of its kind; empty where nothing needs to."""
    return name.removesuffix(".gradient").rpartition(".")[2] if kind is OpKind.ELEMENTWISE else ""


def fit_operators(
    errors: Sequence[OperatorErrors], form: Form = Form.LOG, *, alone: Sequence[OperatorErrors] = ()
) -> OperatorSurrogate:
    """One process for each kind and phase among `errors`.

    The surrogate depends on the errors and their order alone. Hyperparameters are learned from the first 2^j distinct
    shapes, with what was measured until the last of them arrived, so they are learned anew only when the shapes have
    doubled.

    Args:
        errors: Operators that training steps measured, in order of arrival.
        form: What the processes learn.
        alone: Operators that were measured outside of them, each part of one role.
    """
    by_role: dict[LoneKey, list[OperatorErrors]] = {}
    for some in alone:
        role = some.roles[0] if some.roles else ""
        by_role.setdefault((*key_of(some.kind, some.phase), role), []).append(some)
    lone = {key: _fit_kind(key[0], some, Form.LOG) for key, some in by_role.items()}
    by_key: dict[Key, list[OperatorErrors]] = {}
    for some in errors:
        if len(some.log_error):
            by_key.setdefault(key_of(some.kind, some.phase), []).append(_beyond(some, lone) if lone else some)
    return OperatorSurrogate(processes={key: _fit_kind(key[0], some, form) for key, some in by_key.items()}, alone=lone)


def compose(
    terms: StepTerms,
    surrogate: OperatorSurrogate,
    num_draws: int,
    rng: np.random.Generator,
    *,
    aside: Sequence[StepTerms] = (),
) -> Composition:
    """What the errors of operators change of every candidate's step, to first order (FlexParallel equation 5a).

    Kinds that were never measured are taken to be as predicted.

    Args:
        terms: The step of n candidates.
        surrogate: What is known of their operators.
        num_draws: M.
        rng: Source of the draws.
        aside: The steps of further configurations, whose changes stand behind those of the candidates; a shape has the
            same error in all of them.
    """
    parts = (terms, *aside)
    every = [term for part in parts for term in part.terms]
    by_process: dict[int, tuple[KindProcess, list[int]]] = {}
    for index, term in enumerate(every):
        for process in surrogate.processes_of(term):
            by_process.setdefault(id(process), (process, []))[1].append(index)
    # the mean is the first row, so that one pass over the candidates adds up everything
    errors = [np.zeros((1 + num_draws, len(term.shape)), dtype=np.float32) for term in every]
    for process, indices in by_process.values():
        shapes = [every[index].shape for index in indices]
        first, row = distinct_shapes(np.concatenate(shapes))
        distinct = np.concatenate(shapes)[first]
        mean, _ = process.mean_and_deviation(distinct)
        drawn = process.draw(distinct, num_draws, rng)
        together = np.concatenate([mean[None], drawn - mean]).astype(np.float32)
        ends = np.cumsum([len(shape) for shape in shapes])
        for index, of_term in zip(indices, np.split(row, ends[:-1]), strict=True):
            errors[index] += together[:, of_term]
    ends = np.cumsum([len(part.terms) for part in parts])
    changes = [part.log_change(errors[end - len(part.terms) : end]) for part, end in zip(parts, ends, strict=True)]
    change = changes[0] if len(changes) == 1 else np.concatenate(changes, axis=1)
    return Composition(mean=change[0].astype(np.float64), deviation=change[1:])


def timing_variance(count: NDArray[np.number]) -> FloatArray:
    """Noise variance of the logarithm of a mean over `count` executions [s].

    One execution varies by 10%, and all those of a trial by 1% together, with clocks and neighbours (assumed).
    """
    return np.asarray(0.01**2 + 0.1**2 / np.maximum(count, 1))


def distinct_shapes(shape: FloatArray) -> tuple[IntArray, IntArray]:
    """Where each distinct row of `shape` [s, d] stands first [t], in order of arrival, and which each row is [s]."""
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
    """Shapes [k, d] as the process sees them."""
    offset = np.full((len(shape), 1), OFFSET)
    return Points(
        features=feature_values(kind, shape), linear=np.concatenate([offset, floor_columns(kind, shape)], axis=1)
    )


def _beyond(errors: OperatorErrors, alone: Mapping[LoneKey, KindProcess]) -> OperatorErrors:
    """The errors, less those that are expected of the operators alone."""
    left = errors.log_error.copy()
    roles = np.array(errors.roles or [""] * len(left))
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
        values, variance = np.expm1(values), variance * np.exp(2 * values)
    first, _ = distinct_shapes(shape)
    learned = min(MOST_LEARNED, 1 << (len(first).bit_length() - 1))
    until = int(first[learned - 1]) + 1
    hyper = _hyperparameters(
        kind, shape[:until].tobytes(), values[:until].tobytes(), variance[:until].tobytes(), shape.shape[1]
    )
    distinct, mean, left = (array[-MOST_SHAPES:] for array in _averaged(shape, values, variance))
    process = GaussianProcess(
        at=points_of(kind, distinct), values=mean, variance=left, hyper=hyper, num_scaled=NUM_SCALED
    )
    return KindProcess(kind=kind, form=form, shape=distinct, process=process)


@lru_cache(maxsize=256)
def _hyperparameters(kind: OpKind, shape: bytes, values: bytes, variance: bytes, num_sizes: int) -> Hyperparameters:
    """What measurements say of a process; as bytes, for arrays have no hash: shape [s, d], values [s], variance [s]."""
    sizes = np.frombuffer(shape).reshape(-1, num_sizes)
    distinct, mean, left = _averaged(sizes, np.frombuffer(values), np.frombuffer(variance))
    prior = replace(PRIOR, length_scale=tuple(feature.length for feature in features_of(kind)))
    found = fit(
        points_of(kind, distinct),
        mean,
        prior=prior,
        variance=left,
        num_scaled=NUM_SCALED,
        min_to_learn=FEWEST_LEARNED,
    )
    return _widened(found)


def _widened(process: GaussianProcess) -> Hyperparameters:
    """The hyperparameters with deviations that cover what is left out of every feature's range, part by part."""
    widest = LEAST_WIDENED
    for feature in process.at.features.T:
        part = np.searchsorted(np.quantile(feature, np.arange(1, NUM_RANGES) / NUM_RANGES), feature, side="right")
        if len(np.unique(part)) > 1:
            errors, deviations = process.left_out_errors(part)
            squares = np.minimum((errors / deviations) ** 2, FARTHEST**2)
            widest = max(widest, (GRANTED + squares.sum()) / (GRANTED + len(squares)))
    factor = float(np.sqrt(widest))
    hyper = process.hyper
    return replace(hyper, amplitude=factor * hyper.amplitude, noise=factor * hyper.noise, scale=factor * hyper.scale)


def _averaged(shape: FloatArray, values: FloatArray, variance: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The distinct shapes [t, d], in order of arrival, and for each the mean of its values and its variance, each [t].

    Where repeated measurements disagree more than their variances allow, these are too small by the Birge ratio, of
    which five agreeing repetitions are taken for granted.
    """
    first, row = distinct_shapes(shape)
    weight = 1 / variance
    total = np.bincount(row, weight)
    mean = np.bincount(row, weight * values) / total
    chi_square = float(np.sum(weight * (values - mean[row]) ** 2))
    birge = max(1.0, (5 + chi_square) / (5 + len(values) - len(first)))
    return shape[first], mean, birge / total
