"""Conclusions from the failures of a study: sentences that stand on the study for its reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

LEARNED = "learned"
"""Study attribute with the conclusions, as a list of `FailureConclusion.as_json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConclusion:
    """Conclusion from failed trials.

    Attributes:
        kind: Kind of failure: memory that ran out, crashes, or the limit of time.
        text: Sentence that says what follows from the failures.
    """

    kind: Literal["memory", "crash", "timeout"]
    text: str

    def as_json(self) -> dict[str, str]:
        """Return the conclusion as the study keeps it."""
        return {"kind": self.kind, "text": self.text}


def failure_conclusions(attributes: Mapping[str, Any]) -> tuple[FailureConclusion, ...]:
    """Return the conclusions among a study's attributes."""
    return tuple(FailureConclusion(**entry) for entry in attributes.get(LEARNED, ()))
