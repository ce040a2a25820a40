"""Expected effects of known knobs on each layout, by the cost model and by what is published.

A value that changes facts of the runtime or the job is predicted anew with these: its effect is the difference of two
predictions. What no model computes changes a part of the step by a published or assumed share of that part. Effects are
relative to today's value.

Letters: n layouts, v values of a knob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodels.job.facts import with_facts
from costmodels.job.parallel_config import ConfigGrid, KnobValue
from costmodels.job.setting import Setting
from costmodels.step.breakdown import BREAKDOWN
from costmodels.step.memory.peak import MEMORY_PARTS, MemoryEstimate, estimate_memory
from costmodels.step.step_time import StepEstimate, estimate_step
from hardware.arrays import FloatArray
from trials.knobs.knob import Knob
from tuner.knobs.known_knob import Change, KnownKnob, KnownValue
from tuner.search.knobs.knob_prior import KnobPrior

LEAST_WIDTH = 0.003
"""Least standard deviation of a known log effect: what repeated runs of one configuration differ by; assumed."""

MEMORY_WIDTH = 0.3
"""Standard deviation of a known effect on memory, relative to the effect; assumed."""

LEAST_MEMORY_WIDTH = 0.01
"""Least standard deviation of a known log effect on memory; assumed."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predicted:
    """Predictions of the layouts with today's knobs, row by row.

    Attributes:
        setting: Job, cluster and runtime.
        grid: Layouts [n].
        estimate: Predicted steps.
        memory: Predicted memory.
        unstalled_s: Step times without the stalls of layouts that hardly fit, which are no effect of a knob [s], [n].
    """

    setting: Setting
    grid: ConfigGrid
    estimate: StepEstimate
    memory: MemoryEstimate
    unstalled_s: FloatArray


def predict(setting: Setting, grid: ConfigGrid) -> Predicted:
    """Predict layouts with today's knobs."""
    memory = estimate_memory(setting, grid)
    return Predicted(
        setting=setting,
        grid=grid,
        estimate=estimate_step(setting, grid, memory=memory),
        memory=memory,
        unstalled_s=estimate_step(setting, grid).step_time_s,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ValueEffects:
    """Log effects of the values of a knob on the step and on the needed memory, zero for today's; each [n, v]."""

    step: FloatArray
    memory: FloatArray


def effects_of(known: KnownKnob, values: Sequence[KnobValue], today: KnobValue, predicted: Predicted) -> ValueEffects:
    """Return the expected effects of some values of a known knob; those that the catalog lacks have none."""
    step = np.zeros((len(predicted.grid), len(values)))
    memory = np.zeros_like(step)
    base = known.value_of(today) or KnownValue(value=today)
    of_base = [sum(parts) for parts in zip(_predicted_with(base, predicted), _log_parts(base, predicted), strict=True)]
    for at, value in enumerate(values):
        entry = known.value_of(value)
        if entry is None or entry == base:
            continue
        by_facts, by_parts = _predicted_with(entry, predicted), _log_parts(entry, predicted)
        step[:, at] = by_facts[0] + by_parts[0] - of_base[0]
        memory[:, at] = by_facts[1] + by_parts[1] - of_base[1]
    return ValueEffects(step=step, memory=memory)


def prior_of(known: KnownKnob, knob: Knob, predicted: Predicted) -> KnobPrior:
    """Return the prior of the effects of a known knob of a study."""
    effects = effects_of(known, knob.values, knob.today, predicted)
    moved = np.abs(effects.memory).max(axis=1)
    moves_memory = "memory" in known.affects
    return KnobPrior(
        step=effects.step,
        step_width=np.maximum(width_of(known, predicted), LEAST_WIDTH),
        memory=effects.memory,
        memory_width=np.maximum(MEMORY_WIDTH * moved, LEAST_MEMORY_WIDTH) if moves_memory else None,
    )


def width_of(known: KnownKnob, predicted: Predicted) -> FloatArray:
    """Return the standard deviation of a known knob's log effect on each layout [n]."""
    return known.width * share_of(known, predicted)


def share_of(known: KnownKnob, predicted: Predicted) -> FloatArray:
    """Return the share of each layout's step that a known knob affects [n]."""
    parts = {name.removesuffix(" communication") for name in known.affects} & {*BREAKDOWN}
    seconds = [predicted.estimate.breakdown_s[part] for part in sorted(parts)]
    return np.asarray(sum(seconds, np.zeros(len(predicted.grid))) / predicted.estimate.step_time_s)


def _predicted_with(value: KnownValue, predicted: Predicted) -> tuple[FloatArray, FloatArray]:
    """Return the logarithms of predicted step and memory with a value's facts, relative to those with today's [n]."""
    nothing = np.zeros(len(predicted.grid))
    if value.is_in_use(predicted.setting.job, predicted.setting.runtime):
        return nothing, nothing
    setting = with_value(predicted.setting, value)
    memory = estimate_memory(setting, predicted.grid)
    step_s = estimate_step(setting, predicted.grid).step_time_s
    return np.log(step_s / predicted.unstalled_s), np.log(memory.needed_bytes / predicted.memory.needed_bytes)


def with_value(setting: Setting, value: KnownValue) -> Setting:
    """Return a setting in which a value's facts hold."""
    fields: dict[str, Any] = dict(value.job)
    return replace(setting, runtime=with_facts(setting.runtime, value.facts), job=replace(setting.job, **fields))


def _log_parts(value: KnownValue, predicted: Predicted) -> tuple[FloatArray, FloatArray]:
    """Return the log changes of the step and of the needed memory that published shares make [n]."""
    step = _log_change(value.step, predicted.estimate.breakdown_s, predicted.estimate.step_time_s)
    needed = predicted.memory.needed_bytes
    parts = {part: predicted.memory.parts_bytes[part] for part in MEMORY_PARTS}
    return step, _log_change(value.memory, parts, needed)


def _log_change(change: Change, parts: dict[str, FloatArray], total: FloatArray) -> FloatArray:
    return np.log1p(sum((by * parts[part] / total for part, by in change), np.zeros(len(total))))
