"""Step times and memory in a training's log, which are a measurement of the configuration that it printed."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass

from trials.command.log_pattern import LOG_PATTERNS, StepSize

WARM_UP = 2
"""Number of step times that are dropped, as trials drop them by default."""
MOST_STEPS = 1_000
"""Number of lines with step times that are kept: reading ends with them."""

_KEYWORDS = (
    "elapsed time per iteration",
    "max reserved",
    "loss:",
    "CurrSamplesPerSec",
    "elapsed_time_per_iteration_ms",
    "train_step_timing in s",
)
"""Texts of which every line with a step time or with memory has one."""
_BATCH = re.compile(r"global[ _]batch[ _]size:\s*([0-9]+)\s*(?:\||$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurement of the current configuration.

    Attributes:
        step_time_s: Median time of a step [s].
        readings: Number of log lines that it is the median of.
        peak_memory_bytes: Largest peak memory of any device that the log states [bytes]; None if it states none.
        source: Name of the log.
    """

    step_time_s: float
    readings: int
    peak_memory_bytes: int | None
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSteps:
    """Lines of a log that may have step times or memory.

    Attributes:
        framework: Name of the log pattern that reads the lines.
        source: Name of the log.
        lines: Lines, in their order.
    """

    framework: str
    source: str
    lines: tuple[str, ...]

    def measured(self, step: StepSize) -> Measured | None:
        """Return the measurement for a job with steps of that size; None without a step time after the warm-up.

        The same step of several ranks counts once, and steps of another global batch, as a ramp-up has, do not count.
        """
        pattern = LOG_PATTERNS[self.framework]
        times_s: list[float] = []
        peaks: list[int] = []
        last = None
        for line in self.lines:
            reading = pattern.reading(line, step)
            if reading is None:
                continue
            if reading.memory_bytes is not None:
                peaks.append(reading.memory_bytes)
            batch = _BATCH.search(line)
            if reading.step_time_s is None or (batch is not None and int(batch[1]) != step.samples):
                continue
            if reading.iteration is None or reading.iteration != last:
                times_s.append(reading.step_time_s)
            last = reading.iteration
        kept = times_s[WARM_UP:]
        if not kept:
            return None
        return Measured(
            step_time_s=statistics.median(kept),
            readings=len(kept),
            peak_memory_bytes=max(peaks, default=None),
            source=self.source,
        )


def may_be_step(text: str) -> bool:
    """Return whether a line may have a step time or memory."""
    return any(keyword in text for keyword in _KEYWORDS)
