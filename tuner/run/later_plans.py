"""Sharding plans of the shapes that no leading candidate has, made beside the trials of a run.

The leading shapes are planned before the first trial (`prepare`). A thread then has processes plan the others. Until
then, candidates of these shapes are sharded by hand. The candidates at the end are the same as if all had been planned
before, and so are those of a run that was interrupted and goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tuner.forecast.planned_candidates import OnNote, OnPlanned, plan_rest
from tuner.forecast.prepared import Prepared

PlanRest = Callable[[Prepared, OnPlanned, OnNote], Prepared]
"""Function that plans what is left to plan of a study."""


class _EndedError(Exception):
    """The run has ended, and nobody waits for the plans."""


class LaterPlans:
    """Plans that are made beside the trials.

    Args:
        prepared: Study; nothing is planned if nothing of it is left to plan.
        plan_rest: Function that plans the rest.

    Attributes:
        is_busy: Whether plans are being made, or were made and not taken.
        notes: Sentences that were not told yet.
    """

    def __init__(self, prepared: Prepared, plan_rest: PlanRest = plan_rest) -> None:
        self._prepared, self._plan_rest = prepared, plan_rest
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._is_over = False
        self._found: Prepared | BaseException | None = None
        self.is_busy = prepared.is_left_to_plan
        self.notes: list[str] = []

    def begin(self) -> None:
        """Begin to plan, if there is something left."""
        if self.is_busy:
            self._thread = threading.Thread(target=self._run, name="later plans", daemon=True)
            self._thread.start()

    def take(self, timeout_s: float = 0.0) -> Prepared | None:
        """Return the study with all of its plans once they are there, waiting so long for them [s]; else None."""
        if not self.is_busy or not self._has_ended.wait(timeout_s):
            return None
        self.is_busy = False
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def close(self) -> None:
        """End the planning after the shapes that are being planned; the cache of plans keeps what there is."""
        self._is_over = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            self._found = self._plan_rest(self._prepared, self._check, self.notes.append)
        except BaseException as error:  # noqa: BLE001 # raised where the plans are taken
            self._found = error
        self._has_ended.set()

    def _check(self, _: int, __: int) -> None:
        if self._is_over:
            raise _EndedError
