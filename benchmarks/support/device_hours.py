"""Device-hours of a trial whose steps alone are known."""

from __future__ import annotations

from hardware.time_units import HOUR_S
from trials.backend import Observation

STEPS = 7
"""Number of steps of a trial: two to warm up and five that are measured, as by default of trials with a command."""


def device_hours(outcome: Observation, devices: int, startup_s: float) -> float:
    """Return the device-hours of a trial, of which a failed one has the start alone, `startup_s` [s]."""
    return devices * (startup_s + STEPS * (outcome.step_time_s or 0.0)) / HOUR_S
