"""Trials of a study as the process that drives it knows them, so that its sampler need not walk over all of them.

Trials that have ended never change, and stand in the order in which they ended. A reader that has read the first of
them reads the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from optuna.trial import FrozenTrial


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Standing:
    """All trials of a study.

    Attributes:
        ended: Trials that have ended, in the order of their ends; it only grows.
        running: Trials that have not ended, by number.
    """

    ended: list[FrozenTrial]
    running: dict[int, FrozenTrial]


@runtime_checkable
class KnowsStanding(Protocol):
    """Study whose process knows all its trials."""

    @property
    def standing(self) -> Standing:
        """Trials of the study."""
