"""Sentences of the atlas on steps, differences between layouts, and whole trainings."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.job.parallel_config import Value
from hardware.cluster_file import find_cluster
from hardware.price_file import Prices
from hardware.time_units import DAY_S, HOUR_S
from tuner.atlas.answers import Answer, Layout
from tuner.atlas.places import AtlasJob, Place
from tuner.report.words import format_value

LEAST_SHARE = 0.02
"""Least share of a step that a sentence names."""


def bound_in_words(layout: Layout) -> str:
    """Return what a step is made of, such as `81% compute, 12% bubble`."""
    return ", ".join(f"{share:.0%} {bound}" for bound, share in layout.shares.items() if share >= LEAST_SHARE)


def next_in_words(answer: Answer) -> str:
    """Return how the fastest other layout differs from the recommended one; empty without one."""
    if len(answer.layouts) < 2:
        return ""
    best, other = answer.layouts[:2]
    gap = other.step_time_s / best.step_time_s - 1
    told = f"The fastest other one has {differences(best.values, other.values)}"
    if gap < 0:
        return f"{told}; it is {-gap:.1%} faster, but fits with a probability of {other.fit_probability:.0%} only."
    return f"{told} and is {gap:.1%} slower."


def differences(values: Mapping[str, Value], others: Mapping[str, Value]) -> str:
    """Return the dimensions in which others differ, such as `tp 4 for 2 and dp 16 for 32`."""
    told = [
        f"{name} {format_value(value) or 'even'} for {format_value(values[name]) or 'even'}"
        for name, value in others.items()
        if value != values[name]
    ]
    return " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)


def slower(best: Layout, other: Layout) -> str:
    """Return by how much another layout is slower than the recommended one."""
    return f"{other.step_time_s / best.step_time_s - 1:+.1%}"


def days_of(layout: Layout, job: AtlasJob) -> tuple[float, float, float]:
    """Return the days of a whole training: as predicted, and both ends of the 95% interval."""
    days = job.tokens / job.tokens_per_step / DAY_S
    low_s, high_s = layout.step_time_range_s
    return days * layout.step_time_s, days * low_s, days * high_s


def cost_of(place: Place, days: float, prices: Prices | None) -> float | None:
    """Return the cost of so many days on all devices of a place; None without a price."""
    per_hour = None if prices is None else prices.per_device_hour(find_cluster(place.cluster).groups[0])
    return None if per_hour is None else days * DAY_S / HOUR_S * place.devices * per_hour


def tokens_in_words(tokens: float) -> str:
    """Return a number of tokens in short, such as `1T` or `300B`."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= unit:
            return f"{tokens / unit:.4g}{letter}"
    return f"{tokens:.4g}"
