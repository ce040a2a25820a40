"""Metrics of a run as a file for Prometheus, such as for the textfile collector of its node exporter.

A file that ends in `.openmetrics` is in the format of that name, any other in Prometheus' text format. The file is
written beside its name and renamed, so that a reader never sees half of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hardware.io.errors import ConfigError
from hardware.io.output_file import write_output
from trials.backend import Status
from tuner.run.progress import Progress

if TYPE_CHECKING:
    from prometheus_client import Metric

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
            is_open = self._out.suffix == ".openmetrics"
            text = metrics_text(progress, self._study, self._wall_clock(), is_open=is_open)
            write_output(self._out, text, option="--metrics")
        except ConfigError as error:
            if not self._is_told:
                self._on_trouble(str(error))
            self._is_told = True


def metrics_text(progress: Progress, study: str, now_s: float, *, is_open: bool = False) -> str:
    """Return the metrics of a run's progress at a moment [s since the epoch], in OpenMetrics if `is_open`."""
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 # it takes long to load
    from prometheus_client.openmetrics import exposition  # noqa: PLC0415

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Progress(progress, study, now_s))
    written: bytes = (exposition.generate_latest if is_open else generate_latest)(registry)
    return written.decode()


class _Progress:
    """Progress of a run as a collector of prometheus_client.

    Args:
        progress: Progress.
        study: Name of the study, the label of all metrics.
        now_s: Time of the progress [s since the epoch].
    """

    def __init__(self, progress: Progress, study: str, now_s: float) -> None:
        self._progress, self._study, self._now_s = progress, study, now_s

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are known."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        progress = self._progress
        states = {status.value: progress.by_status.get(status.value, 0) for status in Status}
        states |= {"running": progress.running, "queued": progress.queued}
        trials = GaugeMetricFamily("meshtune_trials", "Trials of the study by their state.", labels=["study", "state"])
        for state, count in states.items():
            trials.add_metric([self._study, state], count)
        yield trials
        best_s = progress.best.step_time_s if progress.best else None
        for kind, name, meaning, value in (
            (GaugeMetricFamily, "trials_budget", "Largest number of trials.", progress.budget),
            (GaugeMetricFamily, "best_step_time_seconds", "Shortest step time; absent before the first.", best_s),
            (GaugeMetricFamily, "confidence", "Probability that no untried configuration is faster.", progress.p_star),
            (CounterMetricFamily, "device_hours", "Device-hours of ended trials.", progress.device_hours),
            (GaugeMetricFamily, "heartbeat_timestamp_seconds", "Time of the driver's last look.", self._now_s),
        ):
            if value is not None:
                family = kind(f"meshtune_{name}", meaning, labels=["study"])
                family.add_metric([self._study], value)
                yield family
