"""Progress of runs and calibrations on stderr: a live line on a terminal, plain lines elsewhere.

A line is printed whenever a trial or call has ended, and at least every `ALIVE_S`, so that a log shows that the program
is alive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from hardware.rounding import measured, predicted
from trials.backend import CLOCK_WORDS
from tuner.answers.comparison import Comparison
from tuner.calibrate.device_results import CalibrationProgress
from tuner.run.progress import InFlight, Progress
from tuner.study_file.request import StudyRequest
from tuner.terminal.console import printable, short_layout
from tuner.terminal.trial_words import last_log_lines, next_line, opening_line, state_line, trial_line

MOST_IN_FLIGHT = 8
"""Number of trials in flight that are shown one by one."""

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


def _state_bar(console: Console, *, with_elapsed: bool) -> _TrialsBar:
    """Make a line of state, cut at the terminal's width, with the elapsed time or not; disabled without a terminal."""
    state = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return _TrialsBar(
        SpinnerColumn(),
        TextColumn("{task.fields[state]}", table_column=state, markup=False),
        *([TimeElapsedColumn()] if with_elapsed else []),
        console=console,
        expand=True,
        disable=not console.is_terminal,
    )


class _TrialsBar(Bar):
    """Line of state with a table of the trials in flight below it, on a terminal."""

    in_flight: tuple[InFlight, ...] = ()
    """Trials to show."""

    def show(self, in_flight: tuple[InFlight, ...]) -> None:
        """Show these trials, at once if they are others than before: a line that is printed draws the table again."""
        are_others = [one.number for one in in_flight] != [one.number for one in self.in_flight]
        self.in_flight = in_flight
        if are_others:
            self.refresh()

    def stop(self) -> None:
        """End the display, of which the last line of state stays."""
        self.in_flight = ()
        super().stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the line and, while trials run, the table, as rich asks for it."""
        yield from super().get_renderables()
        if self.in_flight:
            yield _table_of(self.in_flight)


def _table_of(in_flight: Sequence[InFlight]) -> Table:
    """Make the table of trials in flight; each is one line, cut at the terminal's width."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("trial", "predicted", "steps", "last step", "for"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("configuration", no_wrap=True, overflow="ellipsis")
    for one in in_flight[:MOST_IN_FLIGHT]:
        table.add_row(
            str(one.number),
            "-" if one.predicted_s is None else f"{predicted(one.predicted_s)} s",
            str(len(one.steps_s)) if one.steps_s else "-",
            f"{measured(one.steps_s[-1])} s" if one.steps_s else "-",
            "in the queue" if one.is_queued else str(timedelta(seconds=int(one.since_s))),
            Text(printable(short_layout(one.values))),
        )
    if len(in_flight) > MOST_IN_FLIGHT:
        table.add_row("", "", "", "", "", f"and {len(in_flight) - MOST_IN_FLIGHT:,} more")
    return table


class _Line:
    """Progress bar on a terminal while the `with` block lasts; lines elsewhere."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, make_bar: Callable[[Console], Bar] | None = None
    ) -> None:
        # FORCE_COLOR and the like would bring control characters into logs
        self._console = Console(stderr=True, highlight=False, force_terminal=sys.stderr.isatty())
        self._bar = (make_bar or _bar)(self._console)
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


class SizesLine(_Line):
    """Progress of predicting sizes of clusters: their number; without a terminal a line for each minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._task = self._bar.add_task("predicting sizes", total=None, state="")

    def show(self, done: int, count: int) -> None:
        """Show that `done` of `count` sizes are predicted."""
        self._bar.update(self._task, completed=done, total=count)
        if self._is_silent():
            self._say(f"predicted {done} of {count} sizes")


class ProgressLine(_Line):
    """Progress of a run: its first trial, a line for each ended trial, and below them the state of the run.

    A terminal has one line of state and a table of the trials in flight, which are kept up to date. Elsewhere there is
    a line of state after each line of a trial.
    """

    def __init__(self, request: StudyRequest, clock: Callable[[], float] = time.monotonic) -> None:
        # a budget's rest tells the time as well, and leaves room for what runs
        super().__init__(clock, partial(_state_bar, with_elapsed=request.search.max_minutes is None))
        told_by = request.trials.backend.clock
        self._clock = "" if told_by == "wall" else f" ({CLOCK_WORDS[told_by]})"
        self._task = self._bar.add_task(request.name, total=None, state=f"{request.name}: starting")
        self._compared: Comparison | None = None
        self._log_shown: tuple[str, ...] = ()
        self._name = request.name
        self._confidence = request.search.confidence

    def show(self, progress: Progress) -> None:
        """Show the run's progress."""
        if isinstance(self._bar, _TrialsBar):
            self._bar.show(progress.in_flight)
        if progress.opening is not None:
            self._print(f"{self._name}: {opening_line(progress.opening, progress)}", is_whole=True)
        if progress.note:
            self._print(f"note: {progress.note}", is_whole=True)
        if progress.chosen is not None:
            self._print(f"  {next_line(progress.chosen, progress, self._confidence)}", is_whole=True)
        self._compared = progress.compared or self._compared
        for record in progress.ended:
            self._print(trial_line(record, self._compared, progress.best))
            log = last_log_lines(record.observation)
            for line in log if log != self._log_shown else ():
                self._print(f"    | {line}")
            self._log_shown = log
        if progress.opening is not None or progress.note:
            return
        # a terminal has a table of what runs
        told = replace(progress, layouts=()) if self._console.is_terminal and progress.in_flight else progress
        state = state_line(told, self._clock, self._compared)
        self._bar.update(self._task, state=state)
        if progress.ended or self._is_silent():
            self._say(f"  {state}")

    def show_interrupt(self) -> None:
        """Show that an interrupt has come: ending Ray and what trials have started takes seconds."""
        state = "interrupted; ending what runs"
        self._bar.update(self._task, state=state)
        self._say(state)

    def _print(self, line: str, *, is_whole: bool = False) -> None:
        """Print a line; a terminal cuts it at its width, unless it is to be shown whole."""
        text = Text(printable(line))
        if not self._console.is_terminal:
            self._console.print(text, soft_wrap=True)
        elif is_whole:
            self._console.print(text)
        else:
            self._console.print(text, no_wrap=True, overflow="ellipsis")
        self._said_s = self._clock_s()
