"""Listen to the ranks of one trial until they have ended, hang, or have had time to explain a failure."""

from __future__ import annotations

import math
import time
from typing import Protocol

from trials.ranks.contract import AbstractRanks
from trials.ranks.messages import Exit, Told


class AbstractListener(Protocol):
    """Observer of one trial, which takes the events of its ranks and says when enough is known."""

    @property
    def is_enough(self) -> bool:
        """Whether the trial needs no further events."""

    @property
    def is_ending(self) -> bool:
        """Whether a rank has ended or failed, so that the others get only the time of grace."""

    def take(self, event: Told | Exit) -> None:
        """Note one event."""


def listen(ranks: AbstractRanks, listener: AbstractListener, *, hang_limit_s: float, grace_s: float) -> bool:
    """Pass the events of all ranks to a listener, and return whether the ranks hang.

    It returns when all ranks have ended, when the listener needs no more, when the ranks were silent for the hang
    limit, or when the time of grace is over.

    Args:
        ranks: Launched ranks; those that still run afterwards are for the caller to end.
        listener: Observer that takes the events.
        hang_limit_s: Silence of all ranks that means a hang [s].
        grace_s: Time that ranks have to explain themselves once the listener says that the trial is ending [s].

    Raises:
        RanksLostError: The ranks can no longer be reached.
    """
    silent_until_s, closing_s = time.monotonic() + hang_limit_s, math.inf
    while ranks.running and not listener.is_enough:
        left_s = min(silent_until_s, closing_s) - time.monotonic()
        if closing_s < math.inf and left_s <= 0:
            return False
        events = ranks.events(max(left_s, 0.0))
        if events:
            silent_until_s = time.monotonic() + hang_limit_s
        elif time.monotonic() >= silent_until_s:
            return True
        for event in events:
            listener.take(event)
        if listener.is_ending and closing_s == math.inf:
            closing_s = time.monotonic() + grace_s
    return False
