"""Progress of runs and calibrations on stderr: a live bar on a terminal, lines elsewhere.

A line is printed whenever a trial or call has ended, and at least every `ALIVE_S`, so that a log shows that the program
is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from trials.backend import CLOCK_WORDS
from tuner.calibrate.device_results import CalibrationProgress
from tuner.run.loop import Progress
from tuner.study_file.config import StudyConfig

ALIVE_S = 60.0
"""Longest time between two lines of a log while trials or calls run [s]."""


def _bar(console: Console) -> Bar:
    """Make a progress bar with counts, state and elapsed time; it is disabled without a terminal."""
    return Bar(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class _Line:
    """Progress bar on a terminal while the `with` block lasts; lines elsewhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = _bar(self._console)
        self._clock_s = clock
        self._said_s = clock()

    def _say(self, line: str) -> None:
        """Print a line unless stderr is a terminal, which shows the bar."""
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)
            self._said_s = self._clock_s()

    def _is_silent(self) -> bool:
        """Check whether the last line is at least `ALIVE_S` old."""
        return self._clock_s() - self._said_s >= ALIVE_S

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class CalibrationLine(_Line):
    """Progress of a device calibration: number of measured calls, and the latest of them."""

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._task = self._bar.add_task(device, total=None, state="starting")
        self._known: int | None = None

    def show(self, progress: CalibrationProgress) -> None:
        """Show the calibration's progress."""
        self._bar.update(self._task, completed=progress.done, total=progress.planned, state=progress.now)
        if self._known is None:
            self._known = progress.done
            self._say(f"{progress.planned} calls to measure, {progress.done} of them known already")
        elif self._is_silent():
            self._say(f"measured {progress.done} of {progress.planned} calls")


class PlanningLine(_Line):
    """Progress of planning layers: number of planned shapes; without a terminal one line per quarter."""

    def __init__(self) -> None:
        super().__init__()
        self._task = self._bar.add_task("planning layers", total=None, state="")
        self._told = -1

    def show(self, done: int, count: int) -> None:
        """Show that `done` of `count` shapes are planned."""
        self._bar.update(self._task, completed=done, total=count)
        quarter = 4 * done // max(count, 1)
        if quarter > self._told:
            self._told = quarter
            self._say(f"planned {done} of {count} layer shapes")


class ProgressLine(_Line):
    """Progress of a run: trials done, best step time, confidence, and what is left of its time budgets."""

    def __init__(self, config: StudyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        told_by = config.backend.clock
        self._clock = "" if told_by == "wall" else f" ({CLOCK_WORDS[told_by]})"
        self._task = self._bar.add_task(config.name, total=config.search.max_trials, state="starting")
        self._lines_shown = 0
        self._say(f"{config.name}: starting")

    def show(self, progress: Progress) -> None:
        """Show the run's progress."""
        if progress.note:
            self._console.print(f"note: {progress.note}", soft_wrap=True)
        state = self._state(progress)
        self._bar.update(self._task, completed=progress.done, total=progress.budget, state=state)
        if progress.done > self._lines_shown or self._is_silent():
            self._lines_shown = progress.done
            self._say(f"{progress.done}/{progress.budget} trials, {state}")

    def _state(self, progress: Progress) -> str:
        best = progress.best
        parts = [f"best {best.step_time_s:.4g} s{self._clock}" if best is not None else "no result yet"]
        if best is None and progress.extrapolated is not None:
            parts = [f"best {progress.extrapolated.step_time_s:.4g} s, {progress.extrapolated.in_words}"]
        parts.append(f"confidence {progress.p_star:.2f}")
        if progress.running:
            parts.append(f"{progress.running} running")
        if progress.seconds_left is not None:
            parts.append(f"{progress.seconds_left:.0f} s left")
        if progress.device_hours_left is not None:
            parts.append(f"{progress.device_hours_left:,.3g} device-hours left")
        return ", ".join(parts)
