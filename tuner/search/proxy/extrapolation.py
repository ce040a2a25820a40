"""Answer of a study that has run proxy jobs only: its fastest candidate by extrapolation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from costmodels.job.parallel_config import Value

EXTRAPOLATED = "extrapolated"
"""Study attribute with the `Extrapolated` after the last finished trial, as `as_json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolated:
    """Candidate with the shortest step in the median of the draws, while no full-size trial supports it.

    Attributes:
        config: Dimensions that identify the candidate.
        step_time_s: Step time, the median of the draws [s].
        trials: Number of proxies that measured a step.
        devices: Number of devices of the largest of them.
    """

    config: dict[str, Value]
    step_time_s: float
    trials: int
    devices: int

    def as_json(self) -> dict[str, Any]:
        """Return the answer as the study keeps it."""
        return asdict(self)

    @property
    def in_words(self) -> str:
        """Origin of the step time, in words."""
        return f"extrapolated from {self.trials:,} trial{'' if self.trials == 1 else 's'} on {self.devices:,} devices"


def extrapolated_of(attributes: Mapping[str, Any]) -> Extrapolated | None:
    """Return the answer among a study's attributes; None where no proxy has measured a step."""
    stored = attributes.get(EXTRAPOLATED)
    return Extrapolated(**stored) if stored else None
