"""Metrics of a run as a file in Prometheus' text format, for the textfile collector of its node exporter.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text-based format). The file is written beside its
name and renamed, so that a reader never sees half of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hardware.io.errors import ConfigError
from hardware.io.output_file import write_output
from trials.backend import Status
from tuner.run.progress import Progress

EVERY_S = 5.0
"""Longest time between two writings while a run polls [s], and the shortest where no trial has ended."""


class MetricsFile:
    """Metrics of one run; a file that cannot be written is told once, and ends no run.

    Args:
        out: File to write.
        study: Name of the study, the label of all metrics.
        on_trouble: Function that is told why the file could not be written.
        clock: Clock of the time between writings [s].
        wall_clock: Seconds since the epoch, for the heartbeat.
    """

    def __init__(
        self,
        out: Path,
        study: str,
        on_trouble: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._out, self._study, self._on_trouble = out, study, on_trouble
        self._clock, self._wall_clock = clock, wall_clock
        self._written_s: float | None = None
        self._is_told = False

    def show(self, progress: Progress) -> None:
        """Write the metrics if a trial has ended, or if they are old."""
        is_old = self._written_s is None or self._clock() - self._written_s >= EVERY_S
        if progress.opening is not None or progress.note or not (progress.ended or is_old):
            return
        self._written_s = self._clock()
        try:
            write_output(self._out, metrics_text(progress, self._study, self._wall_clock()), option="--metrics")
        except ConfigError as error:
            if not self._is_told:
                self._on_trouble(str(error))
            self._is_told = True


def metrics_text(progress: Progress, study: str, now_s: float) -> str:
    """Return the metrics of a run's progress at a moment [s since the epoch]."""
    return "".join(f"{line}\n" for line in _lines(progress, f'study="{_escaped(study)}"', now_s))


def _lines(progress: Progress, label: str, now_s: float) -> Iterator[str]:
    states = {status.value: progress.by_status.get(status.value, 0) for status in Status}
    states |= {"running": progress.running, "queued": progress.queued}
    yield from _head("meshtune_trials", "gauge", "Trials of the study by their state.")
    for state, count in states.items():
        yield f'meshtune_trials{{{label},state="{state}"}} {count}'
    best_s = progress.best.step_time_s if progress.best else None
    for name, kind, meaning, value in (
        ("meshtune_trials_budget", "gauge", "Largest number of trials.", progress.budget),
        ("meshtune_best_step_time_seconds", "gauge", "Shortest measured step time; absent before the first.", best_s),
        ("meshtune_confidence", "gauge", "Probability that no untried configuration is faster.", progress.p_star),
        ("meshtune_device_hours_total", "counter", "Device-hours of ended trials.", progress.device_hours),
        ("meshtune_heartbeat_timestamp_seconds", "gauge", "Time of the driver's last look at its trials.", now_s),
    ):
        if value is not None:
            yield from _head(name, kind, meaning)
            yield f"{name}{{{label}}} {value!r}"


def _head(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
