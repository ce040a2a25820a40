"""Sharding plans of the shapes that no leading candidate has, made beside the trials of a run.

The leading shapes are planned before the first trial (`prepare`). A thread then has processes plan the others. Until
then, candidates of these shapes are sharded by hand. The candidates at the end are the same as if all had been planned
before, and so are those of a run that was interrupted and goes on.

Trials that train may do so on this machine, where their steps would take longer beside planning processes. Plans then
take turns with them: some shapes are planned between two trials, while nothing runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tuner.forecast.planned_candidates import OnNote, OnPlanned, plan_rest
from tuner.forecast.prepared import Prepared

PlanRest = Callable[[Prepared, OnPlanned, OnNote], Prepared]
"""Function that plans what is left to plan of a study."""


CHECK_S = 1.0
"""Time between looks whether a run is over [s]."""


class _EndedError(Exception):
    """The run has ended, and nobody waits for the plans."""


class LaterPlans:
    """Plans that are made beside the trials.

    Args:
        prepared: Study; nothing is planned if nothing of it is left to plan.
        plan_rest: Function that plans the rest.
        takes_turns: Whether shapes are planned only while no trial runs.

    Attributes:
        is_busy: Whether plans are being made, or were made and not taken.
        is_due: Whether it is their turn as soon as no trial runs.
        notes: Sentences that were not told yet.
    """

    def __init__(self, prepared: Prepared, plan_rest: PlanRest = plan_rest, *, takes_turns: bool = False) -> None:
        self._prepared, self._plan_rest, self._takes_turns = prepared, plan_rest, takes_turns
        self._turn, self._rest = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._is_over = False
        self._found: Prepared | BaseException | None = None
        self.is_busy, self.is_due = prepared.is_left_to_plan, False
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

    def has_turn(self, timeout_s: float) -> bool:
        """Return whether it is the turn of plans and not of trials, waiting so long for its end [s]."""
        return self.is_busy and self._turn.is_set() and not self._rest.wait(timeout_s)

    def look(self, *, has_ended: bool, runs: bool) -> None:
        """Take the next turn once a trial has ended and no other runs.

        Args:
            has_ended: Whether a trial has ended since the last look.
            runs: Whether others run.
        """
        self.is_due = self._takes_turns and self.is_busy and (self.is_due or has_ended)
        if self.is_due and not runs:
            self.is_due = False
            self._rest.clear()
            self._turn.set()

    def close(self) -> None:
        """End the planning after the shapes that are being planned; the cache of plans keeps what there is."""
        self._is_over = True
        self._turn.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            self._found = self._plan_rest(self._prepared, self._check, self.notes.append)
        except BaseException as error:  # noqa: BLE001 # raised where the plans are taken
            self._found = error
        self._has_ended.set()
        self._rest.set()

    def _check(self, _: int, __: int) -> None:
        """Wait for the next turn.

        Raises:
            _EndedError: The run is over.
        """
        if self._takes_turns and not self._is_over:
            self._turn.clear()
            self._rest.set()
            while not self._turn.wait(CHECK_S) and not self._is_over:
                pass
        if self._is_over:
            raise _EndedError
