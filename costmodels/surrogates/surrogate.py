"""Surrogate of a predicted quantity of all candidates, conditioned on trials: step time, or needed memory.

    log(true / predicted)(x) = sum_j scale b_j(x) w_j + offset + m(x) + own(x)

b_j(x) w_j is the effect of the error of one ingredient of the prediction: a constant of the runtime profile, or a part
of memory. m is a Gaussian process over features of the configuration. own(x) is the independent residual of a
configuration: it is known for a measured one and remains uncertain for others, however similar, and more uncertain
where micro-batches may stall or not.

It is not known beforehand which of these explains the trials. Several hypotheses (the ingredients err, everything errs
together, errors are as in earlier studies) are each fitted. They share the draws in proportion to their posterior
probabilities, so a misleading history loses its weight.

Letters: n candidates, t measured ones, b bounded ones, p past observations, h hypotheses, M draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from costmodels.surrogates.censored import Bounds, condition_on_bounds
from costmodels.surrogates.gaussian_process import GaussianProcess, HyperPrior, Points, fit, join_points
from costmodels.surrogates.mixture import allot_draws, probabilities_of
from costmodels.surrogates.predicted import Predicted
from hardware.arrays import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """Degree to which the errors of proxy jobs resemble those of the candidates.

    Attributes:
        chance: Prior probability of this degree.
        together: Standard deviation of the log factor by which all proxy jobs differ from full size, such as a network
            that more hosts share, or the wait for the slowest host.
        each: Standard deviation of the log factor by which each proxy job differs by itself.
    """

    chance: float
    together: float
    each: float


LIKENESSES = (Likeness(chance=0.5, together=0.1, each=0.05), Likeness(chance=0.5, together=0.8, each=0.4))
"""Errors that carry over to full size, and errors that hardly do: a network that is fast within a quarter of the hosts
may be slow between all. Trials at full size decide (assumed, after pairs of sizes in published sweeps)."""


FEWEST_TO_LEARN = 3
"""Fewest measured candidates from which hyperparameters are learned."""

OUTLYING = 4.0
"""Standard deviations above the prediction from all others that make a measured candidate an outlier."""

MEASURED_PER_OUTLIER = 4
"""Measured candidates per outlier beyond the first; what happens more often is no outlier."""

SURPRISING = 0.05
"""Probability of an outlier, which lowers the weight of hypotheses that need many (assumed)."""

OUTLIER_SIZE = 1.0
"""Prior mean of the log excess of an outlier, with the weight of one observed outlier (assumed)."""


UNEXPLAINED = 0.5
"""Error that measured operators leave in the prediction of a step, as a share of the error without them (assumed, after
simulated worlds)."""

MOST_FITTED = 8
"""Most hypotheses whose hyperparameters are fitted."""

RULED_OUT = 1e-3
"""Probability, relative to that of the best hypothesis, below which the trials have ruled a hypothesis out."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Seen:
    """Observations of the quantity in the trials of a study.

    Attributes:
        measured: Positions of measured candidates, each once [t].
        log_value: Logarithm of the measured value [t].
        variance: Variance of the measurement error of `log_value` [t].
        bounded: Positions of candidates with a censored observation [b].
        log_edge: Logarithm of the bound [b].
        side: Direction of each bound: +1 if the value is at least the edge, -1 if at most [b].
        mishap: Probability of the same observation whatever the value is [b].
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
    """Errors of earlier runs, as observations of the process of a hypothesis.

    Attributes:
        at: Inputs of the process for the runs [p].
        values: Observed errors log(measured / predicted) [p].
        variance: Total noise variance of each error [p].
    """

    at: Points
    values: FloatArray
    variance: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Hypothesis:
    """Hypothesis about the errors of predictions.

    Attributes:
        chance: Prior probability, up to a common factor.
        log_predicted: Logarithm of the predicted quantity [n].
        points: Inputs of the process for the candidates [n].
        num_scaled: Number of leading linear columns whose scale is learned.
        prior: Prior of the hyperparameters; the noise is the independent residual of a configuration.
        past: Errors of earlier runs that the hypothesis takes as observations.
        outliers: Pseudo-counts of measurements that are outliers and that are not, before the trials. Unmeasured
            candidates may be outliers too. None if the quantity has no outliers.
        placed: Function that returns log quantity and process inputs of other predicted runs; None if there are none.
        twins: Candidates that each proxy job stands for. Proxy jobs are the last of the points and share their
            independent residual with these candidates.
        aside_variance: Variance of the difference between a proxy job and its candidates, beside measurement error.
        change: Difference of `log_predicted` from the prediction of the study's own profile [n]; None if it is that.
        doubt: Constant c of the factor 1 + c / t on all variances, for hyperparameters learned from t observations
            without a past.
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
    change: FloatArray | None = None
    doubt: float = 0.0

    def with_aside(self, predicted: Predicted, twins: tuple[tuple[int, ...], ...]) -> tuple[Hypothesis, ...]:
        """Return the hypothesis with proxy jobs appended to the candidates [n + p], once for each of LIKENESSES.

        Trials may observe proxy jobs as well as candidates. A linear column of its own holds the common difference of
        all proxy jobs from full size.

        Args:
            predicted: Predictions for the proxy jobs [p].
            twins: Positions of the candidates that each proxy job stands for [p].
        """
        assert self.placed is not None, "the hypothesis says where predicted runs stand"
        log_predicted, points = self.placed(predicted)
        if self.change is not None:  # another profile is assumed to differ for a proxy as for its first candidate
            log_predicted = log_predicted + self.change[[candidates[0] for candidates in twins]]
        return tuple(
            replace(
                self,
                chance=self.chance * likeness.chance,
                log_predicted=np.concatenate([self.log_predicted, log_predicted]),
                points=join_points(_with_column(self.points, 0.0), _with_column(points, likeness.together)),
                past=self.past and replace(self.past, at=_with_column(self.past.at, 0.0)),
                twins=twins,
                aside_variance=likeness.each**2,
            )
            for likeness in LIKENESSES
        )

    def take(self, rows: IntArray) -> Hypothesis:
        """Return the hypothesis of the candidates at ascending positions `rows` [m], which hold every proxy job."""
        place = {row: at for at, row in enumerate(rows.tolist())}
        return replace(
            self,
            log_predicted=self.log_predicted[rows],
            points=self.points.take(rows),
            twins=tuple(tuple(place[each] for each in candidates if each in place) for candidates in self.twins),
            change=None if self.change is None else self.change[rows],
        )

    def corrected(self, log_change: FloatArray, told: Sequence[int]) -> Hypothesis:
        """Return the hypothesis with changed predictions [n] and zeros in the linear columns `told`.

        Measured operators explain most of the error, so the rest is expected to be UNEXPLAINED times as large.
        """
        # the corrected predictions contain what these columns stood for
        keep = np.ones(self.points.linear.shape[1])
        keep[list(told)] = 0.0
        past = self.past and replace(self.past, at=replace(self.past.at, linear=self.past.at.linear * keep))
        return replace(
            self,
            log_predicted=self.log_predicted + log_change,
            points=replace(self.points, linear=self.points.linear * keep),
            prior=replace(
                self.prior, amplitude=UNEXPLAINED * self.prior.amplitude, noise=UNEXPLAINED * self.prior.noise
            ),
            past=past,
        )

    def after(self, seen: Seen, *, learns: bool = True) -> Fitted:
        """Fit the process to the trials and compute how probable it makes them.

        Args:
            seen: Observations of the trials.
            learns: Whether to fit the hyperparameters too; otherwise they are the prior's medians.
        """
        values = seen.log_value - self.log_predicted[seen.measured]
        surprise = self._surprise(seen, values)
        min_to_learn = FEWEST_TO_LEARN if learns else len(values) + 1
        process, log_likelihood = self._process(seen, values, surprise, min_to_learn=min_to_learn)
        bounds = Bounds(
            at=self.points.take(seen.bounded),
            edge=seen.log_edge - self.log_predicted[seen.bounded],
            side=seen.side,
            mishap=seen.mishap,
            blur=np.sqrt(process.hyper.noise**2 + self.points.own_variance[seen.bounded]),
        )
        process, log_bounds = condition_on_bounds(process, bounds)
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
        """Return the process given trials and past, and the log likelihood of the trials given the past.

        Args:
            seen: Observations of the trials.
            values: Log ratios of the measured values to the predictions [t].
            surprise: Variance of each independent residual beyond the noise of the process [t].
            min_to_learn: Fewest measured candidates from which hyperparameters are learned.
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
            learned = _widen_deviations(process, self.doubt) if len(values) >= min_to_learn else process
            return learned, process.log_likelihood()
        # the chain rule: log p(trials | past) = log p(trials, past) - log p(past)
        past = self.past
        before = process.take(np.zeros(0, dtype=np.int64)).with_more(past.at, past.values, past.variance)
        process = process.with_more(past.at, past.values, past.variance)
        return process, process.log_likelihood() - before.log_likelihood()

    def variance(self, seen: Seen) -> FloatArray:
        """Return the variance of each measured value around the value of the candidate that it stands for [t]."""
        is_aside = seen.measured >= len(self.points) - len(self.twins)
        return np.asarray(seen.variance + self.aside_variance * is_aside)

    def _surprise(self, seen: Seen, values: FloatArray) -> FloatArray:
        """Return the variance of independent residuals beyond the noise of the process [t]; zero except for outliers.

        An outlier lies far above its prediction from all others, under hyperparameters that have not adapted to it:
        something slowed that run down and no other. Without the extra variance, the process would expect such
        slowdowns everywhere.
        """
        surprise = np.zeros(len(values))
        # every observation is a part of its own: leave-one-out
        alone = np.arange(len(values) + (len(self.past.values) if self.past else 0))
        for _ in range(1 + len(values) // MEASURED_PER_OUTLIER if len(values) else 0):
            process, _ = self._process(seen, values, surprise, min_to_learn=len(values) + 1)
            errors, deviations = process.left_out_errors(alone)
            own = errors[: len(values)] / deviations[: len(values)]
            worst = int(np.argmax(np.abs(own)))
            if own[worst] <= OUTLYING:  # a surprisingly fast run counts as it is, though it makes others look slow
                break
            # as much variance as makes this error one standard deviation
            surprise[worst] += errors[worst] ** 2 - deviations[worst] ** 2
        return surprise


def _widen_deviations(process: GaussianProcess, doubt: float) -> GaussianProcess:
    """Return the process with larger deviations, since few observations determine its hyperparameters."""
    factor = float(np.sqrt(1 + doubt / len(process.values)))
    hyper = process.hyper
    return replace(process, hyper=replace(hyper, amplitude=factor * hyper.amplitude, scale=factor * hyper.scale))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """Hypothesis conditioned on the trials.

    Attributes:
        hypothesis: Hypothesis before the trials.
        process: Posterior process. The measured candidates come first among its observations, the bounded ones last.
        surprise: Variance of each measured candidate's independent residual beyond the noise of the process [t].
        log_weight: Logarithm of prior probability times likelihood of the trials.
        is_regular: Whether unmeasured candidates are drawn as if none were an outlier.
    """

    hypothesis: Hypothesis
    process: GaussianProcess
    surprise: FloatArray
    log_weight: float
    is_regular: bool = False

    def draw(
        self, seen: Seen, num_draws: int, rng: np.random.Generator, beside: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Return joint draws of the log quantity [M, n]; see `Surrogate.draw`."""
        drawn = self.process.draw(
            self.hypothesis.points,
            num_draws,
            rng,
            beside=None if beside is None else self._at_observations(seen, beside),
        )
        if beside is not None:
            drawn += beside
        drawn += self.hypothesis.log_predicted.astype(np.float32)
        own_variance = self._own_variance
        # the independent residual of a measured candidate is Gaussian given the smooth part and its measurement
        smooth = drawn[:, seen.measured]
        of_measured, variance = own_variance[seen.measured] + self.surprise, self.hypothesis.variance(seen)
        total = of_measured + variance
        own = (seen.log_value - smooth) * (of_measured / total)
        own += rng.standard_normal(smooth.shape) * np.sqrt(of_measured * variance / total)
        # unmeasured candidates draw a residual from the prior, and a few of them an outlier
        of_others = np.sqrt(own_variance).astype(np.float32) * rng.standard_normal(drawn.shape, dtype=np.float32)
        if self.hypothesis.outliers is not None:
            is_outlier = rng.random(drawn.shape, dtype=np.float32) < self._outlier_rate(self.hypothesis.outliers)
            far = rng.standard_exponential(int(is_outlier.sum()), dtype=np.float32)
            of_others[is_outlier] += np.float32(self._outlier_size()) * far
        # candidates whose proxy job was measured share its residual
        self._carry_over(seen, own, of_others)
        drawn += of_others
        drawn[:, seen.measured] = smooth + own
        return drawn

    def _carry_over(self, seen: Seen, own: FloatArray, of_others: NDArray[np.float32]) -> None:
        """Overwrite residuals of candidates [M, n] by those of their proxy jobs [M, t], without the outlying part."""
        own_variance = self._own_variance[seen.measured]
        share = own_variance / (own_variance + self.surprise)
        first_aside = len(self.hypothesis.points) - len(self.hypothesis.twins)
        for at, place in enumerate(seen.measured.tolist()):
            for candidate in self.hypothesis.twins[place - first_aside] if place >= first_aside else ():
                of_others[:, candidate] = share[at] * own[:, at] + np.sqrt(1 - share[at]) * of_others[:, candidate]

    @property
    def _own_variance(self) -> FloatArray:
        """Variance of the independent residual of each candidate, unless it is an outlier [n]."""
        return np.asarray(self.process.hyper.noise**2 + self.hypothesis.points.own_variance)

    def _at_observations(self, seen: Seen, beside: NDArray[np.float32]) -> FloatArray:
        """Return `beside` at the observations of the process [M, .]; it is zero for those of the past."""
        of_observations = np.zeros((len(beside), len(self.process.values)))
        of_observations[:, : len(seen.measured)] = beside[:, seen.measured]
        of_observations[:, of_observations.shape[1] - len(seen.bounded) :] = beside[:, seen.bounded]
        return of_observations

    def _outlier_rate(self, before: tuple[float, float]) -> float:
        """Return the probability that an unmeasured candidate is an outlier, given the pseudo-counts before."""
        found = np.count_nonzero(self.surprise)
        return float((before[0] + found) / (before[0] + before[1] + len(self.surprise)))

    def _outlier_size(self) -> float:
        """Return the expected log excess of an outlier; 0 if none is to be one."""
        return 0.0 if self.is_regular else float(np.mean([OUTLIER_SIZE, *np.sqrt(self.surprise[self.surprise > 0])]))

    def mean_and_deviation(self, at: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of the log quantity at candidates `at` as if unmeasured, each [m]."""
        mean, deviation = self.process.mean_and_deviation(self.hypothesis.points.take(at))
        return self.hypothesis.log_predicted[at] + mean, np.sqrt(deviation**2 + self._own_variance[at])

    def mean(self) -> FloatArray:
        """Return the mean of the log quantity of all candidates as if unmeasured [n]."""
        return self.hypothesis.log_predicted + self.process.mean(self.hypothesis.points)

    def without_trials(self, seen: Seen, at: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return mean [m] and covariance [m, m] of the log quantity of candidates `at`, had no trial run.

        The hyperparameters are those that the trials taught, and earlier runs still count. Measurement errors are not
        in the covariance; independent residuals are.
        """
        num_past = len(self.process.values) - len(seen.measured) - len(seen.bounded)
        past = self.process.take(len(seen.measured) + np.arange(num_past))
        mean, covariance = past.mean_and_covariance(self.hypothesis.points.take(at))
        residual = self._own_variance
        residual[seen.measured] += self.surprise
        # a candidate that is named twice has one residual
        return self.hypothesis.log_predicted[at] + mean, covariance + residual[at] * (at[:, None] == at)

    def expected(self, seen: Seen, same_as: IntArray) -> FloatArray:
        """Return the mean of the log quantity [n]; see `Surrogate.expected`."""
        mean, _ = self.mean_and_deviation(np.arange(len(self.hypothesis.log_predicted)))
        of_measured = self._own_variance[seen.measured] + self.surprise
        variance = self.hypothesis.variance(seen)
        # expected residual of a measured candidate: the share of its deviation that is no measurement error
        own = (seen.log_value - mean[seen.measured]) * of_measured / (of_measured + variance)
        known = same_as >= 0
        mean[known] += own[same_as[known]]
        return mean


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Surrogate:
    """Posterior of the quantity for all candidates, given the trials.

    Attributes:
        seen: Observations of the trials.
        fitted: Plausible hypotheses conditioned on them [h].
        places: Places of these among all hypotheses [h].
        probabilities: Posterior probability of each plausible hypothesis [h].
    """

    seen: Seen
    fitted: tuple[Fitted, ...]
    places: tuple[int, ...]
    probabilities: FloatArray

    def draw(
        self, num_draws: int, rng: np.random.Generator, *, beside: Sequence[NDArray[np.float32] | None] | None = None
    ) -> NDArray[np.float32]:
        """Return joint draws of the log quantity [M, n].

        Args:
            num_draws: Number of draws M.
            rng: Source of random numbers.
            beside: Draws of another part of the error for each of all hypotheses [M, n], or None. The process then
                explains only the remaining error.
        """
        # each hypothesis fills a random subset of the draws, as large as its probability
        counts = allot_draws(self.probabilities, num_draws, rng)
        order = rng.permutation(num_draws)
        drawn = np.empty((num_draws, len(self.fitted[0].hypothesis.log_predicted)), dtype=np.float32)
        ends = np.cumsum(counts)
        others = [None if beside is None else beside[place] for place in self.places]
        for fitted, count, end, other in zip(self.fitted, counts, ends, others, strict=True):
            if count:
                rows = order[end - count : end]
                drawn[rows] = fitted.draw(self.seen, int(count), rng, None if other is None else other[rows])
        return drawn

    def take(self, rows: IntArray) -> Surrogate:
        """Return the posterior of the candidates at ascending positions `rows` [m], which hold all that were seen."""
        measured, bounded = (np.searchsorted(rows, at) for at in (self.seen.measured, self.seen.bounded))
        return replace(
            self,
            seen=replace(self.seen, measured=measured, bounded=bounded),
            fitted=tuple(replace(one, hypothesis=one.hypothesis.take(rows)) for one in self.fitted),
        )

    @property
    def regular(self) -> Surrogate:
        """Posterior as if no unmeasured candidate were an outlier.

        From generators in the same state, its draws are the same but for the excess of outliers.
        """
        return replace(self, fitted=tuple(replace(one, is_regular=True) for one in self.fitted))

    def without_trials(self, at: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return mean [m] and covariance [m, m] of candidates under the most probable hypothesis, had no trial run."""
        return self.fitted[int(np.argmax(self.probabilities))].without_trials(self.seen, at)

    def mean_and_deviation(self, at: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of the log quantity at candidates `at` as if unmeasured, each [m]."""
        moments = [fitted.mean_and_deviation(at) for fitted in self.fitted]
        # moments of a mixture: E[x] and E[x^2] are averages over the hypotheses
        mean = self.probabilities @ np.array([mean for mean, _ in moments])
        square = self.probabilities @ np.array([mean**2 + deviation**2 for mean, deviation in moments])
        return mean, np.sqrt(np.maximum(square - mean**2, 0.0))

    def expected(self, same_as: IntArray) -> FloatArray:
        """Return the mean of the log quantity for all candidates [n], with residuals of measured ones.

        Args:
            same_as: Position among `seen.measured` of the same configuration, be it the candidate itself or a run
                elsewhere with the same independent residual; -1 if there is none [n].
        """
        return np.asarray(self.probabilities @ np.array([one.expected(self.seen, same_as) for one in self.fitted]))

    def means(self) -> FloatArray:
        """Return the mean of the log quantity of all candidates as if unmeasured, under each hypothesis [h, n]."""
        return np.array([fitted.mean() for fitted in self.fitted])

    def is_likely_above(self, log_edge: FloatArray, at: IntArray, means: FloatArray) -> NDArray[np.bool_]:
        """Return whether the quantity exceeds exp(log_edge) [m] more likely than not, for unmeasured candidates [m].

        Args:
            log_edge: Logarithms of the edges [m].
            at: Positions of the candidates [m].
            means: Their `means` [h, m].
        """
        above = means > log_edge
        found = np.asarray(above.all(axis=0))
        # deviations, which take long, matter only where the hypotheses disagree
        open_ = np.flatnonzero(above.any(axis=0) & ~found)
        if len(open_):
            found[open_] = self.probability_above(log_edge[open_], at[open_]) > 0.5
        return found

    def probability_above(self, log_edge: FloatArray, at: IntArray) -> FloatArray:
        """Return the probability that the quantity exceeds exp(log_edge) [m] for unmeasured candidates `at` [m]."""
        # a mixture's tail probability is the average of its components'
        above = [
            ndtr((mean - log_edge) / deviation)
            for mean, deviation in (fitted.mean_and_deviation(at) for fitted in self.fitted)
        ]
        return np.asarray(self.probabilities @ np.array(above))


def _with_column(points: Points, value: float) -> Points:
    return replace(points, linear=np.concatenate([points.linear, np.full((len(points), 1), value)], axis=1))


def after(hypotheses: Sequence[Hypothesis], seen: Seen) -> Surrogate:
    """Return the posterior of all hypotheses after the trials; those that the trials rule out are left out."""
    places = _plausible(hypotheses, seen)
    fitted = tuple(hypotheses[place].after(seen) for place in places)
    return Surrogate(
        seen=seen,
        fitted=fitted,
        places=places,
        probabilities=probabilities_of(np.array([one.log_weight for one in fitted])),
    )


def _plausible(hypotheses: Sequence[Hypothesis], seen: Seen) -> tuple[int, ...]:
    """Return the places of the hypotheses that are worth a fit of their hyperparameters.

    Their weights under the prior's hyperparameters, which cost little, decide.
    """
    if len(hypotheses) <= MOST_FITTED or not len(seen.measured) + len(seen.bounded):
        return tuple(range(len(hypotheses)))
    weights = np.array([hypothesis.after(seen, learns=False).log_weight for hypothesis in hypotheses])
    best = np.argsort(-weights, kind="stable")[:MOST_FITTED]
    return tuple(sorted(best[weights[best] > weights.max() + np.log(RULED_OUT)].tolist()))
