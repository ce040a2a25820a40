"""Knobs of a study with the priors of their effects on its candidates."""

from __future__ import annotations

from costmodels.step.breakdown import BREAKDOWN
from tuner.answers.candidates import Candidates
from tuner.search.knobs.knob_space import KnobSpace, knob_space
from tuner.study_file.config import StudyConfig


def searched_knobs(config: StudyConfig, candidates: Candidates) -> KnobSpace | None:
    """Return the knobs of a study beside its layouts; None if it has none."""
    if not config.knobs:
        return None
    estimate = candidates.estimate
    shares = {part: estimate.breakdown_s[part] / estimate.step_time_s for part in BREAKDOWN}
    return knob_space(config.knobs, candidates.space.grid, candidates.features, shares, estimate.step_time_s)
