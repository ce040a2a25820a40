"""Hypotheses about the errors of predicted step times and memory, which a study weighs by its trials.

Without a history, errors follow the runtime's profile: its constants err by their standard deviations, all candidates
share an unknown factor, and the rest varies smoothly between configurations. Memory may err by more than the profile
states. The study's cluster may resemble those of another profile more than those of its own, so that the predictions of
other profiles are hypotheses too. With a history there is a further hypothesis: the profile is fitted to earlier runs,
and their residuals are observations of the same process. Each group of earlier runs has an offset of its own.

Letters: n candidates, c constants, g groups, p past observations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import chdtri

from costmodels.step.error_models import MemoryErrorModel
from costmodels.step.memory.peak import MEMORY_PARTS
from costmodels.surrogates.gaussian_process import Hyperparameters, HyperPrior, Points, fit, join_points
from costmodels.surrogates.predicted import Predicted
from costmodels.surrogates.search_constants import search_constants
from costmodels.surrogates.surrogate import Hypothesis, PastErrors
from hardware.arrays import FloatArray, IntArray

FOREIGN_OFFSET = 0.5
"""Standard deviation of the log factor that all candidates share, without a history."""

GROUP_OFFSET, RUNTIME_OFFSET = 0.05, 0.05
"""Standard deviations of log factors with a history: of each job on each cluster, and of the whole runtime."""

PART_ERRORS: Mapping[str, float] = {
    "weights": 0.05,
    "gradients": 0.15,
    "optimizer": 0.15,
    "activations": 0.3,
    "logits": 0.5,
    "buffers": 0.5,
    "fragmentation": 0.5,
    "overhead": 0.5,
}
"""Standard deviation of log(true / predicted) of each part of memory, in addition to the shared error."""

ALIKE = 0.03
"""Root mean square difference of log predictions below which two profiles are one hypothesis."""

ALIKE_LEADERS = 0.002
"""Standard deviation of the log ratios of simulated and predicted leaders below which both are one hypothesis."""

SIMULATOR_ODDS = 2.0
"""Prior odds of the simulator's step times, relative to those of the closed form (assumed)."""

MEMORY_MULTIPLES: Mapping[float, float] = {1.0: 0.6, 2.0: 0.25, 4.0: 0.15}
"""Multiples of a normal memory error, with the chance of each, without a history."""

MEMORY_AMPLITUDE = 0.5
"""Amplitude of the smooth differences between configurations, as a multiple of the error that all share."""

PEAK_NOISE = 0.04
"""Independent residual of the log of needed memory in a measured peak: the allocator holds more than it must."""

TRUST, FOREIGN_TRUST = 8.0, 1.0
"""Prior odds that a history applies, relative to the hypothesis without one: a history on the candidates' own devices,
and one on other devices only (assumed)."""

LEARNED_SPREAD = 0.3
"""Standard deviation of the log hyperparameters after a fit to a history."""

OUTLYING = 3.0
"""Multiple of the usual error beyond which a past run counts as an outlier and is left out."""

FEWEST_PAST = 5
"""Fewest past observations that make a history."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PastGroup:
    """Earlier runs of one job on one cluster.

    Attributes:
        predicted: Predictions of the profile fitted to the past [m].
        step_time_s: Measured step times; nan where there is none [m].
        peak_bytes: Measured memory peaks; nan where there is none [m].
    """

    predicted: Predicted
    step_time_s: FloatArray
    peak_bytes: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedHistory:
    """Earlier runs of a runtime, beside the predictions of the profile that was fitted to them.

    Attributes:
        predicted: Predictions of the fitted profile for the candidates [n].
        groups: Groups of earlier runs [g].
        trust: Prior odds that they apply, relative to the hypothesis without a history.
    """

    predicted: Predicted
    groups: tuple[PastGroup, ...]
    trust: float = TRUST


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alternative:
    """Predictions of the candidates by another profile than the study's own.

    Attributes:
        step_time_s: Predicted step times [n].
        needed_bytes: Predicted needed memory [n].
    """

    step_time_s: FloatArray
    needed_bytes: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatedSteps:
    """Step times of some candidates by the event simulator, which sees what the closed form leaves out.

    Attributes:
        at: Positions of the candidates [k].
        step_time_s: Their simulated step times [s], [k].
    """

    at: IntArray
    step_time_s: FloatArray

    def log_change(self, predicted: Predicted) -> FloatArray:
        """Return by how much the simulator's log step times differ from the predicted ones, for all candidates [n].

        Candidates that were not simulated differ as those do that resemble them; what resembles none has the mean.
        """
        own = np.log(self.step_time_s / predicted.step_time_s[self.at])
        weight = np.exp(-0.5 * cdist(predicted.features, predicted.features[self.at], "sqeuclidean"))
        change = own.mean() + weight @ (own - own.mean()) / (weight.sum(axis=1) + 1.0)
        change[self.at] = own
        return np.asarray(change)


def step_hypotheses(
    predicted: Predicted,
    history: FittedHistory | None = None,
    alternatives: Sequence[Alternative] = (),
    simulated: SimulatedSteps | None = None,
) -> tuple[Hypothesis, ...]:
    """Return the hypotheses about errors of predicted step times [n].

    Args:
        predicted: Predictions of the study's own profile.
        history: Earlier runs, which add a hypothesis; it is the last one.
        alternatives: Predictions of other profiles.
        simulated: Simulated steps, which add the hypothesis that the simulator is right.
    """
    constants = search_constants()
    effects = predicted.constant_effects
    # the common effect of a constant on all candidates is part of the offset, so the effects are centred
    placed = partial(_place_steps, center=effects.mean(axis=0), constants=(FOREIGN_OFFSET,))
    log_predicted, points = placed(predicted)
    cold = Hypothesis(
        chance=1.0,
        log_predicted=log_predicted,
        points=points,
        num_scaled=effects.shape[1],
        prior=constants.smooth,
        placed=placed,
        outliers=constants.outliers,
        doubt=constants.doubt,
    )
    # a factor that all candidates share tells two profiles not apart, since it is unknown anyway
    others = _distinct([np.log(other.step_time_s / predicted.step_time_s) for other in alternatives], is_relative=True)
    chance = constants.alternative_chance
    smooth = (cold, *(_as_predicted_elsewhere(cold, change, chance * count) for change, count in others))
    if simulated is not None:
        # with its leaders in another order, the simulator is as likely to be right as the closed form
        change = simulated.log_change(predicted)
        if np.std(change[simulated.at]) >= ALIKE_LEADERS:
            smooth += (_as_predicted_elsewhere(cold, change, SIMULATOR_ODDS),)
    rough = tuple(replace(each, chance=constants.rough_chance * each.chance, prior=constants.rough) for each in smooth)
    warm = history and _learn_from_past(
        history,
        placed=partial(_place_steps, center=np.zeros(effects.shape[1])),
        num_scaled=effects.shape[1],
        offsets=(RUNTIME_OFFSET, GROUP_OFFSET),
        log_errors=[np.log(group.step_time_s / group.predicted.step_time_s) for group in history.groups],
        prior=constants.smooth,
        outliers=constants.outliers,
    )
    return (*smooth, *rough, warm) if warm else (*smooth, *rough)


def memory_hypotheses(
    predicted: Predicted, history: FittedHistory | None = None, alternatives: Sequence[Alternative] = ()
) -> tuple[Hypothesis, ...]:
    """Return the hypotheses about errors of predicted memory [n]; see `step_hypotheses`."""
    constants = search_constants()
    shared = predicted.memory_error.scale
    placed = partial(_place_memory, shared=shared)
    log_needed, points = placed(predicted, constants=())
    prior = HyperPrior(amplitude=MEMORY_AMPLITUDE * shared, length_scale=3.0, noise=PEAK_NOISE)
    cold = tuple(
        Hypothesis(
            chance=chance,
            log_predicted=log_needed,
            points=points,
            num_scaled=points.linear.shape[1],
            prior=HyperPrior(amplitude=multiple * prior.amplitude, length_scale=3.0, noise=prior.noise, scale=multiple),
            placed=partial(placed, constants=()),
            # deviations are not widened as those of steps are: it cost trials, and no more searches ended on the best
        )
        for multiple, chance in _memory_multiples(predicted.memory_error).items()
    )
    others = _distinct(
        [np.log(other.needed_bytes / predicted.needed_bytes) for other in alternatives], is_relative=False
    )
    chance = constants.alternative_chance
    cold += tuple(_as_predicted_elsewhere(each, change, chance * count) for change, count in others for each in cold)
    warm = history and _learn_from_past(
        history,
        placed=placed,
        num_scaled=points.linear.shape[1],
        offsets=(0.0, GROUP_OFFSET),
        log_errors=[np.log(group.peak_bytes / group.predicted.peak_bytes) for group in history.groups],
        prior=prior,
    )
    return (*cold, warm) if warm else cold


def _memory_multiples(error: MemoryErrorModel) -> Mapping[float, float]:
    """Return multiples of the memory error's scale, with the chance of each.

    Student's t is a normal distribution whose variance is `freedom` over a chi-square variable. Its multiples are
    the middles of classes of the chances that MEMORY_MULTIPLES has.
    """
    if error.freedom is None:
        return MEMORY_MULTIPLES
    chances = np.array(list(MEMORY_MULTIPLES.values()))
    # large multiples are small values of chi-square
    middles = np.cumsum(chances) - chances / 2
    multiples = np.sqrt(error.freedom / chdtri(error.freedom, middles))
    return dict(zip(multiples.tolist(), chances.tolist(), strict=True))


def _distinct(changes: Sequence[FloatArray], *, is_relative: bool) -> list[tuple[FloatArray, int]]:
    """Return the log changes [n] that other profiles make to the own predictions, each with the profiles that agree.

    Profiles that agree with the own one are left out.

    Args:
        changes: Change of each profile [n].
        is_relative: Whether a factor that all candidates share makes no difference.
    """
    found: list[tuple[FloatArray, int]] = [(np.zeros(len(changes[0])), 0)] if changes else []
    for change in changes:
        for at, (known, count) in enumerate(found):
            away = change - known
            if np.sqrt(np.mean((away - away.mean() * is_relative) ** 2)) < ALIKE:
                found[at] = known, count + 1
                break
        else:
            found.append((change, 1))
    return found[1:]


def _as_predicted_elsewhere(own: Hypothesis, change: FloatArray, chance: float) -> Hypothesis:
    """Return the hypothesis that other profiles are right whose log predictions differ by `change` [n].

    Its chance is relative to that of the study's own profile.
    """
    return replace(own, chance=own.chance * chance, log_predicted=own.log_predicted + change, change=change)


def _place_steps(predicted: Predicted, *, center: FloatArray, constants: Sequence[float]) -> tuple[FloatArray, Points]:
    """Return log step times [n] and inputs of the process; `center` [c] is subtracted from the effects."""
    return np.log(predicted.step_time_s), _points(
        predicted, predicted.constant_effects - center, constants, predicted.stall_variance
    )


def _place_memory(predicted: Predicted, *, shared: float, constants: Sequence[float]) -> tuple[FloatArray, Points]:
    """Return log needed memory [n] and inputs of the process; `shared` is the deviation of the common error."""
    # one column for the common error and one for each part, weighted by the part's share of the memory
    errors = np.array([PART_ERRORS[part] for part in MEMORY_PARTS])
    columns = np.concatenate([np.full((len(predicted), 1), shared), predicted.memory_shares * errors], axis=1)
    return np.log(predicted.needed_bytes), _points(predicted, columns, constants, np.zeros(len(columns)))


def _points(predicted: Predicted, columns: FloatArray, constants: Sequence[float], own_variance: FloatArray) -> Points:
    """Return the inputs of the process for the candidates, with further constant linear columns."""
    return Points(
        features=predicted.features,
        linear=np.concatenate([columns, np.tile(np.asarray(constants, dtype=float), (len(columns), 1))], axis=1),
        own_variance=own_variance,
    )


def _learn_from_past(
    history: FittedHistory,
    *,
    placed: Callable[..., tuple[FloatArray, Points]],
    num_scaled: int,
    offsets: tuple[float, float],
    log_errors: Sequence[FloatArray],
    prior: HyperPrior,
    outliers: tuple[float, float] | None = None,
) -> Hypothesis | None:
    """Return the hypothesis that errors are as in earlier runs; None where these are too few."""
    shared, own = offsets
    num_groups = len(history.groups) + 1  # the last group holds the candidates

    def placed_in(index: int) -> Callable[[Predicted], tuple[FloatArray, Points]]:
        return partial(placed, constants=(shared, *(own * (np.arange(num_groups) == index)).tolist()))

    # every group has the runtime's offset in common and one column for its own, which is zero in all other groups
    parts = [placed_in(index)(group.predicted)[1] for index, group in enumerate(history.groups)]
    values = np.concatenate([*log_errors, np.zeros(0)])
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < FEWEST_PAST:
        return None
    at = parts[0]
    for part in parts[1:]:
        at = join_points(at, part)
    of_candidates = placed_in(num_groups - 1)
    log_predicted, candidates = of_candidates(history.predicted)
    kept, hyper = _fit_without_outliers(at.take(known), values[known], prior, num_scaled)
    # what the past has learned is the prior for the trials, narrower than the one before
    learned = HyperPrior(
        amplitude=hyper.amplitude,
        length_scale=tuple(hyper.length_scale.tolist()),
        noise=hyper.noise,
        scale=hyper.scale,
        spread=LEARNED_SPREAD,
    )
    past = PastErrors(
        at=at.take(known[kept]), values=values[known[kept]], variance=hyper.noise**2 + at.own_variance[known[kept]]
    )
    return Hypothesis(
        chance=history.trust,
        log_predicted=log_predicted,
        points=candidates,
        num_scaled=num_scaled,
        prior=learned,
        past=past,
        placed=of_candidates,
        outliers=outliers and (outliers[0] + len(known) - len(kept), outliers[1] + len(kept)),
    )


def _fit_without_outliers(
    at: Points, values: FloatArray, prior: HyperPrior, num_scaled: int
) -> tuple[IntArray, Hyperparameters]:
    """Return the positions of observations that are no outliers, and the hyperparameters fitted to them.

    An outlier lies far above its prediction, compared with most others, or far from its value predicted from all other
    observations. A run that something slowed down tells nothing about the fastest ones, and would make the process
    expect such slowdowns everywhere. A run much faster than predicted is kept if others confirm it, such as a
    configuration that does well in every job.
    """
    away = values - np.median(values)
    usual = np.flatnonzero(away <= OUTLYING * max(float(np.quantile(np.abs(away), 0.683)), prior.noise))
    # then leave-one-out errors under the first fit; 0.683 is the share within one deviation of a normal distribution
    process = fit(at.take(usual), values[usual], prior=prior, num_scaled=num_scaled)
    errors, deviations = process.left_out_errors(np.arange(len(usual)))
    away = np.abs(errors) / deviations
    kept = usual[away <= OUTLYING * max(float(np.quantile(away, 0.683)), 1.0)]
    again = fit(at.take(kept), values[kept], prior=prior, num_scaled=num_scaled)
    return kept, again.hyper
