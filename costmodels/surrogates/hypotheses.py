"""How predictions of step times and of memory may err: the hypotheses that a study weighs by its trials.

Without a history there is what the runtime's profile says of itself: its constants err by their deviations, all
candidates share an unknown factor, and the rest differs smoothly. Memory may err by more than its profile says. With a
history there is a further hypothesis: the profile as fitted to earlier runs, and what they leave unexplained as
observations of the same process, group by group with an error of its own.

Letters: n candidates, c constants, g groups, p past observations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from costmodels.step.memory import MEMORY_PARTS
from costmodels.surrogates.gaussian_process import Hyperparameters, HyperPrior, Points, fit, joined
from costmodels.surrogates.predicted import Predicted
from costmodels.surrogates.surrogate import Hypothesis, PastErrors
from hardware.arrays import FloatArray, IntArray

STEP_PRIOR = HyperPrior(amplitude=0.3, length_scale=3.0, noise=0.03)
"""Of log(measured / predicted step time) where no run of the runtime is at hand; assumed, as is all below."""

ROUGH_PRIOR, ROUGH_CHANCE = replace(STEP_PRIOR, length_scale=1.0), 0.25
"""A world whose errors change within an octave or three, and how probable it is beside the smooth one. Without it a
few trials that agree make all candidates look alike. Chosen on the Ultra-Scale Playbook's groups."""

FEW_OUTLIERS = (2.0, 8.0)
"""Runs that something slowed down which no profile knows, and other runs, that are taken to have been seen before any.
Chosen on the Ultra-Scale Playbook's groups: calibration there and on vTrain's is better than with (1, 19)."""

FOREIGN_OFFSET = 0.5
"""Standard deviation of the log factor that all candidates share, without a history."""

GROUP_OFFSET, RUNTIME_OFFSET = 0.05, 0.05
"""The same with one: of each job on each cluster, and of the runtime."""

PART_ERRORS: Mapping[str, float] = {
    "weights": 0.05,
    "gradients": 0.15,
    "optimizer": 0.15,
    "activations": 0.3,
    "logits": 0.5,
    "buffers": 0.5,
    "fragmentation": 0.0,  # an allocator gives it up
    "overhead": 0.5,
}
"""Standard deviation of log(true / predicted) of each part of memory, beside the error that all candidates share."""

MEMORY_MULTIPLES: Mapping[float, float] = {1.0: 0.6, 2.0: 0.25, 4.0: 0.15}
"""How far memory may err over what the profile says, and how probable that is without a history."""

MEMORY_AMPLITUDE = 0.5
"""What differs smoothly between the memory of configurations, over the error that all share."""

PEAK_NOISE = 0.04
"""What a measured peak has to itself as the memory that is needed: the allocator holds more than it must."""

TRUST, FOREIGN_TRUST = 8.0, 1.0
"""How much more probable than the plain hypothesis it is that a history applies: one of the candidates' own devices,
and one of others only (assumed)."""

LEARNED_SPREAD = 0.3
"""Standard deviation of the logarithms of hyperparameters that a history has told."""

OUTLYING = 3.0
"""Usual errors beyond which a past run is an outlier, and no observation."""

FEWEST_PAST = 5
"""Past observations below which there is no history."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PastGroup:
    """Earlier runs of one job on one cluster.

    Attributes:
        predicted: What the profile, as fitted to the past, says of them [m].
        step_time_s: What was measured; nan where nothing was [m].
        peak_bytes: The same of their memory [m].
    """

    predicted: Predicted
    step_time_s: FloatArray
    peak_bytes: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Experience:
    """What earlier runs of a runtime leave to learn beyond its fitted profile.

    Attributes:
        predicted: What the fitted profile says of the candidates [n].
        groups: The runs [g].
        trust: How much more probable than the plain hypothesis it is that they apply.
    """

    predicted: Predicted
    groups: tuple[PastGroup, ...]
    trust: float = TRUST


def step_hypotheses(predicted: Predicted, experience: Experience | None = None) -> tuple[Hypothesis, ...]:
    """How the predicted step times [n] may err; with `experience` also as those of earlier runs did."""
    effects = predicted.constant_effects
    # what a constant does to all candidates alike is the offset's
    placed = partial(_placed_steps, center=effects.mean(axis=0), constants=(FOREIGN_OFFSET,))
    log_predicted, points = placed(predicted)
    cold = Hypothesis(
        chance=1.0,
        log_predicted=log_predicted,
        points=points,
        num_scaled=effects.shape[1],
        prior=STEP_PRIOR,
        placed=placed,
        outliers=FEW_OUTLIERS,
    )
    rough = replace(cold, chance=ROUGH_CHANCE, prior=ROUGH_PRIOR)
    warm = experience and _warm(
        experience,
        placed=partial(_placed_steps, center=np.zeros(effects.shape[1])),
        num_scaled=effects.shape[1],
        offsets=(RUNTIME_OFFSET, GROUP_OFFSET),
        log_errors=[np.log(group.step_time_s / group.predicted.step_time_s) for group in experience.groups],
        prior=STEP_PRIOR,
        outliers=FEW_OUTLIERS,
    )
    return (cold, rough, warm) if warm else (cold, rough)


def memory_hypotheses(predicted: Predicted, experience: Experience | None = None) -> tuple[Hypothesis, ...]:
    """How the predicted need of memory [n] may err; see `step_hypotheses`."""
    shared = predicted.memory_error
    placed = partial(_placed_memory, shared=shared)
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
        )
        for multiple, chance in MEMORY_MULTIPLES.items()
    )
    warm = experience and _warm(
        experience,
        placed=placed,
        num_scaled=points.linear.shape[1],
        offsets=(0.0, GROUP_OFFSET),
        log_errors=[np.log(group.peak_bytes / group.predicted.peak_bytes) for group in experience.groups],
        prior=prior,
    )
    return (*cold, warm) if warm else cold


def _placed_steps(predicted: Predicted, *, center: FloatArray, constants: Sequence[float]) -> tuple[FloatArray, Points]:
    """Logarithm of the step times [n], and where a process sees them; `center` [c] is taken off the effects."""
    return np.log(predicted.step_time_s), _points(predicted, predicted.constant_effects - center, constants)


def _placed_memory(predicted: Predicted, *, shared: float, constants: Sequence[float]) -> tuple[FloatArray, Points]:
    """The same of the memory that is needed; `shared` is the error that all have in common."""
    errors = np.array([PART_ERRORS[part] for part in MEMORY_PARTS])
    columns = np.concatenate([np.full((len(predicted), 1), shared), predicted.memory_shares * errors], axis=1)
    return np.log(predicted.needed_bytes), _points(predicted, columns, constants)


def _points(predicted: Predicted, columns: FloatArray, constants: Sequence[float]) -> Points:
    """Candidates where a process sees them, with further columns that are constant."""
    return Points(
        features=predicted.features,
        linear=np.concatenate([columns, np.tile(np.asarray(constants, dtype=float), (len(columns), 1))], axis=1),
    )


def _warm(
    experience: Experience,
    *,
    placed: Callable[..., tuple[FloatArray, Points]],
    num_scaled: int,
    offsets: tuple[float, float],
    log_errors: Sequence[FloatArray],
    prior: HyperPrior,
    outliers: tuple[float, float] | None = None,
) -> Hypothesis | None:
    """The hypothesis that errors are those of the past; None where it tells none."""
    shared, own = offsets
    num_groups = len(experience.groups) + 1  # the candidates' is the last

    def placed_in(index: int) -> Callable[[Predicted], tuple[FloatArray, Points]]:
        return partial(placed, constants=(shared, *(own * (np.arange(num_groups) == index)).tolist()))

    parts = [placed_in(index)(group.predicted)[1] for index, group in enumerate(experience.groups)]
    values = np.concatenate([*log_errors, np.zeros(0)])
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < FEWEST_PAST:
        return None
    at = parts[0]
    for part in parts[1:]:
        at = joined(at, part)
    of_candidates = placed_in(num_groups - 1)
    log_predicted, candidates = of_candidates(experience.predicted)
    kept, hyper = _robust(at.take(known), values[known], prior, num_scaled)
    learned = HyperPrior(
        amplitude=hyper.amplitude,
        length_scale=tuple(hyper.length_scale.tolist()),
        noise=hyper.noise,
        scale=hyper.scale,
        spread=LEARNED_SPREAD,
    )
    past = PastErrors(at=at.take(known[kept]), values=values[known[kept]], variance=np.full(len(kept), hyper.noise**2))
    return Hypothesis(
        chance=experience.trust,
        log_predicted=log_predicted,
        points=candidates,
        num_scaled=num_scaled,
        prior=learned,
        past=past,
        placed=of_candidates,
        outliers=outliers and (outliers[0] + len(known) - len(kept), outliers[1] + len(kept)),
    )


def _robust(at: Points, values: FloatArray, prior: HyperPrior, num_scaled: int) -> tuple[IntArray, Hyperparameters]:
    """The observations that are no outliers, and the hyperparameters that they tell.

    An outlier lies by far more than most above what is predicted, or is by far not what all others let expect: runs
    that something slowed down tell nothing of the fastest, and would make the process expect the like everywhere. One
    that is much faster than predicted is kept where others confirm it: a configuration that does well in every job.
    """
    away = values - np.median(values)
    usual = np.flatnonzero(away <= OUTLYING * max(float(np.quantile(np.abs(away), 0.683)), prior.noise))
    process = fit(at.take(usual), values[usual], prior=prior, num_scaled=num_scaled)
    errors, deviations = process.left_out_errors(np.arange(len(usual)))
    away = np.abs(errors) / deviations
    kept = usual[away <= OUTLYING * max(float(np.quantile(away, 0.683)), 1.0)]
    again = fit(at.take(kept), values[kept], prior=prior, num_scaled=num_scaled)
    return kept, again.hyper
