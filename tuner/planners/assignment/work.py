"""Work of a search, counted in place of time: equal seeds then take equal ways, on every machine.

A unit is one entry of a table that NumPy goes through, about 6 ns on a core of a server of 2023. A call of a NumPy
function on a small table costs as much as many entries.
"""

from __future__ import annotations

from collections.abc import Callable

from tuner.planners.engine.outcome import Limits

CALL = 5_000
"""Work of visiting a group of variables, or of adding a term: the calls of NumPy functions and Python's own time."""

_TO_FINISH_S, _TO_FINISH_SHARE = 0.5, 0.01
"""Time reserved for the last checks: seconds, and a fraction of the limit, beside twice the longest step so far."""


class Meter:
    """Meter of the work, and of the limits at which a search ends.

    Attributes:
        steps: Number of sweeps and moves so far.
        work: Work of all of them.
        is_over: Whether a limit has been reached.
    """

    def __init__(
        self, limits: Limits, start_s: float, is_stopped: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        """Begin to count."""
        self._limits, self._is_stopped, self._start_s, self._clock = limits, is_stopped, start_s, clock
        self._end_s = start_s + (1.0 - _TO_FINISH_SHARE) * limits.time_s - _TO_FINISH_S
        self._last_s, self._longest_s = clock(), 0.0
        self.steps, self.work = 0, 0.0
        self.is_over = False

    @property
    def seconds(self) -> float:
        """Time since the start [s]."""
        return self._clock() - self._start_s

    def phase(self, work: float) -> Callable[[float], float]:
        """Begin a phase of some work; return the function that counts a step's work and tells the fraction spent.

        The function must be called once per step. Everything counts as spent once a limit is reached.
        """
        begin = self.work
        # Time between phases belongs to no step.
        self._last_s = self._clock()

        def spent(step_work: float) -> float:
            """Count one step, and return the fraction of the phase that is spent."""
            now_s = self._clock()
            self._longest_s, self._last_s = max(self._longest_s, now_s - self._last_s), now_s
            self.steps += 1
            self.work += step_work
            # Another step may take as long as the longest one so far, twice for safety.
            is_late = now_s + 2.0 * self._longest_s >= self._end_s
            self.is_over = self.is_over or is_late or self.steps >= self._limits.nodes or self._is_stopped()
            return 1.0 if self.is_over else min(1.0, (self.work - begin) / work)

        return spent
