"""Formatting of numbers with units, and of configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from costmodels.job.parallel_config import DEGREES, Value
from hardware.rounding import measured, predicted
from tuner.storage.record import TrialRecord

MISSING = "\N{EN DASH}"
GIB = 2**30
SEPARATOR = " \N{MIDDLE DOT} "


def seconds(value: float | None) -> str:
    """Format a measured duration."""
    return _duration(value, measured)


def predicted_seconds(value: float | None) -> str:
    """Format a predicted duration, which has fewer digits."""
    return _duration(value, predicted)


def _duration(value: float | None, number: Callable[[float], str]) -> str:
    if value is None:
        return MISSING
    return f"{number(value * 1e3)} ms" if value < 1 else f"{number(value)} s"


def gibibytes(value: float | None) -> str:
    """Format a size of memory in GiB."""
    return MISSING if value is None else f"{value / GIB:.1f} GiB"


def percent(value: float | None, *, signed: bool = False) -> str:
    """Format a share in percent."""
    if value is None:
        return MISSING
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 trial` or `2 trials`, with separated thousands."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def after_trials(records: Sequence[TrialRecord], trial: int | None) -> str:
    """Format the moment at which a trial ended, None before the first one, by the number that had ended then."""
    if trial is None:
        return "before the first trial"
    ended = sorted((record for record in records if record.finished), key=lambda record: record.end_order)
    count = next((at for at, record in enumerate(ended, start=1) if record.number == trial), len(ended))
    return f"after {plural(count, 'trial')}"


def format_value(value: Value) -> str:
    """Format one dimension's value."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_short(values: Mapping[str, Value]) -> str:
    """Format a configuration without its degrees of 1, such as `tp 8 · dp 16 · zero_stage 1`."""
    told = ((name, value) for name, value in values.items() if (name not in DEGREES or value != 1) and value != "")
    parts = [f"{name} {format_value(value)}" for name, value in told]
    return SEPARATOR.join(parts) or "all degrees 1"
