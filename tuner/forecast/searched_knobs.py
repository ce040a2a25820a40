"""Knobs of a study with the priors of their effects on its candidates."""

from __future__ import annotations

from costmodels.step.breakdown import BREAKDOWN
from tuner.forecast.candidates import Candidates
from tuner.knobs.effects import predict, prior_of
from tuner.search.knobs.knob_prior import KnobPrior
from tuner.search.knobs.knob_space import KnobSpace, knob_space
from tuner.subject.problem import Problem


def known_effects(problem: Problem, candidates: Candidates) -> dict[str, KnobPrior]:
    """Return what is known of the effects of a study's known knobs, by name."""
    if not problem.known_knobs:
        return {}
    predicted = predict(problem.setting, candidates.space.grid)
    knobs = {knob.name: knob for knob in problem.knobs}
    return {known.name: prior_of(known, knobs[known.name], predicted) for known in problem.known_knobs}


def searched_knobs(problem: Problem, candidates: Candidates) -> KnobSpace | None:
    """Return the knobs of a study beside its layouts; None if it has none."""
    if not problem.knobs:
        return None
    estimate = candidates.estimate
    shares = {part: estimate.breakdown_s[part] / estimate.step_time_s for part in BREAKDOWN}
    priors = known_effects(problem, candidates)
    return knob_space(
        problem.knobs, candidates.space.grid, candidates.features, shares, estimate.step_time_s, priors=priors
    )
