"""Read step times and memory off the log lines of training programs.

A pattern is a few regular expressions. The name of a group states the quantity and its unit:

    iteration                                        number of the step
    step_s, step_ms, step_us                         time of a step
    mean_step_s                                      mean time of all steps so far, with `iteration`
    steps_per_s, samples_per_s, tokens_per_s         rate of the whole job
    tokens_per_s_per_device                          rate of one device
    memory_bytes, memory_mb, memory_mib, ...         peak memory of a device; mb and gb are decimal
    loss                                             loss of the step

A line with a time is a reading of a step; a line with memory or a loss alone adds to the peak of memory or to the
losses. Rates are converted to times by the job's tokens, samples and devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hardware.io.errors import ConfigError, did_you_mean

LONGEST_LINE = 10_000
"""Number of characters that are read of a line."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_SECONDS = {"step_s": 1.0, "step_ms": 1e-3, "step_us": 1e-6}
_RATES = ("steps_per_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_device")
_BYTES = {"memory_bytes": 1.0, "memory_mb": 1e6, "memory_gb": 1e9, "memory_mib": 2.0**20, "memory_gib": 2.0**30}
_MEAN = "mean_step_s"
_LOSS = "loss"
GROUPS = ("iteration", _MEAN, *_SECONDS, *_RATES, *_BYTES, _LOSS)
"""Names that the groups of a pattern may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """Size of one step of a job, which converts rates to times.

    Attributes:
        samples: Number of sequences of all replicas together.
        tokens: Number of tokens of these sequences.
        devices: Number of devices that the job runs on.
    """

    samples: int
    tokens: int
    devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Numbers of one log line.

    Attributes:
        step_time_s: Time of a step [s]; None if the line gives memory or a loss alone.
        iteration: Number of the step, if the line gives it.
        memory_bytes: Peak memory of a device [bytes], if the line gives it.
        total_s: Time of all steps so far [s], if the line gives their mean; then it gives no time of a step.
        loss: Loss of the step, if the line gives it.
    """

    step_time_s: float | None = None
    total_s: float | None = None
    iteration: int | None = None
    memory_bytes: int | None = None
    loss: float | None = None

    @property
    def has_loss_alone(self) -> bool:
        """Whether the line gives neither a time nor memory."""
        return self.step_time_s is None and self.total_s is None and self.memory_bytes is None


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPattern:
    """Pattern that reads the log of a program.

    Attributes:
        expressions: Regular expressions, each of which is searched for in every line.
        steps_per_line: Number of training steps that the time of one line covers.
    """

    expressions: tuple[str, ...]
    steps_per_line: int = 1

    def __post_init__(self) -> None:
        """Check the expressions.

        Raises:
            ConfigError: An expression is malformed, names an unknown group, or no group gives a step time.
        """
        timed = False
        for expression in self.expressions:
            try:
                names = re.compile(expression).groupindex
            except (re.error, ValueError, OverflowError, RecursionError) as error:
                raise ConfigError(f"is not a regular expression: {error}", value=expression) from None
            for name in names:
                if name not in GROUPS:
                    raise ConfigError(
                        f"has a group named {name!r}, which is not the name of a known quantity",
                        value=expression,
                        nearest=did_you_mean(name, GROUPS),
                    )
            timed = (
                timed or any(name in _SECONDS or name in _RATES for name in names) or {_MEAN, "iteration"} <= {*names}
            )
        if not timed:
            raise ConfigError(
                "has no group for the time of a step",
                value=list(self.expressions),
                nearest=f"a group named {', '.join((*_SECONDS, *_RATES))}, for example time (?P<step_ms>[\\d.]+)",
            )

    def reading(self, line: str, step: StepSize) -> Reading | None:
        """Return the numbers of a line; None if it has none."""
        plain = _COLOUR.sub("", line[:LONGEST_LINE])
        found: dict[str, str] = {}
        for expression in self.expressions:
            match = re.search(expression, plain)
            if match is not None:
                found |= {name: text for name, text in match.groupdict().items() if text is not None}
        seconds, memory_bytes = _step_time_s(found, step), _memory_bytes(found)
        iteration, mean_s = number_of(found.get("iteration")), number_of(found.get(_MEAN))
        total_s, loss = iteration * mean_s if iteration and mean_s else None, number_of(found.get(_LOSS))
        if seconds is None and memory_bytes is None and total_s is None and loss is None:
            return None
        return Reading(
            step_time_s=None if seconds is None else seconds / self.steps_per_line,
            total_s=total_s,
            iteration=None if iteration is None else int(iteration),
            memory_bytes=memory_bytes,
            loss=loss,
        )


class Totals:
    """Times of steps from lines that give the time of all steps so far."""

    def __init__(self) -> None:
        self._last: tuple[int, float] = (0, 0.0)

    def of_step(self, reading: Reading) -> Reading:
        """Return a reading with the mean time of the steps since the line before."""
        if reading.total_s is None or reading.iteration is None:
            return reading
        steps, seconds = reading.iteration - self._last[0], reading.total_s - self._last[1]
        self._last = (reading.iteration, reading.total_s)
        return replace(reading, total_s=None, step_time_s=seconds / steps if steps > 0 and seconds > 0 else None)


def _step_time_s(found: Mapping[str, str], step: StepSize) -> float | None:
    amounts = dict(zip(_RATES, (1, step.samples, step.tokens, step.tokens / step.devices), strict=True))
    for name in (*_SECONDS, *_RATES):
        number = number_of(found.get(name))
        if number is not None and number > 0:
            return number * _SECONDS[name] if name in _SECONDS else amounts[name] / number
    return None


def _memory_bytes(found: Mapping[str, str]) -> int | None:
    for name, unit_bytes in _BYTES.items():
        number = number_of(found.get(name))
        if number is not None and 0 < number * unit_bytes < math.inf:
            return round(number * unit_bytes)
    return None


_MAGNITUDES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def number_of(text: str | None) -> float | None:
    """Parse a number as logs write it, 1,480 or 1.07e+04 or 11.5K; return None for anything else."""
    unit = _MAGNITUDES.get(text[-1:], 1.0) if text is not None else 1.0
    try:
        number = float(text.replace(",", "").rstrip("KMGT")) * unit if text is not None else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


_FLOAT = r"[\d.,]+(?:[eE][+-]?\d+)?"
_MEGATRON = LogPattern(
    expressions=(
        rf"iteration\s+(?P<iteration>\d+)\s*/.*?elapsed time per iteration \(ms\):\s*(?P<step_ms>{_FLOAT})",
        rf"memory \(MB\) \|.*?max reserved:\s*(?P<memory_mib>{_FLOAT})",
        rf"\|\s*lm loss:\s*(?P<loss>{_FLOAT})",
    )
)

LOG_PATTERNS: dict[str, LogPattern] = {
    "megatron": _MEGATRON,
    "bridge": _MEGATRON,
    "mindspeed": _MEGATRON,
    "torchtitan": LogPattern(
        expressions=(
            rf"\bstep:\s*(?P<iteration>\d+)\s+loss:\s*(?P<loss>{_FLOAT})?"
            rf"(?>.*?memory:\s*(?P<memory_gib>{_FLOAT})GiB)"
            rf"(?>.*?tps:\s*(?P<tokens_per_s_per_device>{_FLOAT}))",
        )
    ),
    "deepspeed": LogPattern(
        expressions=(
            rf"global_step=(?P<iteration>\d+),.*?CurrSamplesPerSec=(?P<samples_per_s>{_FLOAT})",
            rf"MaxMemAllocated=(?P<memory_gib>{_FLOAT})\s*GB",
        )
    ),
    "nemo": LogPattern(
        expressions=(
            rf"iteration (?P<iteration>\d+)/.*?train_step_timing in s: (?P<step_s>{_FLOAT})",
            rf"global_step=(?P<iteration>{_FLOAT}), .*?train_step_timing in s=(?P<step_s>{_FLOAT})",
            rf"peak_memory_usage: (?P<memory_bytes>{_FLOAT})",
            rf"\breduced_train_loss[:=] ?(?P<loss>{_FLOAT})",
        )
    ),
    "nanotron": LogPattern(
        expressions=(
            rf"iteration: (?P<iteration>\d+) / .*?\b(?:elapsed_)?time_per_iteration_ms: (?P<step_ms>{_FLOAT}[KMG]?)",
            rf"cuda_max_memory_reserved: (?P<memory_bytes>{_FLOAT}[KMGT]?)",
            rf"\blm_loss: (?P<loss>{_FLOAT})",
        )
    ),
    "maxtext": LogPattern(
        expressions=(
            rf"completed step: (?P<iteration>\d+), seconds: (?P<step_s>{_FLOAT}), ",
            rf"completed step: .*?, loss: (?P<loss>{_FLOAT})",
        )
    ),
    "swift": LogPattern(
        expressions=(
            rf"'iteration': '(?P<iteration>\d+)/.*?'memory\(GiB\)': (?P<memory_gib>{_FLOAT}), "
            rf"'train_speed\(s/it\)': (?P<mean_step_s>{_FLOAT})",
            rf"'loss': '?(?P<loss>{_FLOAT})",
        )
    ),
    "verl": LogPattern(
        expressions=(
            rf"\bstep:(?P<iteration>\d+) - .*?timing_s/update_actor:(?P<step_s>{_FLOAT})",
            rf"perf/max_memory_reserved_gb:(?P<memory_gib>{_FLOAT})",
        )
    ),
}
"""Patterns by the names of the frameworks whose logs they read.

Sources: Megatron-LM megatron/training/training.py, `training_log`, and `report_memory` in its utils.py, whose MB are
2**20 bytes; MindSpeed-LLM calls the same; torchtitan torchtitan/components/metrics.py, where tps is per device and the
memory the most reserved; DeepSpeed deepspeed/utils/timer.py, `ThroughputTimer`, whose batch is that of all replicas and
whose GB are 2**30 bytes; NeMo 2 logs of `nemo.lightning` progress printers with its timing and memory callbacks, and
the progress bar of NeMo 1; Megatron-Bridge training/utils/train_utils.py, which prints Megatron-LM's lines; MaxText
common/metric_logger.py; ms-swift swift/megatron/callbacks/print.py, whose time is the mean of all steps so far; verl
trainer/ppo/ray_trainer.py and utils/tracking.py, of which the actor's update is read; nanotron trainer.py,
`train_step_logs`, whose K, M and G are powers of 1000; releases after 0.4 leave out `elapsed_`.
"""


def find_pattern(name: str) -> LogPattern:
    """Return the pattern of a framework.

    Raises:
        ConfigError: No pattern has that name.
    """
    if name not in LOG_PATTERNS:
        raise ConfigError("is not a known log format", value=name, nearest=did_you_mean(name, LOG_PATTERNS))
    return LOG_PATTERNS[name]
