"""Hidden effects of knobs in a synthetic world, which the tuner does not know.

Half of the knobs do nothing. Each value of another knob changes the step by a factor of its own: independently of the
other values where they have no order, along a parabola where they have one. Most of this factor is the same for all
layouts; the rest varies smoothly over the log degrees. Two knobs that both have an effect also have one together, a
tenth as large. A knob that may affect memory changes the peak in the same way.

Letters: n layouts.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import KnobValue
from hardware.arrays import FloatArray
from trials.knobs.knob import Knob

IDLE = 0.5
"""Share of the knobs that do nothing; assumed."""

SIZES = (0.01, 0.12)
"""Range of the log effects of knobs, drawn on a logarithmic scale; assumed after published gains of single flags."""

BY_LAYOUT = 0.4
"""Standard deviation of how much an effect differs between layouts, relative to its size; assumed."""

TOGETHER = 0.1
"""Size of the effect of two knobs together, relative to their own; assumed."""

OCTAVES = 4.0
"""Distance in log2 degrees over which an effect varies; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobEffects:
    """Log factors of the step time and of the memory peak, each [n]."""

    step: FloatArray
    memory: FloatArray


def hidden_effects(active: Sequence[tuple[Knob, KnobValue]], log_degrees: FloatArray, seed: int) -> KnobEffects:
    """Return what the knobs of some layouts do in the world of a seed.

    Args:
        active: Knobs that are set, with their values.
        log_degrees: Logarithms to base 2 of the degrees of the layouts [n, 8].
        seed: Seed of the world.
    """
    step, memory = np.zeros(len(log_degrees)), np.zeros(len(log_degrees))
    own: dict[str, float] = {}
    for knob, value in active:
        effect = _effect(knob, value, seed, "step")
        if effect:
            rng = _stream(seed, f"{knob.name} by layout")
            slope, phase = rng.normal(0.0, 1 / OCTAVES, log_degrees.shape[1]), rng.uniform(0, 2 * np.pi)
            step += effect * (1 + BY_LAYOUT * np.sqrt(2) * np.cos(log_degrees @ slope + phase))
            own[knob.name] = effect
        if "memory" in knob.affects:
            memory += _effect(knob, value, seed, "memory")
    for one, other in itertools.combinations(sorted(own), 2):
        size = TOGETHER * np.sqrt(abs(own[one] * own[other]))
        step += size * _stream(seed, f"{one} and {other}").standard_normal()
    return KnobEffects(step=step, memory=memory)


def idle_knobs(knobs: Sequence[Knob], seed: int) -> frozenset[str]:
    """Return the names of the knobs that change nothing in the world of a seed."""
    kinds = {knob.name: ("step", "memory") if "memory" in knob.affects else ("step",) for knob in knobs}
    return frozenset(
        name for name, whats in kinds.items() if all(_stream(seed, f"{name} {what}").random() < IDLE for what in whats)
    )


def _effect(knob: Knob, value: KnobValue, seed: int, what: str) -> float:
    """Return the log factor of a value relative to today's, in the mean over layouts."""
    rng = _stream(seed, f"{knob.name} {what}")
    if rng.random() < IDLE or value == knob.today:
        return 0.0
    size = float(np.exp(rng.uniform(*np.log(SIZES))))
    if knob.is_ordered:
        best = rng.uniform(0, 1)
        at, today = (_place(knob, each) for each in (value, knob.today))
        return size * 4 * ((at - best) ** 2 - (today - best) ** 2)
    values = [each for each in knob.values if each != knob.today]
    return size * float(rng.standard_normal(len(values))[values.index(value)])


def _place(knob: Knob, value: KnobValue) -> float:
    """Return the place of an ordered value among all, from 0 to 1."""
    ordered = sorted(float(each) for each in knob.values if each is not None)
    assert value is not None, "ordered values are numbers"
    return ordered.index(float(value)) / (len(ordered) - 1)


def _stream(seed: int, label: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(label.encode())])
