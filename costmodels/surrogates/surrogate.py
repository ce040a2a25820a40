"""What trials tell of a predicted quantity of all candidates, as joint draws: a step's time, or the memory it needs.

    log(true / predicted)(x) = sum_j scale b_j(x) w_j + offset + m(x) + own(x)

b_j(x) w_j is what the error of one ingredient of the prediction does to x: of a constant of the runtime profile, or of
one part of memory. m is a Gaussian process over features of the configuration, and own(x) what a configuration has to
itself: one that was measured is known, one like it only nearly so.

Which of these explains the trials is not known beforehand. A few hypotheses (the ingredients err; all errs as a whole;
errors are as in earlier studies) are fitted each and share the draws in proportion to how probable they make what was
seen: a history that misleads is found out and loses its say.

Letters: n candidates, t measured ones, b bounded ones, p past observations, h hypotheses, M draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from costmodels.surrogates.censored import Bounds, bounded
from costmodels.surrogates.gaussian_process import GaussianProcess, HyperPrior, Points, fit, joined
from costmodels.surrogates.mixture import allotted, probabilities_of
from costmodels.surrogates.predicted import Predicted
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """How far smaller jobs err like the candidates.

    Attributes:
        chance: How probable it is before any trial.
        together: Standard deviation of the log factor that sets all of them apart: a network that more hosts share, the
            wait for the slowest of these.
        each: The same of each by itself.
    """

    chance: float
    together: float
    each: float


LIKENESSES = (Likeness(chance=0.5, together=0.1, each=0.05), Likeness(chance=0.5, together=0.8, each=0.4))
"""Errors that carry over to full size, and errors that hardly do: a network that is fast within a quarter of the hosts
may be slow between all. Trials at full size tell which it is (assumed, after siblings of published sweeps)."""


FEWEST_TO_LEARN = 3
"""Measured candidates from which on hyperparameters are learned."""

DOUBT = 6.0
"""Observations to which all variances are doubled, once hyperparameters are learned and no past tells them: the most
likely ones are too sure of candidates unlike those that were measured. Chosen on the Ultra-Scale Playbook's groups."""

OUTLYING = 4.0
"""Deviations above what all others let expect from which on a measured candidate is an outlier."""

MEASURED_PER_OUTLIER = 4
"""Measured candidates for each outlier beyond the first: what happens more often is no outlier."""

SURPRISING = 0.05
"""Probability of an outlier, which speaks against hypotheses that need many; assumed."""

OUTLIER_SIZE = 1.0
"""Mean logarithm by which an outlier lies above the others, counted as one that was seen; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seen:
    """What the trials of a study told of the quantity.

    Attributes:
        measured: Candidates that were measured, each once [t].
        log_value: Logarithm of the measured value [t].
        variance: Variance of that as a measurement [t].
        bounded: Candidates of which only a bound is known [b].
        log_edge: Logarithm of the bound [b].
        side: +1 where the value is at least the edge, -1 where at most [b].
        mishap: Probability that the same would have been seen whatever the value [b].
    """

    measured: IntArray
    log_value: FloatArray
    variance: FloatArray
    bounded: IntArray
    log_edge: FloatArray
    side: FloatArray
    mishap: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PastErrors:
    """Errors of earlier runs, as observations of a hypothesis' process.

    Attributes:
        at: Where they were made [p].
        values: log(measured / predicted) [p].
        variance: Their noise variance, all of it [p].
    """

    at: Points
    values: FloatArray
    variance: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hypothesis:
    """One way in which predictions may err.

    Attributes:
        chance: How probable it is before any trial, up to a factor.
        log_predicted: Logarithm of the quantity as it is predicted [n].
        points: Where the candidates stand for its process [n].
        num_scaled: Leading linear columns whose scale is learned.
        prior: Its hyperparameters; the noise is what a configuration has to itself.
        past: Earlier runs that it believes in.
        outliers: How many measurements lay far above what others let expect, and how many did not, before the trials;
            candidates that were not measured may do so too. None where that cannot happen.
        placed: The logarithm of the quantity, and where the process sees it, of other runs that are predicted; None
            where there can't be any.
        twins: The last points are such runs; for each of these the candidates that it stands for. What it has to itself
            is theirs too.
        aside_variance: Variance of what each such run tells of these, beside that of its measurement.
    """

    chance: float
    log_predicted: FloatArray
    points: Points
    num_scaled: int
    prior: HyperPrior
    past: PastErrors | None = None
    outliers: tuple[float, float] | None = None
    placed: Callable[[Predicted], tuple[FloatArray, Points]] | None = None
    twins: tuple[tuple[int, ...], ...] = ()
    aside_variance: float = 0.0

    def with_aside(self, predicted: Predicted, twins: tuple[tuple[int, ...], ...]) -> tuple[Hypothesis, ...]:
        """The same with runs of smaller jobs behind the candidates [n + p], of which trials may tell as of these.

        There is one for each of LIKENESSES. What sets all smaller jobs apart is a linear column of its own.

        Args:
            predicted: The runs [p].
            twins: The candidates that each stands for [p].
        """
        assert self.placed is not None, "the hypothesis says where predicted runs stand"
        log_predicted, points = self.placed(predicted)
        return tuple(
            replace(
                self,
                chance=self.chance * likeness.chance,
                log_predicted=np.concatenate([self.log_predicted, log_predicted]),
                points=joined(_with_column(self.points, 0.0), _with_column(points, likeness.together)),
                past=self.past and replace(self.past, at=_with_column(self.past.at, 0.0)),
                twins=twins,
                aside_variance=likeness.each**2,
            )
            for likeness in LIKENESSES
        )

    def corrected(self, log_change: FloatArray, told: Sequence[int]) -> Hypothesis:
        """The hypothesis with changed predictions [n], to which the columns `told` of the linear part add nothing."""
        keep = np.ones(self.points.linear.shape[1])
        keep[list(told)] = 0.0
        past = self.past and replace(self.past, at=replace(self.past.at, linear=self.past.at.linear * keep))
        return replace(
            self,
            log_predicted=self.log_predicted + log_change,
            points=replace(self.points, linear=self.points.linear * keep),
            past=past,
        )

    def after(self, seen: Seen) -> Fitted:
        """The process that has seen the trials, and how probable it makes them."""
        values = seen.log_value - self.log_predicted[seen.measured]
        surprise = self._surprise(seen, values)
        process, log_likelihood = self._process(seen, values, surprise, min_to_learn=FEWEST_TO_LEARN)
        bounds = Bounds(
            at=self.points.take(seen.bounded),
            edge=seen.log_edge - self.log_predicted[seen.bounded],
            side=seen.side,
            mishap=seen.mishap,
            blur=process.hyper.noise,
        )
        process, log_bounds = bounded(process, bounds)
        log_chance = np.log(self.chance) + np.sum(surprise > 0) * np.log(SURPRISING)
        return Fitted(
            hypothesis=self,
            process=process,
            surprise=surprise,
            log_weight=float(log_chance) + log_likelihood + log_bounds,
        )

    def _process(
        self, seen: Seen, values: FloatArray, surprise: FloatArray, *, min_to_learn: int
    ) -> tuple[GaussianProcess, float]:
        """The process after the measured candidates and the past, and the log likelihood of the former given the past.

        Args:
            seen: What was measured.
            values: Its log ratios to the predictions [t].
            surprise: Variance of what each has to itself beyond the process' noise [t].
            min_to_learn: Measured candidates from which on hyperparameters are learned.
        """
        process = fit(
            self.points.take(seen.measured),
            values,
            prior=self.prior,
            variance=self.variance(seen) + surprise,
            num_scaled=self.num_scaled,
            min_to_learn=min_to_learn,
        )
        if self.past is None:
            return _doubted(process) if len(values) >= min_to_learn else process, process.log_likelihood()
        past = self.past
        before = process.take(np.zeros(0, dtype=np.int64)).with_more(past.at, past.values, past.variance)
        process = process.with_more(past.at, past.values, past.variance)
        return process, process.log_likelihood() - before.log_likelihood()

    def variance(self, seen: Seen) -> FloatArray:
        """Variance of what was measured as a measurement of what a candidate has [t]."""
        is_aside = seen.measured >= len(self.points) - len(self.twins)
        return np.asarray(seen.variance + self.aside_variance * is_aside)

    def _surprise(self, seen: Seen, values: FloatArray) -> FloatArray:
        """Variance of what each measured candidate has to itself beyond the process' noise; 0 but for outliers [t].

        An outlier lies far above what all others let expect, before hyperparameters give way to it: something slowed
        that run down, and only its own. Believed, it would make the process expect the like everywhere.
        """
        surprise = np.zeros(len(values))
        alone = np.arange(len(values) + (len(self.past.values) if self.past else 0))
        for _ in range(1 + len(values) // MEASURED_PER_OUTLIER if len(values) else 0):
            process, _ = self._process(seen, values, surprise, min_to_learn=len(values) + 1)
            errors, deviations = process.left_out_errors(alone)
            own = errors[: len(values)] / deviations[: len(values)]
            worst = int(np.argmax(np.abs(own)))
            if own[worst] <= OUTLYING:  # a surprisingly low one is believed, though it makes others look high
                break
            surprise[worst] += errors[worst] ** 2 - deviations[worst] ** 2
        return surprise


def _doubted(process: GaussianProcess) -> GaussianProcess:
    """The process with deviations that allow for hyperparameters which few observations have told."""
    factor = float(np.sqrt(1 + DOUBT / len(process.values)))
    hyper = process.hyper
    return replace(process, hyper=replace(hyper, amplitude=factor * hyper.amplitude, scale=factor * hyper.scale))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """A hypothesis after the trials.

    Attributes:
        hypothesis: The hypothesis.
        process: Its process; the measured candidates come first among its observations, the bounded ones last.
        surprise: Variance of what each measured candidate has to itself beyond the process' noise [t].
        log_weight: Logarithm of its chance times the likelihood of what was seen.
    """

    hypothesis: Hypothesis
    process: GaussianProcess
    surprise: FloatArray
    log_weight: float

    def draw(
        self, seen: Seen, num_draws: int, rng: np.random.Generator, beside: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Joint draws of the logarithm of the quantity [M, n]; see `Surrogate.draw`."""
        drawn = self.process.draw(
            self.hypothesis.points,
            num_draws,
            rng,
            beside=None if beside is None else self._at_observations(seen, beside),
        )
        if beside is not None:
            drawn += beside
        drawn += self.hypothesis.log_predicted.astype(np.float32)
        own_variance = self.process.hyper.noise**2
        # what a measured candidate has to itself is known up to the noise of its measurement
        smooth = drawn[:, seen.measured]
        of_measured, variance = own_variance + self.surprise, self.hypothesis.variance(seen)
        total = of_measured + variance
        own = (seen.log_value - smooth) * (of_measured / total)
        own += rng.standard_normal(smooth.shape) * np.sqrt(of_measured * variance / total)
        of_others = np.float32(np.sqrt(own_variance)) * rng.standard_normal(drawn.shape, dtype=np.float32)
        if self.hypothesis.outliers is not None:
            is_outlier = rng.random(drawn.shape, dtype=np.float32) < self._outlier_rate(self.hypothesis.outliers)
            far = rng.standard_exponential(int(is_outlier.sum()), dtype=np.float32)
            of_others[is_outlier] += np.float32(self._outlier_size()) * far
        self._carry_over(seen, own, of_others)
        drawn += of_others
        drawn[:, seen.measured] = smooth + own
        return drawn

    def _carry_over(self, seen: Seen, own: FloatArray, of_others: NDArray[np.float32]) -> None:
        """Gives candidates what their twins have to themselves [M, t], without surprises, in place of a draw [M, n]."""
        own_variance = self.process.hyper.noise**2
        share = own_variance / (own_variance + self.surprise)
        first_aside = len(self.hypothesis.points) - len(self.hypothesis.twins)
        for at, place in enumerate(seen.measured.tolist()):
            for candidate in self.hypothesis.twins[place - first_aside] if place >= first_aside else ():
                of_others[:, candidate] = share[at] * own[:, at] + np.sqrt(1 - share[at]) * of_others[:, candidate]

    def _at_observations(self, seen: Seen, beside: NDArray[np.float32]) -> FloatArray:
        """`beside` at the observations of the process, of which the past ones lie between the study's own."""
        of_observations = np.zeros((len(beside), len(self.process.values)))
        of_observations[:, : len(seen.measured)] = beside[:, seen.measured]
        of_observations[:, of_observations.shape[1] - len(seen.bounded) :] = beside[:, seen.bounded]
        return of_observations

    def _outlier_rate(self, before: tuple[float, float]) -> float:
        """Probability that a candidate which was not measured is an outlier."""
        found = np.count_nonzero(self.surprise)
        return float((before[0] + found) / (before[0] + before[1] + len(self.surprise)))

    def _outlier_size(self) -> float:
        """How far above the others outliers lie: mean of the logarithm."""
        return float(np.mean([OUTLIER_SIZE, *np.sqrt(self.surprise[self.surprise > 0])]))

    def mean_and_deviation(self, at: IntArray) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of the logarithm for candidates `at` as if they had not been measured [m]."""
        mean, deviation = self.process.mean_and_deviation(self.hypothesis.points.take(at))
        return self.hypothesis.log_predicted[at] + mean, np.sqrt(deviation**2 + self.process.hyper.noise**2)

    def expected(self, seen: Seen, same_as: IntArray) -> FloatArray:
        """Mean of the logarithm [n]; see `Surrogate.expected`."""
        mean, _ = self.mean_and_deviation(np.arange(len(self.hypothesis.log_predicted)))
        of_measured, variance = self.process.hyper.noise**2 + self.surprise, self.hypothesis.variance(seen)
        own = (seen.log_value - mean[seen.measured]) * of_measured / (of_measured + variance)
        known = same_as >= 0
        mean[known] += own[same_as[known]]
        return mean


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Surrogate:
    """The quantity of all candidates as trials have told it.

    Attributes:
        seen: What they told.
        fitted: The hypotheses after that [h].
        probabilities: Theirs [h].
    """

    seen: Seen
    fitted: tuple[Fitted, ...]
    probabilities: FloatArray

    def draw(
        self,
        num_draws: int,
        rng: np.random.Generator,
        *,
        beside: Sequence[NDArray[np.float32] | None] | None = None,
    ) -> NDArray[np.float32]:
        """Joint draws of the logarithm of the quantity [M, n].

        Args:
            num_draws: M.
            rng: Source of the draws.
            beside: What else was drawn of it under each hypothesis, as a deviation from its predictions [M, n], or
                None: a draw of the process then explains only what this leaves.
        """
        counts = allotted(self.probabilities, num_draws, rng)
        order = rng.permutation(num_draws)
        drawn = np.empty((num_draws, len(self.fitted[0].hypothesis.log_predicted)), dtype=np.float32)
        ends = np.cumsum(counts)
        others = beside or [None] * len(counts)
        for fitted, count, end, other in zip(self.fitted, counts, ends, others, strict=True):
            if count:
                rows = order[end - count : end]
                drawn[rows] = fitted.draw(self.seen, int(count), rng, None if other is None else other[rows])
        return drawn

    def mean_and_deviation(self, at: IntArray) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of the logarithm for candidates `at` as if they had not been measured [m]."""
        moments = [fitted.mean_and_deviation(at) for fitted in self.fitted]
        mean = self.probabilities @ np.array([mean for mean, _ in moments])
        square = self.probabilities @ np.array([mean**2 + deviation**2 for mean, deviation in moments])
        return mean, np.sqrt(np.maximum(square - mean**2, 0.0))

    def expected(self, same_as: IntArray) -> FloatArray:
        """Mean of the logarithm for all candidates [n], with what measured ones have to themselves.

        Args:
            same_as: For each candidate the place among `seen.measured` of one that is the same configuration, itself or
                elsewhere, and has the same to itself; -1 where none is [n].
        """
        return np.asarray(self.probabilities @ np.array([one.expected(self.seen, same_as) for one in self.fitted]))

    def probability_above(self, log_edge: FloatArray, at: IntArray) -> FloatArray:
        """Probability that the quantity of each of `at` [m], had it not been measured, exceeds exp(log_edge) [m]."""
        above = [
            ndtr((mean - log_edge) / deviation)
            for mean, deviation in (fitted.mean_and_deviation(at) for fitted in self.fitted)
        ]
        return np.asarray(self.probabilities @ np.array(above))


def _with_column(points: Points, value: float) -> Points:
    """The points with one more linear column."""
    return replace(points, linear=np.concatenate([points.linear, np.full((len(points), 1), value)], axis=1))


def after(hypotheses: tuple[Hypothesis, ...], seen: Seen) -> Surrogate:
    """What is believed after the trials."""
    fitted = tuple(hypothesis.after(seen) for hypothesis in hypotheses)
    return Surrogate(
        seen=seen, fitted=fitted, probabilities=probabilities_of(np.array([one.log_weight for one in fitted]))
    )
