"""Configuration that the trials of a study are told relative to: its reference, or else its first trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodels.job.parallel_config import Value
from tuner.answers.reference import Reference
from tuner.storage.record import TrialRecord, step_time_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Configuration that others are compared with.

    Attributes:
        name: Name of the configuration: `current`, `baseline`, or the number of a trial.
        values: Value of each dimension of a candidate.
        step_time_s: Measured step time [s]; None without one.
    """

    name: str
    values: Mapping[str, Value]
    step_time_s: float | None

    def differences(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Return the values of a configuration that differ, by dimension; empty for the same configuration."""
        return {name: value for name, value in values.items() if value != self.values.get(name)}

    def speedup(self, step_time_s: float | None) -> float | None:
        """Return how many times as fast a step is; None without both step times."""
        return self.step_time_s / step_time_s if self.step_time_s and step_time_s else None


def comparison_of(reference: Reference | None, records: Sequence[TrialRecord]) -> Comparison | None:
    """Return the configuration to compare with; None where there is neither a reference nor a trial."""
    if reference is not None:
        return Comparison(name=reference.role, values=reference.values, step_time_s=reference.step_time_s(records))
    if not records:
        return None
    first = records[0]
    return Comparison(
        name=f"trial {first.number}", values=first.params, step_time_s=step_time_of(records, first.params)
    )
