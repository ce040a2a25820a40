"""Trial slots that are idle while others run, and the reasons for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SLOTS = "slots"
"""Attribute of a study with the number of its trial slots, and the reason why some are idle, as of the last change."""


class Wait(StrEnum):
    """Reason to wait for trials that run, or for a rehearsal. The value is the sentence."""

    EXHAUSTED = "every candidate is tried or running"
    SETTLED = "what runs may end the search, or change which candidates are measured again"
    REPLICATES = "each of the closest candidates is measured again by one trial at a time"
    PROXIES = "trials at full size wait for what the proxies tell"
    REHEARSAL = "the next candidate is rehearsed first"
    NOTHING_NAMED = "no draw names another candidate, and what runs may settle the search"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Trial slots of a study.

    Attributes:
        count: Number of slots; 0 as long as nobody knows.
        why: Reason why some of them are idle, as a sentence; empty if none is.
    """

    count: int = 0
    why: str = ""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any] | None) -> Slots:
        """Return the slots that a study's attribute names; nothing is known without it."""
        return cls() if stored is None else cls(count=int(stored["count"]), why=str(stored["why"]))

    def state_of(self, in_flight: int) -> dict[str, Any]:
        """Return the number of slots, and why so many trials leave some idle, under the keys of a command's JSON."""
        return {"slots": self.count, "idle_because": self.why if self.in_words(in_flight) else None}

    def in_words(self, in_flight: int) -> str:
        """Return a sentence on the slots that so many trials leave idle; empty if nothing is known of them."""
        idle = self.count - in_flight
        return f"{idle} of {self.count} slots idle: {self.why}" if idle > 0 and self.why else ""
