"""Known knobs that may pay for a study, by the cost model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.arrays import FloatArray
from trials.knobs.condition import ALWAYS, parse_condition
from tuner.knobs.effects import Predicted, effects_of, predict, width_of
from tuner.knobs.known_knob import KnownKnob
from tuner.knobs.needs import unmet_needs
from tuner.knobs.within import condition_within

LEAST_GAIN = 0.005
"""Least gain for which a knob is recommended, as a share of the step; assumed: half a percent is what a few repeated
trials can tell from noise."""

LEAST_SHOWN = 0.0005
"""Least gain that is told as a figure."""

LEAST_FREED = 0.01
"""Least share of memory that is told."""

LEADERS = 200
"""Layouts for which knobs are judged: so many of the fastest predicted ones that fit, and of those that do not."""

MOST_RECOMMENDED = 16
"""Most knobs that are recommended, those with the largest gains; assumed: more need more trials than most studies
have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Judgement of a known knob for a study.

    Attributes:
        known: The knob.
        gain: Share of the step that its best value may save: the expected gain and one standard deviation, in the mean
            over the leading layouts that set it.
        reason: Why it is recommended, or why not.
        is_recommended: Whether it is.
    """

    known: KnownKnob
    gain: float
    reason: str
    is_recommended: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaders:
    """Layouts for which knobs are judged: the fastest of those that fit, and of those that do not.

    Attributes:
        predicted: Predictions of the layouts.
        room_bytes: Memory that a layout may need [n].
    """

    predicted: Predicted
    room_bytes: FloatArray


def leading_layouts(setting: Setting, grid: ConfigGrid, headroom: float) -> Leaders:
    """Return the leading layouts of a study."""
    memory = estimate_memory(setting, grid)
    step_s = estimate_step(setting, grid).step_time_s
    fits = memory.fits(headroom)
    chosen = [part[np.argsort(step_s[part], kind="stable")[:LEADERS]] for part in map(np.flatnonzero, (fits, ~fits))]
    predicted = predict(setting, grid.take(np.concatenate(chosen)))
    return Leaders(predicted=predicted, room_bytes=(1 - headroom) * predicted.memory.capacity_bytes)


def judge_knobs(known: Sequence[KnownKnob], leaders: Leaders) -> list[Verdict]:
    """Return a verdict on each known knob of a framework, in the given order.

    Args:
        known: Knobs of the study's framework.
        leaders: Leading layouts of the study; none if no layout is possible.
    """
    setting = leaders.predicted.setting
    verdicts: dict[str, Verdict] = {}
    for knob in known:  # a condition compares only knobs that stand before
        chosen = {name for name, one in verdicts.items() if one.is_recommended}
        verdicts[knob.name] = _judge(knob, known, chosen, leaders)
    paying = [one for one in sorted(verdicts.values(), key=lambda one: -one.gain) if one.is_recommended]
    kept = {one.known.name for one in paying[:MOST_RECOMMENDED]}
    for name, one in verdicts.items():
        if not one.is_recommended:
            continue
        if name not in kept:
            verdicts[name] = replace(
                one, reason=f"{one.reason}, but {MOST_RECOMMENDED} others may save more", is_recommended=False
            )
        elif not condition_within(one.known, known, kept, setting)[1]:
            kept.discard(name)
            verdicts[name] = replace(one, reason=f"{one.reason}, but only where {one.known.when}", is_recommended=False)
    return list(verdicts.values())


def _judge(knob: KnownKnob, catalog: Sequence[KnownKnob], chosen: Collection[str], leaders: Leaders) -> Verdict:
    """Return the verdict on one knob, beside the knobs that are recommended already."""

    def no(reason: str, gain: float = 0.0) -> Verdict:
        return Verdict(known=knob, gain=gain, reason=reason, is_recommended=False)

    setting, grid = leaders.predicted.setting, leaders.predicted.grid
    if knob.dimension:
        return no(f"is a dimension of layouts: space.{knob.dimension} searches it")
    unmet = unmet_needs(setting, knob.needs)
    if unmet:
        return no(f"needs {' and '.join(unmet)}")
    text, is_possible = condition_within(knob, catalog, chosen, setting)
    values_of = {one.name: tuple(value.value for value in one.values) for one in catalog if one.name in chosen}
    condition = parse_condition(text, values_of) if text else ALWAYS
    active = condition.on_layouts(grid) if is_possible else np.zeros(len(grid), dtype=np.bool_)
    if not active.any():
        return no(f"is set for no leading layout: it needs {knob.when}" if len(grid) else "no layout is possible")
    gain, freed = _gain_of(knob, active, leaders)
    may = f"may save {gain:.1%} of the step" + (f" and {freed:.0%} of the memory" if freed >= LEAST_FREED else "")
    if gain < LEAST_GAIN:
        return no(f"{may}, too little" if gain >= LEAST_SHOWN else "saves next to no time", gain)
    if knob.alters_results:
        return no(f"{may}, but changes the numbers that training computes with: name it to search it", gain)
    return Verdict(known=knob, gain=gain, reason=may, is_recommended=True)


def _gain_of(knob: KnownKnob, active: NDArray[np.bool_], leaders: Leaders) -> tuple[float, float]:
    """Return the shares of the step and of memory that a knob may save.

    Its best value saves what is expected and one standard deviation, in the mean over the leading layouts that set it;
    or it lets a layout fit that is faster than all that fit today.
    """
    predicted = leaders.predicted
    setting = predicted.setting
    today = knob.today(setting.job, setting.runtime)
    values = [value.value for value in knob.values if value.value != today]
    effects = effects_of(knob, values, today, predicted)
    fits = predicted.memory.needed_bytes[:, None] * np.exp(effects.memory) <= leaders.room_bytes[:, None]
    fits_today = predicted.memory.needed_bytes <= leaders.room_bytes
    saved = np.where(fits, width_of(knob, predicted)[:, None] - effects.step, 0.0).max(axis=1).clip(min=0.0)
    rows = active & fits_today if (active & fits_today).any() else active
    log_step = np.log(predicted.unstalled_s)
    with_knob = np.where(fits & active[:, None], log_step[:, None] + effects.step, np.inf).min()
    best_today = np.where(fits_today, log_step, np.inf).min()
    opened = best_today - with_knob if np.isfinite(best_today) and np.isfinite(with_knob) else 0.0
    freed = 1 - np.exp(effects.memory[rows].min(axis=1).mean())
    return max(float(saved[rows].mean()), float(opened)), float(freed)
