"""Shows how far a run or a calibration is on stderr: a live bar on a terminal, lines elsewhere.

Lines come when something has ended, and at least once in `ALIVE_S`, so that a log shows that the program lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from trials.backend import CLOCK_WORDS
from tuner.calibrate.device_results import CalibrationProgress
from tuner.run.loop import Progress
from tuner.study_file.config import StudyConfig

ALIVE_S = 60.0
"""How long a log goes without a line while trials or calls run."""


def _bar(console: Console) -> Bar:
    """How many are done, in what state, and for how long it has taken; nothing where no terminal is."""
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
    """A bar on a terminal, while the block lasts; elsewhere lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = _bar(self._console)
        self._clock_s = clock
        self._said_s = clock()

    def _say(self, line: str) -> None:
        """Prints a line where no terminal is."""
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)
            self._said_s = self._clock_s()

    def _is_silent(self) -> bool:
        """Whether there has been no line for long."""
        return self._clock_s() - self._said_s >= ALIVE_S

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()


class CalibrationLine(_Line):
    """Calls measured, and which one was last; without a terminal a line at the start, and then now and then."""

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._task = self._bar.add_task(device, total=None, state="starting")
        self._known: int | None = None

    def show(self, progress: CalibrationProgress) -> None:
        """Draws how far the calibration is."""
        self._bar.update(self._task, completed=progress.done, total=progress.planned, state=progress.now)
        if self._known is None:
            self._known = progress.done
            self._say(f"{progress.planned} calls to measure, {progress.done} of them known")
        elif self._is_silent():
            self._say(f"measured {progress.done} of {progress.planned} calls")


class PlanningLine(_Line):
    """Shapes of layers that are planned, and how many there are; without a terminal a line for each quarter."""

    def __init__(self) -> None:
        super().__init__()
        self._task = self._bar.add_task("planning layers", total=None, state="")
        self._told = -1

    def show(self, done: int, count: int) -> None:
        """Draws how far it is."""
        self._bar.update(self._task, completed=done, total=count)
        quarter = 4 * done // max(count, 1)
        if quarter > self._told:
            self._told = quarter
            self._say(f"planned {done} of {count} shapes of layers")


class ProgressLine(_Line):
    """Trials done, best so far, p_star, and the seconds left of a budget of time."""

    def __init__(self, config: StudyConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        told_by = config.backend.clock
        self._clock = "" if told_by == "wall" else f" ({CLOCK_WORDS[told_by]})"
        self._task = self._bar.add_task(config.name, total=config.search.max_trials, state="starting")
        self._lines_shown = 0
        self._say(f"{config.name}: starting")

    def show(self, progress: Progress) -> None:
        """Draws where the run stands."""
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
        parts.append(f"p_star {progress.p_star:.2f}")
        if progress.running:
            parts.append(f"{progress.running} running")
        if progress.seconds_left is not None:
            parts.append(f"{progress.seconds_left:.0f} s left")
        if progress.device_hours_left is not None:
            parts.append(f"{progress.device_hours_left:,.3g} device-hours left")
        return ", ".join(parts)
