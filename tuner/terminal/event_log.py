"""Progress of a run as a log for programs: one JSON object on a line for each event, on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

from trials.backend import Status
from tuner.run.progress import Progress
from tuner.storage.record import TrialRecord
from tuner.study_file.request import StudyRequest
from tuner.terminal.progress import ALIVE_S


class EventLog:
    """Writer of a run's events.

    Every event has `time_s`, seconds since the epoch, `event` and `study`. Events are `opening` (the first trial),
    `next` (a later one was asked for, with what the draws say of it), `note`, `trial` (one has ended), `state` (after
    trials, and at least once a minute), `interrupted`, `warning` and `end`; whatever else is printed is `message` (see
    `EventLines`).
    """

    def __init__(
        self,
        request: StudyRequest,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._name = request.name
        self._write = write or _write_line
        self._clock, self._wall_clock = clock, wall_clock
        self._told_s = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing open."""

    def tell(self, event: str, **details: Any) -> None:
        """Write an event."""
        self._write(json.dumps({"time_s": self._wall_clock(), "event": event, "study": self._name, **details}))

    def show(self, progress: Progress) -> None:
        """Write what is new in the run's progress."""
        if progress.opening is not None:
            opening = progress.opening
            self.tell(
                "opening",
                config=dict(opening.values),
                why=opening.why.value,
                predicted_s=opening.predicted_s,
                is_proxy=opening.is_proxy,
            )
        if progress.chosen is not None:
            self.tell(
                "next",
                trial=progress.chosen.number,
                config=dict(progress.chosen.values),
                is_proxy=progress.chosen.is_proxy,
                **asdict(progress.chosen.prospect),
            )
        if progress.note:
            self.tell("note", note=progress.note)
        for record in progress.ended:
            self.tell("trial", **_described(record))
        if progress.opening is None and not progress.note and (progress.ended or self._is_silent()):
            self._told_s = self._clock()
            self.tell("state", **state_of(progress))

    def show_interrupt(self) -> None:
        """Write that an interrupt has come."""
        self.tell("interrupted")

    def _is_silent(self) -> bool:
        return self._clock() - self._told_s >= ALIVE_S


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def state_of(progress: Progress) -> dict[str, Any]:
    """Return the state of a run under the keys of JSON."""
    return {
        "trials": progress.done,
        "by_status": dict(progress.by_status),
        "running": progress.running,
        "queued": progress.queued,
        **progress.slots.state_of(progress.running + progress.queued),
        "budget": progress.budget,
        "best_step_time_s": progress.best.step_time_s if progress.best else None,
        "p_star": progress.p_star,
        "device_hours": progress.device_hours,
        "seconds_left": progress.seconds_left,
        "device_hours_left": progress.device_hours_left,
    }


def _described(record: TrialRecord) -> dict[str, Any]:
    seen = record.observation
    return {
        "trial": record.number,
        "config": record.params,
        "status": (record.status or Status.CANCELLED).value,
        "step_time_s": record.step_time_s,
        "is_proxy": record.is_proxy,
        "reason": seen.reason if seen else "",
        "elapsed_s": seen.elapsed_s if seen else None,
    }
