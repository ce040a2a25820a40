"""Knobs of a study beside its layouts: which are set where, the priors of their effects, and the best of them.

Letters: n layouts, j knobs, v values of a knob, p pairs, g knobs of a group, c combinations of a group, M draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid, KnobValue
from costmodels.surrogates.knob_effects import KnobDesign, KnobDraws, basis_of
from hardware.arrays import FloatArray, IntArray
from trials.knobs.knob import Knob, today_of
from tuner.search.knobs.knob_prior import KnobPrior, around

MEMORY = "memory"
"""Entry of a knob's `affects` that stands for the needed memory."""

TIE = 0.25
"""Standard deviation of how much an effect differs between usual layouts, relative to its mean; assumed."""

FARTHEST = 2.0
"""Distance from the leaders, in standard deviations of a feature, beyond which an effect differs no more; assumed."""

LEADERS = 0.02
"""Share of the layouts that lead by their predictions, where the mean effect of a knob is meant; assumed."""

UNTIED = 0.3
"""Size of the part of an effect that all layouts share, where it is tied to a part of the step; assumed."""

LEAST_SPREAD = 1e-6
"""Standard deviation of a feature below which all layouts have it alike, up to rounding."""

MEMORY_SCALES = (0.0, 0.05, 0.3)
"""Standard deviations of the log effect of a knob's value on the needed memory (assumed): buckets and buffers, and
activations or optimizer states."""

UNSAID_MEMORY = (0.9, 0.08, 0.02)
"""Prior probabilities of MEMORY_SCALES for a knob of which nothing is known."""

SAID_MEMORY = (0.2, 0.5, 0.3)
"""Prior probabilities of MEMORY_SCALES for a knob that may affect memory."""

MAX_COMBINATIONS = 4096
"""Largest number of combinations of knobs whose conditions name one another."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """Knobs whose conditions name one another, so that their values are chosen together.

    Attributes:
        knobs: Positions of the knobs [g].
        codes: Combinations of their values, as positions among the values; today's combination is the first [c, g].
        is_set: Whether each knob is set in each combination, as far as other knobs decide [c, g].
    """

    knobs: tuple[int, ...]
    codes: IntArray
    is_set: NDArray[np.bool_]


class Effects(Protocol):
    """Draws of the effects of knobs."""

    def of_values(self, knob: int, layouts: IntArray) -> FloatArray:
        """Return the drawn log effects of all values of one knob, where it is set [M, l, v]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Priced:
    """Effects on the log step time, with a price on the log needed memory.

    Attributes:
        effects: Draws of the effects on the step time.
        memory: Draws of the effects on memory.
        price: Log step time for a unit of log memory.
    """

    effects: KnobDraws
    memory: KnobDraws
    price: float

    def of_values(self, knob: int, layouts: IntArray) -> FloatArray:
        """Return the drawn effects of all values of one knob with the price of their memory [M, l, v]."""
        return self.effects.of_values(knob, layouts) + self.price * self.memory.of_values(knob, layouts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnobSpace:
    """Knobs of a study, and the priors of their effects on the step and on memory.

    Attributes:
        knobs: Knobs [j].
        groups: Groups of the knobs, each knob in one of them.
        active: Whether each knob is set for a layout, as far as the layout decides [n, j].
        tables: For each knob, the positions of the knobs that its condition compares, and whether it is set for each
            combination of their values.
        steps: Priors of the log effects on the step time [j].
        memory: Priors of the log effects on the needed memory [j].
    """

    knobs: tuple[Knob, ...]
    groups: tuple[Group, ...]
    active: NDArray[np.bool_]
    tables: tuple[tuple[tuple[int, ...], NDArray[np.bool_]], ...]
    steps: tuple[KnobDesign, ...]
    memory: tuple[KnobDesign, ...]

    @property
    def today(self) -> IntArray:
        """Positions of today's values [j]."""
        return np.array([knob.code_today for knob in self.knobs], dtype=np.int64)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a layout and the values of the knobs that are set for it."""
        sets, counts = np.unique(self.active, axis=0, return_counts=True)
        return sum(
            int(count) * math.prod(int(_is_possible(group, is_active[None]).sum()) for group in self.groups)
            for is_active, count in zip(sets, counts, strict=True)
        )

    @property
    def affects_memory(self) -> bool:
        """Whether some knob may affect memory."""
        return any(len(design.scales) > 1 or bool(design.known.any()) for design in self.memory)

    def is_set(self, layouts: IntArray, codes: IntArray) -> NDArray[np.bool_]:
        """Return whether each knob of pairs is set [p, j].

        Args:
            layouts: Positions of the layouts [p].
            codes: Positions of the knobs' values [p, j].
        """
        found = self.active[layouts].copy()
        for knob, (others, table) in enumerate(self.tables):
            if others:
                found[:, knob] &= table[tuple(codes[:, other] for other in others)]
        return found

    def canonical(self, layout: int, codes: Sequence[int]) -> tuple[int, ...]:
        """Return the values of the knobs with today's for those that are not set, so that equal runs are one pair."""
        found = np.array(codes, dtype=np.int64)
        today = self.today
        for _ in self.knobs:  # a knob that is not set may take away others, which stand behind it
            is_set = self.is_set(np.array([layout]), found[None])[0]
            settled = np.where(is_set, found, today)
            if np.array_equal(settled, found):
                break
            found = settled
        return tuple(found.tolist())

    def values_of(self, codes: Sequence[int] | IntArray) -> dict[str, KnobValue]:
        """Return the values of all knobs by name."""
        return {knob.name: knob.values[int(code)] for knob, code in zip(self.knobs, codes, strict=True)}

    def codes_of(self, values: Mapping[str, KnobValue]) -> tuple[int, ...] | None:
        """Return the positions of the knobs' values, today's where one is missing; None if a knob has no such value."""
        complete = today_of(self.knobs) | {name: values[name] for name in values}
        try:
            return tuple(_index(knob.values, complete[knob.name]) for knob in self.knobs)
        except ValueError:
            return None

    def best(
        self, effects: Effects, layouts: IntArray, allowed: Sequence[NDArray[np.bool_]]
    ) -> tuple[IntArray, FloatArray]:
        """Return the best values of the knobs for each draw and layout [M, l, j], and their log effect [M, l].

        Args:
            effects: Draws of the effects.
            layouts: Positions of the layouts of each draw [M, l].
            allowed: Whether each value of each knob may run in each draw, by knob [M, v].
        """
        codes = np.broadcast_to(self.today, (*layouts.shape, len(self.knobs))).copy()
        total = np.zeros(layouts.shape)
        for group in self.groups:
            active = self.active[:, list(group.knobs)][layouts]  # [M, l, g]
            cost = np.zeros((*layouts.shape, len(group.codes)))
            for at, knob in enumerate(group.knobs):
                of_values = effects.of_values(knob, layouts)  # [M, l, v]
                of_values = np.where(allowed[knob][:, None, :], of_values, np.inf)
                of_values[..., self.knobs[knob].code_today] = np.where(
                    allowed[knob][:, self.knobs[knob].code_today, None], 0.0, np.inf
                )
                counts = active[..., at, None] & group.is_set[:, at]
                cost += np.where(counts, of_values[..., group.codes[:, at]], 0.0)
            cost[~_is_possible_in(group, active)] = np.inf
            chosen = cost.argmin(axis=2)
            codes[..., list(group.knobs)] = group.codes[chosen]
            total += np.take_along_axis(cost, chosen[..., None], axis=2)[..., 0]
        return codes, total

    def sum_of(self, effects: Effects, layouts: IntArray, codes: IntArray) -> FloatArray:
        """Return the log effect of some values of the knobs for each draw and layout [M, l].

        Args:
            effects: Draws of the effects.
            layouts: Positions of the layouts of each draw [M, l].
            codes: Positions of the knobs' values [M, l, j].
        """
        is_set = self.is_set(layouts.ravel(), codes.reshape(-1, len(self.knobs))).reshape(codes.shape)
        total = np.zeros(layouts.shape)
        for knob in range(len(self.knobs)):
            of_values = effects.of_values(knob, layouts)
            chosen = np.take_along_axis(of_values, codes[..., knob, None], axis=2)[..., 0]
            total += np.where(is_set[..., knob], chosen, 0.0)
        return total


def _is_possible(group: Group, active: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the combinations in which knobs that no layout [l, j] sets have today's value [l, c]."""
    return np.asarray((active[:, None, list(group.knobs)] | (group.codes == group.codes[0])).all(axis=2))


def _is_possible_in(group: Group, active: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the same for activity of the group's knobs [M, l, g] -> [M, l, c]."""
    is_today = group.codes == group.codes[0]
    found = np.ones((*active.shape[:2], len(group.codes)), dtype=np.bool_)
    for at in range(len(group.knobs)):
        found &= active[..., at, None] | is_today[:, at]
    return found


def knob_space(
    knobs: Sequence[Knob],
    grid: ConfigGrid,
    features: FloatArray,
    shares: Mapping[str, FloatArray],
    step_time_s: FloatArray,
    *,
    priors: Mapping[str, KnobPrior] = MappingProxyType({}),
) -> KnobSpace:
    """Return the knobs of a study with the priors of their effects.

    Args:
        knobs: Knobs; a condition compares only knobs that stand before.
        grid: Layouts [n].
        features: Features of the layouts [n, d], which effects of unknown cause may be tied to.
        shares: Share of the predicted step of each of its parts [n], by the names that `affects` takes.
        step_time_s: Predicted step times [n].
        priors: What is known of the effects of some knobs, by name.
    """
    active = np.stack([knob.when.on_layouts(grid) for knob in knobs], axis=1)
    free_ties = _free_ties(features, step_time_s)
    steps, memory = [], []
    for at, knob in enumerate(knobs):
        positions = _positions(knob) if knob.is_ordered else None
        basis = basis_of(len(knob.values), knob.code_today, positions)
        parts = [part for part in knob.affects if part != MEMORY]
        none_known = np.zeros((len(grid), len(knob.values)))
        design = KnobDesign(
            basis=basis,
            ties=_tied_to([shares[part] for part in parts]) if parts else free_ties,
            active=active[:, at],
            known=none_known,
        )
        # what affects memory alone may still slow a step down
        prior = priors.get(knob.name)
        steps.append(design if prior is None else around(design, prior.step, prior.step_width))
        of_memory = replace(design, ties=np.ones((len(grid), 1)), scales=(0.0,), chances=(1.0,))
        if MEMORY in knob.affects or not knob.affects:
            chances = SAID_MEMORY if knob.affects else UNSAID_MEMORY
            of_memory = replace(of_memory, scales=MEMORY_SCALES, chances=chances)
        memory.append(of_memory if prior is None else around(of_memory, prior.memory, prior.memory_width))
    return KnobSpace(
        knobs=tuple(knobs),
        groups=group_knobs(knobs),
        active=active,
        tables=tuple(_condition_table(knob, knobs) for knob in knobs),
        steps=tuple(steps),
        memory=tuple(memory),
    )


def _condition_table(knob: Knob, knobs: Sequence[Knob]) -> tuple[tuple[int, ...], NDArray[np.bool_]]:
    """Return the positions of the knobs that a condition compares, and whether it holds for their values."""
    others = tuple(at for at, other in enumerate(knobs) if other.name in knob.when.knobs)
    table = np.ones(tuple(len(knobs[at].values) for at in others), dtype=np.bool_)
    for codes in np.ndindex(table.shape):
        values = {knobs[at].name: knobs[at].values[code] for at, code in zip(others, codes, strict=True)}
        table[codes] = knob.when.on_knobs(values)
    return others, table


def group_knobs(knobs: Sequence[Knob]) -> tuple[Group, ...]:
    """Return the groups of knobs whose conditions name one another."""
    names = [knob.name for knob in knobs]
    group_of = list(range(len(knobs)))
    for at, knob in enumerate(knobs):
        for other in knob.when.knobs:
            old, new = group_of[at], group_of[names.index(other)]
            group_of = [new if group == old else group for group in group_of]
    return tuple(
        _group([at for at, group in enumerate(group_of) if group == number], knobs)
        for number in dict.fromkeys(group_of)
    )


def _group(members: Sequence[int], knobs: Sequence[Knob]) -> Group:
    today = tuple(knobs[at].code_today for at in members)
    found: dict[tuple[int, ...], tuple[bool, ...]] = {}
    # today's combination first: of equals it is chosen
    for codes in [today, *itertools.product(*(range(len(knobs[at].values)) for at in members))]:
        settled, is_set = list(codes), [True] * len(codes)
        values = {knobs[at].name: knobs[at].values[code] for at, code in zip(members, codes, strict=True)}
        for place, at in enumerate(members):  # a condition compares only knobs that stand before
            is_set[place] = knobs[at].when.on_knobs(values)
            if not is_set[place]:
                settled[place] = today[place]
                values[knobs[at].name] = knobs[at].today
        found.setdefault(tuple(settled), tuple(is_set))
    return Group(
        knobs=tuple(members),
        codes=np.array(list(found), dtype=np.int64),
        is_set=np.array(list(found.values()), dtype=np.bool_),
    )


def _positions(knob: Knob) -> FloatArray:
    """Return the places of ordered values from 0 to 1, on a logarithmic scale where all are positive [v]."""
    values = np.array([float(value) for value in knob.values if value is not None])
    places = np.log(values) if (values > 0).all() else values
    span = float(np.ptp(places))
    return np.asarray((places - places.min()) / (span or 1.0))


def _free_ties(features: FloatArray, step_time_s: FloatArray) -> FloatArray:
    """Return the ties of an effect of unknown cause: the same for all layouts, and a linear part in their features.

    The linear part is relative to the leaders, so that far layouts, of which little is known, promise nothing.
    """
    spread = features.std(axis=0)
    varying = features[:, spread > LEAST_SPREAD]
    if not varying.shape[1]:
        return np.ones((len(features), 1))
    leaders = np.argsort(step_time_s, kind="stable")[: max(int(LEADERS * len(features)), 1)]
    standard = (varying - np.median(varying[leaders], axis=0)) / varying.std(axis=0)
    standard = np.clip(standard, -FARTHEST, FARTHEST)
    return np.column_stack([np.ones(len(features)), TIE / np.sqrt(standard.shape[1]) * standard])


def _tied_to(shares: Sequence[FloatArray]) -> FloatArray:
    """Return the ties of an effect on parts of the step: in proportion to their shares, and a part that all share.

    A share is relative to the largest, so that the scales of effects stand for layouts where the part weighs most.
    """
    columns = [UNTIED * np.ones(len(shares[0]))]
    columns += [share / max(float(share.max()), 1e-12) for share in shares]
    return np.column_stack(columns)


def _index(values: Sequence[KnobValue], value: KnobValue) -> int:
    """Return the position of a value; 1 is no true, but 1.0 is 1."""
    for at, each in enumerate(values):
        if each == value and isinstance(each, bool) == isinstance(value, bool):
            return at
    raise ValueError(f"{value!r} is no value of the knob")
