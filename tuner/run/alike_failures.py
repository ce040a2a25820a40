"""Failures that are alike: the sign that the command fails whatever the layout.

A study in which nothing has ever run ends after ENOUGH failures in a row that are alike, since the next ones would end
as they did. These failures say nothing about their candidates. The last of them keeps all their numbers as its
attribute `fails_alike` (tuner/search/observations.py), and the same study goes on as if they had not been, once the
command is mended. It ends at once if its next trial fails alike again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from trials.backend import Observation, Status

ENOUGH = 3
"""Number of failures in a row that are enough."""

_VARYING = re.compile(r"\S*\d\S*")
"""Words that may differ between failures of the same cause: numbers, ports, dates, addresses, random names."""


def alike_failures(ended: Sequence[tuple[int, Observation]]) -> tuple[int, ...]:
    """Return the numbers of the latest trials if the command fails whatever the layout; else an empty tuple.

    Args:
        ended: Numbers and observations of all trials of a study that have ended, in the order of their ends.
    """
    if any(observation.step_times_s for _, observation in ended):
        return ()
    kinds = [(number, _kind_of(seen)) for number, seen in reversed(ended) if seen.status is not Status.CANCELLED]
    if not kinds or kinds[0][1] is None:
        return ()
    row = [number for number, _ in takewhile(lambda each: each[1] == kinds[0][1], kinds)]
    return tuple(reversed(row)) if len(row) >= ENOUGH else ()


def _kind_of(observation: Observation) -> tuple[Status, str] | None:
    """Return the kind of a failure; None if memory may be the reason, because another layout may need less."""
    # SIGKILL is how a lack of the host's memory ends a process
    if observation.status is Status.OUT_OF_MEMORY or observation.killed_by == "SIGKILL":
        return None
    return observation.status, " ".join(_VARYING.sub("#", observation.reason).split())
