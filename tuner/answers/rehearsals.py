"""Rehearsals of a study's candidates as its storage keeps them, for people and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.storage.rehearsals import KeptRehearsal, read_rehearsals
from tuner.study_file.request import StudyRequest

ACCEPTED, REFUSED, UNKNOWN = "accepted", "refused", "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldRehearsal:
    """What a rehearsal told of a candidate.

    Attributes:
        config: Values that identify the candidate.
        verdict: `accepted`, `refused` or `unknown`.
        words: Words of the framework about what it refused, or why nothing is known; empty where it was accepted.
        is_too_large: Whether it was accepted, and needs more memory than its devices have.
    """

    config: Mapping[str, Any]
    verdict: str
    words: str = ""
    is_too_large: bool = False

    @property
    def in_words(self) -> str:
        """Clause on why it is not tried; empty if it may be."""
        if self.verdict == REFUSED:
            return f"refused in rehearsal: {self.words}"
        return "too large in rehearsal" if self.is_too_large else ""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {
            "config": dict(self.config),
            "verdict": self.verdict,
            "error": self.words or None,
            "too_large": self.is_too_large,
        }


def told_rehearsals(request: StudyRequest) -> list[ToldRehearsal]:
    """Return what the rehearsals of a study told, as far as its storage holds them.

    Raises:
        ConfigError: The storage cannot be read.
    """
    return list(filter(None, map(_told, read_rehearsals(request.storage, request.name))))


def _told(kept: KeptRehearsal) -> ToldRehearsal | None:
    """Return one answer; None if it is not of this version's form."""
    answer = kept.answer
    verdict, where = answer.get("verdict"), answer.get("where")
    if verdict not in (ACCEPTED, REFUSED, UNKNOWN):
        return None
    first = str(answer.get("error") or "").strip().partition("\n")[0]
    needed, of = answer.get("needed_bytes"), answer.get("of_bytes")
    return ToldRehearsal(
        config=kept.config,
        verdict=verdict,
        words=f"{first} ({where[-1]})" if first and isinstance(where, list) and where else first,
        is_too_large=isinstance(needed, int) and isinstance(of, int) and needed > of,
    )


def rehearsals_in_words(told: Sequence[ToldRehearsal]) -> str:
    """Return a sentence on how many candidates were rehearsed, and what came of it; empty without any."""
    if not told:
        return ""
    counts = {
        verdict: sum(one.verdict == verdict and not one.is_too_large for one in told)
        for verdict in (ACCEPTED, REFUSED, UNKNOWN)
    }
    parts = [f"{counts[REFUSED]} refused", f"{sum(one.is_too_large for one in told)} too large"]
    parts += [f"{counts[UNKNOWN]} unknown"] if counts[UNKNOWN] else []
    return f"Rehearsed {len(told):,} candidates: {counts[ACCEPTED]} accepted, {', '.join(parts)}."
