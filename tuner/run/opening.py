"""First trial of a run, and the reason why it comes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from costmodels.job.parallel_config import Value
from tuner.answers.reference import Reference
from tuner.search.observations import Observations
from tuner.search.sampler import ThompsonSampler


class Why(StrEnum):
    """Reason why a trial comes first."""

    CURRENT = "current"
    """It is the configuration in use today."""
    BASELINE = "baseline"
    """It is the configuration that an engineer would write by hand."""
    PREDICTED = "predicted"
    """It is the most promising one by the predictions."""
    LEARNED = "learned"
    """It is the most promising one by what earlier trials taught."""
    CLOSE = "close"
    """It is measured again, because the fastest are too close to tell apart."""
    LEFT_OVER = "left_over"
    """An earlier driver of the study left it unfinished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """First trial of a run.

    Attributes:
        values: Value of each dimension of its candidate.
        why: Reason why it comes first.
        predicted_s: Step time that the cost model predicts [s].
        is_proxy: Whether a smaller job runs in place of the candidate.
    """

    values: Mapping[str, Value]
    why: Why
    predicted_s: float
    is_proxy: bool


def reason_for(
    position: int,
    values: Mapping[str, Value],
    sampler: ThompsonSampler,
    observations: Observations,
    reference: Reference | None,
) -> Why:
    """Return why a sampler chooses a candidate.

    Args:
        position: Position of the candidate that it chooses.
        values: Value of each of the candidate's dimensions.
        sampler: Sampler of the study.
        observations: Observations that the choice follows from.
        reference: Configuration that the study is compared with.
    """
    if sampler.decide(observations).replicate == position:
        return Why.CLOSE
    if observations.num_decisions:
        return Why.LEARNED
    return Why(reference.role) if reference and dict(reference.values) == dict(values) else Why.PREDICTED
