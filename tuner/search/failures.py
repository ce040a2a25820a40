"""What the failures of a study taught, in sentences that stand on the study for whoever reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

LEARNED = "learned"
"""Study attribute: the lessons, as a list of `Lesson.as_json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """One conclusion from failed trials.

    Attributes:
        kind: What failed: memory that ran out, crashes, or the limit of time.
        text: What follows from it, as a sentence.
    """

    kind: Literal["memory", "crash", "timeout"]
    text: str

    def as_json(self) -> dict[str, str]:
        """The lesson as the study keeps it."""
        return {"kind": self.kind, "text": self.text}


def lessons_of(attributes: Mapping[str, Any]) -> tuple[Lesson, ...]:
    """The lessons among a study's attributes."""
    return tuple(Lesson(**entry) for entry in attributes.get(LEARNED, ()))
