"""Memory as a constraint of an Optuna trial: how far its peak is above the memory of a device.

Optuna calls a trial feasible if none of its constraints is above zero. The driver of a study sets the constraint where
memory was measured or ran out. In anybody's own loop `trial.set_constraint("memory", peak_bytes / capacity_bytes - 1)`
tells the sampler that a configuration does not fit.
"""

from __future__ import annotations

from optuna.trial import FrozenTrial

from trials.backend import Observation, Status

MEMORY = "memory"
"""Name of the constraint, as in `FrozenTrial.constraints`."""

MEMORY_ATTRIBUTE = f"constraints:{MEMORY}"
"""System attribute of a trial in which Optuna 5 keeps the constraint (optuna/trial/_trial.py, `set_constraint`)."""

LEAST_EXCESS = 0.01
"""Excess of a trial that ran out of memory below its measured peak, or without one; assumed."""


def memory_excess(observation: Observation, capacity_bytes: float) -> float | None:
    """Return how far the peak of memory is above a device's memory, as a share of it; None where nothing tells.

    It is positive exactly where memory ran out. A trial that ran has fitted, whatever the capacity on paper.

    Args:
        observation: Outcome of a trial at full size.
        capacity_bytes: Memory of a device [bytes].
    """
    peak_bytes = observation.peak_memory_bytes
    excess = None if peak_bytes is None else peak_bytes / capacity_bytes - 1
    if observation.status is Status.OUT_OF_MEMORY:
        return max(excess or 0.0, LEAST_EXCESS)
    return None if excess is None else min(excess, 0.0)


def exceeds_memory(trial: FrozenTrial) -> bool:
    """Return whether a trial's constraint says that it does not fit into memory."""
    return bool(trial.system_attrs.get(MEMORY_ATTRIBUTE, 0.0) > 0)
