"""Step times and memory in a training's log, which are a measurement of the configuration that it printed."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from hardware.io.errors import quote_value
from trials.command.log_pattern import LOG_PATTERNS, StepSize
from tuner.imports.log.lines import Line
from tuner.imports.log.step_shape import StepShape, shape_of

WARM_UP = 2
"""Number of step times that are dropped, as trials drop them by default."""
MOST_STEPS = 1_000
"""Number of lines with step times that are kept: reading ends with them."""

MOST_BATCHES = 3
"""Number of other global batches that are named."""

_KEYWORDS = (
    "elapsed time per iteration",
    "max reserved",
    "CurrSamplesPerSec",
    "time_per_iteration_ms",
    "train_step_timing in s",
)
"""Texts of which every line with a step time or with memory has one, unless it has a loss."""
_LOSS = re.compile(r"loss:\s*[-+]?(?:\d|nan|inf)")
"""A loss as torchtitan prints it, and not the name of a loss."""
BATCH = re.compile(r"global[ _]batch[ _]size:\s*([0-9]+)\s*(?:\||$)")
"""Global batch of a line's step, which nanotron counts in tokens after release 0.4."""


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
class Counts:
    """Numbers of lines that look like steps, by what became of them.

    Attributes:
        found: Number of all of them.
        unread: Number of lines without a time that could be read, such as nan, half a line, or another format.
        memory: Number of lines with memory alone.
        repeated: Number of lines that other ranks printed of a step that counts already.
        other_batch: Number of steps with another global batch, as a ramp-up has.
        other_batches: These batches [sequences].
        warm_up: Number of steps that were dropped as warm-up.
        used: Number of steps that the measurement rests on.
        example: First line that could not be read, with its number; empty if there is none.
    """

    found: int = 0
    unread: int = 0
    memory: int = 0
    repeated: int = 0
    other_batch: int = 0
    other_batches: tuple[int, ...] = ()
    warm_up: int = 0
    used: int = 0
    example: str = ""

    @property
    def in_words(self) -> str:
        """Numbers of lines that do not count, with the reasons."""
        batches = ", ".join(str(batch) for batch in self.other_batches[:MOST_BATCHES])
        batches += ", ..." if len(self.other_batches) > MOST_BATCHES else ""
        told = {
            "without a time that can be read": self.unread,
            "with memory alone": self.memory,
            "of a step that another rank printed too": self.repeated,
            f"of another global batch ({batches}) than the job's": self.other_batch,
            f"of the warm-up, the first {WARM_UP} steps": self.warm_up,
        }
        words = ", ".join(f"{count:,} {what}" for what, count in told.items() if count)
        return words + (f" (first, {self.example})" if self.example else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsRead:
    """Steps of a log as they were read for one job.

    Attributes:
        counts: Numbers of lines, by what became of them.
        measured: Measurement; None without a step that counts.
        shape: Shape of the steps that it rests on; None without any.
    """

    counts: Counts
    measured: Measured | None = None
    shape: StepShape | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on why no step counts, or on why one number does not stand for the steps."""
        counts = self.counts
        if not counts.found:
            return (
                "measured: the log has no line of a step after its configuration, so `current` has no step time; it "
                "may end before the first step, or print steps in a format that is not known",
            )
        if self.measured is None:
            return (
                f"measured: of {_lines(counts.found)} that may be of steps none is used, so `current` has no step "
                f"time: {counts.in_words}",
            )
        assert self.shape is not None, "steps that count have a shape"
        middle_s, mean_s = self.measured.step_time_s, self.shape.mean_s
        one = f"the median of all {counts.used:,} is {middle_s:.4g} s, their mean {mean_s:.4g} s"
        return tuple(f"measured: {words}; {one}" for words in self.shape.in_words)

    def as_json(self) -> dict[str, Any]:
        """Return what was read as an object."""
        return asdict(self.counts) | {"shape": self.shape and self.shape.as_json()}


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
    lines: tuple[Line, ...]

    def read(self, step: StepSize) -> StepsRead:
        """Read the lines for a job with steps of that size.

        The same step of several ranks counts once, and steps of another global batch, as a ramp-up has, do not count.
        """
        pattern = LOG_PATTERNS[self.framework]
        times_s: list[float] = []
        peaks: list[int] = []
        last, example = None, ""
        became: Counter[str] = Counter()
        batches: dict[int, None] = {}
        for line in self.lines:
            reading = pattern.reading(line.text, step)
            if reading is None or reading.has_loss_alone:
                became["unread"] += 1
                example = example or f"line {line.number}: {quote_value(_from_keyword(line.text))}"
                continue
            if reading.memory_bytes is not None:
                peaks.append(reading.memory_bytes)
            batch = BATCH.search(line.text)
            if reading.step_time_s is None:
                became["memory"] += 1
                continue
            if batch is not None and int(batch[1]) not in (step.samples, step.tokens):
                became["other_batch"] += 1
                batches[int(batch[1])] = None
                continue
            if reading.iteration is None or reading.iteration != last:
                times_s.append(reading.step_time_s)
            else:
                became["repeated"] += 1
            last = reading.iteration
        kept = times_s[WARM_UP:]
        counts = Counts(
            found=len(self.lines),
            **became,
            other_batches=tuple(batches),
            warm_up=len(times_s) - len(kept),
            used=len(kept),
            example=example,
        )
        if not kept:
            return StepsRead(counts=counts)
        measured = Measured(
            step_time_s=statistics.median(kept),
            readings=len(kept),
            peak_memory_bytes=max(peaks, default=None),
            source=self.source,
        )
        return StepsRead(counts=counts, measured=measured, shape=shape_of(kept))


def _from_keyword(text: str) -> str:
    """Return the part of a line that may have a step time."""
    return text[min(at for keyword in (*_KEYWORDS, "loss:") if (at := text.find(keyword)) >= 0) :].strip()


def _lines(count: int) -> str:
    return f"{count:,} line{'' if count == 1 else 's'}"


def may_be_step(text: str) -> bool:
    """Return whether a line may have a step time or memory."""
    return any(keyword in text for keyword in _KEYWORDS) or ("loss:" in text and _LOSS.search(text) is not None)
