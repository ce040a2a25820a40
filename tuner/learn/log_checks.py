"""Check the steps of a log against themselves: a batch or a rate that another line contradicts is no measurement.

Lines that state a rate beside a step's time must agree with it, and the samples that a log counts must grow by the
global batch of its arguments.

Sources: Megatron-LM megatron/training/training.py, `training_log` (consumed samples); Megatron-DeepSpeed
megatron/training.py (samples per second, tokens per gpu per second); nanotron trainer.py, `train_step_logs` (tokens per
second); torchtitan components/metrics.py (capacity of the device).
"""

from __future__ import annotations

import hashlib
import io
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path

from hardware.io.input_file import open_input, reading_errors
from trials.command.log_pattern import LOG_PATTERNS, StepSize, number_of
from trials.command.memory_messages import says_memory_is_used_up
from tuner.imports.log import LogSteps
from tuner.imports.log.lines import Line, lines_of
from tuner.imports.log.log_import import MOST_CHARACTERS
from tuner.imports.log.steps import BATCH, WARM_UP

AGREES = 0.05
"""Largest difference between a printed rate and the rate of the printed time: rates are rounded, and means of other
intervals (assumed)."""
SHORTEST_S = 20
"""Shortest time between two lines that says something of their steps: some clocks count whole seconds."""
CLOCK_AGREES = (0.9, 1.5)
"""Smallest and largest ratio of the time between two lines to that of their steps: a program also evaluates, and saves
checkpoints (assumed)."""
FIRST_LINES = 50_000
"""Number of lines in which a log's device is looked for."""
FIRST_STEPS = 3
"""Number of steps after the warm-up that identify a run."""

_NUMBER = r"([\d.,]+(?:[eE][+-]?\d+)?[KMGT]?)"
_RATES: tuple[tuple[re.Pattern[str], str, Callable[[StepSize], float]], ...] = (
    (re.compile(rf"\btokens_per_sec: {_NUMBER}"), "tokens/s", lambda step: step.tokens),
    (re.compile(rf"\bsamples per second: {_NUMBER}"), "samples/s", lambda step: step.samples),
    (
        re.compile(
            rf"(?:tokens per gpu per second \(tgs\)|tokens_per_sec_per_gpu|tokens/sec/gpu|\(tokens/s/GPU\)): {_NUMBER}"
        ),
        "tokens/s per device",
        lambda step: step.tokens / step.devices,
    ),
)
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{3,6}))?")
"""Time at which a logger wrote a line."""
_CONSUMED = re.compile(r"iteration\s+(\d+)\s*/.*?consumed samples:\s*(\d+)")
_CAPACITY = re.compile(r"\b\w+ capacity: (.+?) with [\d.]+ ?GiB memory")
_SMI = re.compile(r"^\|\s+\d+\s+((?:NVIDIA|Tesla|GeForce) [\w -]+?)\s+(?:On|Off|N/A)\s+\|")
"""Device in the table of nvidia-smi, unless its name is cut by dots."""


def device_of(file: Path) -> str:
    """Return the device that a log names as it spells it, such as `NVIDIA H200`; empty if it names none."""
    for line in islice(_lines_of(file), FIRST_LINES):
        if (found := _CAPACITY.search(line.text) or _SMI.search(line.text)) is not None:
            return found[1].strip()
    return ""


def lack_of_memory(file: Path) -> str:
    """Return the line of a log that says that memory was used up; empty without one."""
    lines = (line.text for line in _lines_of(file) if "emory" in line.text)
    return next((text.strip() for text in lines if says_memory_is_used_up(text)), "")


def _lines_of(file: Path) -> Iterator[Line]:
    with reading_errors(file), io.TextIOWrapper(open_input(file), encoding="utf-8", errors="replace") as stream:
        yield from lines_of(stream, most_characters=MOST_CHARACTERS)


def contradiction(steps: LogSteps, step: StepSize) -> str:
    """Return in words what of a log's steps contradicts itself or the job; empty if all agrees."""
    pattern = LOG_PATTERNS[steps.framework]
    ratios: dict[str, list[float]] = {}
    for line in _of_batch(steps.lines, step):
        reading = pattern.reading(line.text, step)
        if reading is None or reading.step_time_s is None:
            continue
        for expression, unit, amount in _RATES:
            if (found := expression.search(line.text)) is not None and (rate := number_of(found[1])):
                ratios.setdefault(unit, []).append(rate * reading.step_time_s / amount(step))
    for unit, found_ratios in ratios.items():
        ratio = statistics.median(found_ratios)
        if abs(ratio - 1) > AGREES:
            return f"its {unit} are {ratio:.3g} times those of its step times with {step.samples} sequences a step"
    return _counted_otherwise(steps.lines, step) or _timed_otherwise(steps, step)


def _counted_otherwise(lines: Sequence[Line], step: StepSize) -> str:
    """Return in words that the counted samples grow by another batch than the job's; empty if they do not."""
    counted = [
        (int(found[1]), int(found[2]))
        for line in _of_batch(lines, step)
        if (found := _CONSUMED.search(line.text)) is not None
    ]
    grown = [
        (samples - before) / (iteration - last)
        for (last, before), (iteration, samples) in pairwise(counted)
        if iteration > last
    ]
    if grown and (batch := statistics.median(grown)) != step.samples:
        return f"its consumed samples grow by {batch:g} a step, and its arguments say a batch of {step.samples}"
    return ""


def _timed_otherwise(steps: LogSteps, step: StepSize) -> str:
    """Return in words that the lines' own clock tells other step times than the lines; empty if it does not.

    Where a log states rates alone, only its clock tells a wrong batch.
    """
    pattern = LOG_PATTERNS[steps.framework]
    ratios: list[float] = []
    last: tuple[int, float] | None = None
    for line in _of_batch(steps.lines, step):
        reading, clock = pattern.reading(line.text, step), _CLOCK.search(line.text)
        if reading is None or reading.step_time_s is None or reading.iteration is None or clock is None:
            continue
        at_s = datetime.fromisoformat(f"{clock[1]}T{clock[2]}.{(clock[3] or '0').ljust(6, '0')}").timestamp()
        if last is not None and reading.iteration > last[0] and at_s - last[1] < SHORTEST_S:
            continue  # until the next line that is late enough
        if last is not None and reading.iteration > last[0]:
            ratios.append((at_s - last[1]) / (reading.iteration - last[0]) / reading.step_time_s)
        last = (reading.iteration, at_s)
    if len(ratios) < FIRST_STEPS or CLOCK_AGREES[0] <= (ratio := statistics.median(ratios)) <= CLOCK_AGREES[1]:
        return ""
    return f"its lines are {ratio:.3g} times as far apart as their step times with {step.samples} sequences a step"


def identity_of(steps: LogSteps, step: StepSize) -> str:
    """Return a text that is equal for two logs of one run: the losses, or else the times, of its first steps.

    Several ranks of one run print the same losses and times of their own.
    """
    pattern = LOG_PATTERNS[steps.framework]
    readings: dict[int | None, str] = {}
    for line in _of_batch(steps.lines, step):
        reading = pattern.reading(line.text, step)
        if reading is not None and reading.step_time_s is not None and reading.iteration not in readings:
            told = reading.step_time_s if reading.loss is None else reading.loss
            readings[reading.iteration] = f"{reading.iteration} {told:.6g}"
    first = [*readings.values()][WARM_UP : WARM_UP + FIRST_STEPS]
    return hashlib.sha256("\n".join(first).encode()).hexdigest()[:12]


def ranks_with_memory(lines: Iterable[Line]) -> int:
    """Return the number of ranks whose memory the lines state: Megatron-LM prints that of one rank per stage and tp."""
    named = (re.search(r"\[Rank (\d+)\].*memory \(MB\)", line.text) for line in lines)
    return len({found[1] for found in named if found is not None})


def _of_batch(lines: Iterable[Line], step: StepSize) -> Iterable[Line]:
    """Yield the lines that do not state another global batch than the job's."""
    for line in lines:
        batch = BATCH.search(line.text)
        if batch is None or int(batch[1]) in (step.samples, step.tokens):
            yield line
