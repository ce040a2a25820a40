"""Numbers with their units, and configurations in a few words."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.job.parallel_config import DEGREES, Value

MISSING = "\N{EN DASH}"
GIB = 2**30
SEPARATOR = " \N{MIDDLE DOT} "


def seconds(value: float | None) -> str:
    """A duration with three significant digits or more."""
    if value is None:
        return MISSING
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3f} s" if value < 100 else f"{value:,.1f} s"


def gibibytes(value: float | None) -> str:
    """Memory in GiB."""
    return MISSING if value is None else f"{value / GIB:.1f} GiB"


def percent(value: float | None, *, signed: bool = False) -> str:
    """A share in percent."""
    if value is None:
        return MISSING
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def plural(count: int, noun: str) -> str:
    """`1 trial`, `2 trials`, with separated thousands."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shown(value: Value) -> str:
    """One dimension's value."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_short(values: Mapping[str, Value]) -> str:
    """A configuration by what distinguishes it: degrees of 1 are left out, `tp 8 · dp 16 · zero_stage 1`."""
    parts = [f"{name} {shown(value)}" for name, value in values.items() if name not in DEGREES or value != 1]
    return SEPARATOR.join(parts) or "all degrees 1"
