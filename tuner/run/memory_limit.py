"""Memory that must stay free in what trials measure: a step that ran but took more counts as one that does not fit."""

from __future__ import annotations

from dataclasses import replace

from trials.backend import Observation, Status
from tuner.search.posterior import Posterior


def hold_to_limit(observation: Observation, capacity_bytes: float, free_memory: float | None) -> Observation:
    """Return the observation, as one of a configuration that does not fit if its peak leaves too little free.

    Args:
        observation: Outcome of a trial at full size.
        capacity_bytes: Memory of a device [bytes].
        free_memory: Share of it that must stay free; None without such a limit.
    """
    peak_bytes = observation.peak_memory_bytes
    if free_memory is None or peak_bytes is None or observation.status is not Status.OK:
        return observation
    if peak_bytes <= (1 - free_memory) * capacity_bytes:
        return observation
    left = max(1 - peak_bytes / capacity_bytes, 0.0)
    reason = f"left {left:.1%} of the memory free, and limits.free_memory is {free_memory:.1%}"
    return replace(observation, status=Status.OUT_OF_MEMORY, reason=reason)


def with_room(posterior: Posterior, free_memory: float | None) -> Posterior:
    """Return the posterior of candidates that may take no more than the limit leaves of a device."""
    if free_memory is None:
        return posterior
    predicted = posterior.predicted
    room_bytes = (1 - free_memory) * predicted.capacity_bytes
    return replace(posterior, predicted=replace(predicted, capacity_bytes=room_bytes))
