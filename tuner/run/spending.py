"""Budgets of wall time and device-hours, which also end the trials in flight once they are used up."""

from __future__ import annotations

from collections.abc import Callable

from hardware.time_units import HOUR_S
from tuner.run.executor import Executor
from tuner.search.stopping import Budgets, StopReason
from tuner.study_file.study_keys import SearchOptions

HARD_BUDGETS = (StopReason.MINUTES, StopReason.DEVICE_HOURS)
"""Budgets that end what runs, too."""


class Spending:
    """Budgets of a study, and the parts of them that trials in flight use.

    Args:
        options: Options of the search, with the budgets.
        occupies_devices: Whether trials occupy their devices as long as they run; otherwise only their steps count.

    Attributes:
        used_up: Budget that the trials in flight have used up; None if there is something left.
    """

    def __init__(self, options: SearchOptions, *, occupies_devices: bool) -> None:
        self._options, self._occupies_devices = options, occupies_devices
        # Moments at which trials that run were first seen to run [s since the start of the study].
        self._since_s: dict[int, float] = {}
        self.used_up: StopReason | None = None

    def left(self, elapsed_s: float, device_s: float) -> Budgets:
        """Return the rest of all budgets.

        Args:
            elapsed_s: Time that the study has run, in all its runs [s].
            device_s: Device time of the trials that have ended [device s].
        """
        options = self._options
        minutes, hours = options.max_minutes, options.budget_device_hours
        return Budgets(
            max_trials=options.max_trials,
            seconds_left=None if minutes is None else max(60 * minutes - elapsed_s, 0.0),
            device_hours_left=None if hours is None else max(hours - device_s / HOUR_S, 0.0),
        )

    def look(self, running: Executor, elapsed_s: float, device_s: float, devices_of: Callable[[int], int]) -> None:
        """Note which trials run, and whether they have used up a budget.

        Args:
            running: Executor of the trials.
            elapsed_s: Time that the study has run, in all its runs [s].
            device_s: Device time of the trials that have ended [device s].
            devices_of: Function that returns the number of devices that a trial in flight occupies, given its number.
        """
        pending, waiting = running.pending, frozenset(running.queued)
        for number in self._since_s.keys() - set(pending):
            del self._since_s[number]
        for number in pending:
            if number not in waiting:
                self._since_s.setdefault(number, elapsed_s)
        left = self.left(elapsed_s, device_s)
        if left.device_hours_left is not None:
            in_flight_s = sum(devices_of(number) * self._own_s(running, number, elapsed_s) for number in self._since_s)
            if in_flight_s >= left.device_hours_left * HOUR_S:
                self.used_up = StopReason.DEVICE_HOURS
        if left.seconds_left == 0:
            self.used_up = StopReason.MINUTES

    def _own_s(self, running: Executor, number: int, elapsed_s: float) -> float:
        """Return how long a trial has occupied its devices so far [s]."""
        return elapsed_s - self._since_s[number] if self._occupies_devices else sum(running.reported.get(number, ()))
