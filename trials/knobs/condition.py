"""Conditions such as `tp > 1 and recompute == none`, under which a knob is set at all.

A condition is a list of comparisons joined by `and`. The left side is a dimension of the layout, a figure of it such as
`num_devices`, or another knob. The right side is a number, a word, or `true` or `false`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import (
    DEGREES,
    DIMENSIONS,
    ENUMERATED_DIMENSIONS,
    ConfigGrid,
    KnobValue,
    ParallelConfig,
)
from hardware.io.errors import ConfigError, did_you_mean

OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
"""Comparisons by their signs; the longer ones stand first, so that `<=` is not read as `<`."""

ORDERED = ("<=", ">=", "<", ">")
"""Comparisons that need numbers."""

FIGURES = ("num_devices", "replicas", "context_parallel")
"""Figures of a layout beside its dimensions: all devices, `dp*cp*up`, and `cp*up`."""

OF_LAYOUT = (*DEGREES, *ENUMERATED_DIMENSIONS, *FIGURES)
"""Names of a layout that a condition may compare."""

_COMPARISON = re.compile(rf"\s*([a-z_][a-z0-9_]*)\s*({'|'.join(OPERATORS)})\s*(\S+)\s*")
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One comparison of a condition.

    Attributes:
        name: Dimension, figure or knob on the left side.
        sign: Sign of the comparison, one of OPERATORS.
        value: Value on the right side.
    """

    name: str
    sign: str
    value: KnobValue

    @property
    def is_of_layout(self) -> bool:
        """Whether it compares the layout, and not another knob."""
        return self.name in OF_LAYOUT

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.name} {self.sign} {value}"

    def holds(self, left: KnobValue) -> bool:
        """Return whether the comparison holds for a value on the left side; texts and numbers have no order."""
        if self.sign in ORDERED and not (_is_number(left) and _is_number(self.value)):
            return False
        return bool(OPERATORS[self.sign](left, self.value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """Condition that holds where all of its comparisons do; one without comparisons always holds."""

    comparisons: tuple[Comparison, ...] = ()

    def __str__(self) -> str:
        return " and ".join(map(str, self.comparisons))

    @property
    def knobs(self) -> tuple[str, ...]:
        """Names of the knobs that it compares."""
        return tuple(dict.fromkeys(one.name for one in self.comparisons if not one.is_of_layout))

    def holds_for(self, config: ParallelConfig, knobs: Mapping[str, KnobValue]) -> bool:
        """Return whether it holds for a layout with these values of the knobs."""
        return all(
            one.holds(_of_layout(config, one.name) if one.is_of_layout else knobs[one.name]) for one in self.comparisons
        )

    def on_layouts(self, grid: ConfigGrid) -> NDArray[np.bool_]:
        """Return where the comparisons of layouts hold, whatever the knobs are [n]."""
        found = np.ones(len(grid), dtype=np.bool_)
        for one in self.comparisons:
            if one.is_of_layout:
                values, inverse = np.unique(_column(grid, one.name), return_inverse=True)
                dimension = DIMENSIONS.get(one.name)
                spelled = [dimension.value_of(value) if dimension else int(value) for value in values]
                found &= np.array([one.holds(value) for value in spelled], dtype=np.bool_)[inverse]
        return found

    def excludes(self, other: Condition) -> bool:
        """Return whether no layout and no values of knobs meet both conditions, as far as single names tell.

        A name that both compare with values a, b, ... is tried at these, beside them, and at something else.
        """
        both = (*self.comparisons, *other.comparisons)
        for name in {one.name for one in self.comparisons} & {one.name for one in other.comparisons}:
            of_name = [one for one in both if one.name == name]
            tried: set[KnobValue] = {one.value for one in of_name} | {"something else"}
            tried |= {float(value) + by for value in tried if _is_number(value) for by in (-1, 1)}  # type: ignore[arg-type] # numbers
            if not any(all(one.holds(value) for one in of_name) for value in tried):
                return True
        return False

    def on_knobs(self, values: Mapping[str, KnobValue]) -> bool:
        """Return whether the comparisons of knobs hold for the values of all knobs, whatever the layout is."""
        return all(one.holds(values[one.name]) for one in self.comparisons if not one.is_of_layout)


ALWAYS = Condition()
"""Condition that always holds."""


def parse_condition(text: str, knobs: Mapping[str, tuple[KnobValue, ...]]) -> Condition:
    """Read a condition.

    Args:
        text: Comparisons joined by `and`.
        knobs: Values of the knobs that it may compare, by name.

    Raises:
        ConfigError: It cannot be read, or names no dimension and no knob that stands before.
    """
    found = []
    for part in re.split(r"\band\b", text):
        match = _COMPARISON.fullmatch(part)
        if match is None:
            raise ConfigError(
                "must be comparisons joined by `and`", value=text, nearest="for example tp > 1 and recompute == none"
            )
        name, sign, word = match.groups()
        if name not in OF_LAYOUT and name not in knobs:
            nearest = did_you_mean(name, [*OF_LAYOUT, *knobs])
            raise ConfigError("compares no dimension and no knob that stands before", value=name, nearest=nearest)
        value = _parse_value(word)
        if sign in ORDERED and not _is_number(value):
            raise ConfigError(f"compares by `{sign}` what has no order", value=word, nearest="a number, or == and !=")
        _check_value(name, value, knobs)
        found.append(Comparison(name=name, sign=sign, value=value))
    return Condition(comparisons=tuple(found))


def _check_value(name: str, value: KnobValue, knobs: Mapping[str, tuple[KnobValue, ...]]) -> None:
    """Check that the right side is of the kind of the left one, so that a comparison may come out either way."""
    if name in knobs:
        if not _is_number(value) and value not in knobs[name]:
            nearest = f"valid: {', '.join(map(str, knobs[name]))}"
            raise ConfigError(f"is no value of the knob {name}", value=value, nearest=nearest)
        return
    dimension = DIMENSIONS.get(name)
    if dimension is None or dimension.is_number:
        if not _is_number(value):
            raise ConfigError(f"is compared with {name}, which is a number", value=value)
    else:
        dimension.check(value)


def _of_layout(config: ParallelConfig, name: str) -> KnobValue:
    if name == "replicas":
        return config.dp * config.cp * config.up
    if name == "context_parallel":
        return config.cp * config.up
    found: KnobValue = getattr(config, name)
    return found


def _column(grid: ConfigGrid, name: str) -> NDArray[np.int64]:
    """Return a dimension or figure of all layouts as integers [n]."""
    if name == "num_devices":
        found = grid.pp * grid.tp * grid.dp * grid.cp * grid.up
    elif name == "replicas":
        found = grid.dp * grid.cp * grid.up
    elif name == "context_parallel":
        found = grid.cp * grid.up
    else:
        found = getattr(grid, name)
    return np.asarray(found).astype(np.int64)


def _parse_value(word: str) -> KnobValue:
    if word in ("true", "false"):
        return word == "true"
    if _NUMBER.fullmatch(word):
        return float(word) if "." in word else int(word)
    return word.strip("'\"")


def _is_number(value: KnobValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
