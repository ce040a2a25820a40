"""Trial that was asked for, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from costmodels.job.parallel_config import Value
from tuner.search.prospect import Prospect


@dataclass(frozen=True, kw_only=True, slots=True)
class NextTrial:
    """Trial that was asked for.

    Attributes:
        number: Number of the trial.
        values: Value of each dimension of its candidate.
        is_proxy: Whether a smaller job runs in place of the candidate.
        prospect: What the sampler's draws say of it.
    """

    number: int
    values: Mapping[str, Value]
    is_proxy: bool
    prospect: Prospect
