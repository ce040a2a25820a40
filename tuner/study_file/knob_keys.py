"""Keys of a study file's `space.knobs:`, and the knobs that they describe."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, KnobValue
from costmodels.step.breakdown import BREAKDOWN
from hardware.io.config_file import DocumentedModel
from hardware.io.errors import ConfigError, did_you_mean
from trials.command.placeholders import FLAGS, KNOBS, PLACEHOLDERS
from trials.command.training_folder import TRAINING
from trials.knobs.condition import ALWAYS, FIGURES, parse_condition
from trials.knobs.knob import Knob
from trials.knobs.places import Place, split_words, text_of
from tuner.search.knobs.knob_space import MAX_COMBINATIONS, MEMORY

MAX_VALUES = 64

MOST_OF_KNOB = 10**18
"""Largest number that a knob may have, in either direction: the largest that a study's storage holds."""
MAX_KNOBS = 64

NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FLAG = re.compile(r"--?[A-Za-z0-9][A-Za-z0-9_.:-]*=?")

TAKEN = frozenset({*DEGREES, *FURTHER_DIMENSIONS, *FIGURES, *PLACEHOLDERS, FLAGS, KNOBS, "knobs"}) - {*TRAINING}
"""Names that no knob may have, because they stand for something else. Those of a training are free outside of one."""

AFFECTED = {MEMORY: MEMORY, **{part: part for part in BREAKDOWN}} | {
    f"{part} communication": part for part in ("tp", "cp", "up", "ep", "dp", "pp")
}
"""Parts of a step that `affects` may name, by the words for them."""


class RangeKeys(DocumentedModel):
    """`range:` of a knob, for numbers."""

    first: float
    """Smallest value."""

    last: float
    """Largest value."""

    factor: Annotated[float, Field(gt=1)] | None = None
    """Ratio of neighbouring values.

    Default: none; `factor` or `step` is needed
    """

    step: Annotated[float, Field(gt=0)] | None = None
    """Difference of neighbouring values.

    Default: none; `factor` or `step` is needed
    """


class KnobKeys(DocumentedModel):
    """Entry of `space.knobs:`, a knob of your own; see [knobs](knobs.md)."""

    name: str = ""
    """Name of the knob: small letters, digits and underscores. Its value takes the place of `{name}` in the command, in
    variables and in files.

    Default: none; `name` or `catalog` is needed
    """

    catalog: str | None = None
    """Name of a [known knob](known-knobs.md), of which the other keys change something, such as its `values`.

    Default: none: the knob is your own
    """

    values: list[bool | int | float | str | None] | None = None
    """Values to search; null stands for a flag, variable or key that is absent. Without values and `range`, `[false,
    true]`.

    Default: `[false, true]`
    """

    range: RangeKeys | None = None
    """Numbers to search in place of `values`.

    Default: none
    """

    today: bool | int | float | str | None = None
    """Value in use today, to which effects are relative.

    Default: the first value
    """

    flag: str | dict[str, str] | None = None
    """Flag that takes the value, such as `--ddp-bucket-size`; of a knob of true and false, the flag stands alone where
    it is true. Or the words for each value, by the value.

    Default: none
    """

    environment: str | None = None
    """Environment variable that takes the value; null removes it.

    Default: none
    """

    file: str | None = None
    """Name of a file of `trial.files`, in whose copy the value is written under `key`.

    Default: none
    """

    key: str | None = None
    """Key in that file, such as `zero_optimization.reduce_bucket_size`.

    Default: none
    """

    when: str = ""
    """Condition under which the knob is set at all, such as `tp > 1 and recompute == none`. It may compare the
    dimensions of a layout, `num_devices`, `replicas`, `context_parallel`, and knobs that stand before.

    Default: always
    """

    affects: list[str] = Field(default_factory=list)
    """What it may change: `memory`, and parts of the step, such as `tp communication` or `compute`. The search then
    ties the effect to their share of each layout's step.

    Default: nothing is known
    """


def build_knobs(entries: Sequence[KnobKeys]) -> tuple[Knob, ...]:
    """Return the knobs of a study.

    Raises:
        ConfigError: An entry makes no sense; the key names it by its position.
    """
    if len(entries) > MAX_KNOBS:
        raise ConfigError(f"holds more than {MAX_KNOBS} knobs", key="space.knobs", value=len(entries))
    knobs: list[Knob] = []
    for number, keys in enumerate(entries):
        try:
            knobs.append(_build(keys, knobs))
        except ConfigError as error:
            raise error.under(f"space.knobs.{number}") from None
    _check_places(knobs)
    _check_groups(knobs)
    return tuple(knobs)


def _build(keys: KnobKeys, before: Sequence[Knob]) -> Knob:
    if not NAME.fullmatch(keys.name):
        raise ConfigError("must be small letters, digits and underscores, no digit first", key="name", value=keys.name)
    if keys.name in TAKEN or keys.name in {knob.name for knob in before}:
        rule = "is the name of another knob" if keys.name not in TAKEN else "stands for something else"
        raise ConfigError(rule, key="name", value=keys.name, nearest=f"my_{keys.name}")
    values = _values(keys)
    today = keys.today if "today" in keys.model_fields_set else values[0]
    if not any(_is_same(today, value) for value in values):
        nearest = f"valid: {', '.join(_shown(value) for value in values)}"
        raise ConfigError("is none of the values", key="today", value=today, nearest=nearest)
    known = {knob.name: knob.values for knob in before}
    try:
        when = parse_condition(keys.when, known) if keys.when.strip() else ALWAYS
    except ConfigError as error:
        raise error.under("when") from None
    for at, part in enumerate(keys.affects):
        if part not in AFFECTED:
            nearest = did_you_mean(part, AFFECTED)
            raise ConfigError("is no part of a step, and not memory", key=f"affects.{at}", value=part, nearest=nearest)
    return Knob(
        name=keys.name,
        values=values,
        today=today,
        place=_place(keys, values),
        when=when,
        affects=tuple(dict.fromkeys(AFFECTED[part] for part in keys.affects)),
    )


def _values(keys: KnobKeys) -> tuple[KnobValue, ...]:
    if keys.values is not None and keys.range is not None:
        raise ConfigError("is given beside values", key="range", nearest="either values or range")
    if keys.range is not None:
        return _of_range(keys.range)
    values: tuple[KnobValue, ...] = (False, True) if keys.values is None else tuple(keys.values)
    if not 2 <= len(values) <= MAX_VALUES:
        rule = f"must be from 2 to {MAX_VALUES} values"
        raise ConfigError(rule, key="values", value=len(values), nearest="a knob of one value needs no search")
    for value in values:
        if isinstance(value, int | float) and not -MOST_OF_KNOB <= value <= MOST_OF_KNOB:
            rule = f"must be finite, from {-MOST_OF_KNOB:g} to {MOST_OF_KNOB:g}"
            raise ConfigError(rule, key="values", value=value)
        # Optuna and Python take 1, 1.0 and true for one value
        if sum(other == value for other in values) > 1:
            raise ConfigError("holds a value twice", key="values", value=value)
    return values


def _of_range(keys: RangeKeys) -> tuple[KnobValue, ...]:
    """Return the numbers of a range, whole ones as integers."""
    if not keys.first < keys.last:
        raise ConfigError("must end above its first value", key="range", value=[keys.first, keys.last])
    if max(abs(keys.first), abs(keys.last)) > MOST_OF_KNOB:
        rule = f"must be from {-MOST_OF_KNOB:g} to {MOST_OF_KNOB:g}"
        raise ConfigError(rule, key="range", value=[keys.first, keys.last])
    if (keys.factor is None) == (keys.step is None):
        raise ConfigError("needs either factor or step", key="range", nearest="factor: 2")
    if keys.factor is not None and keys.first <= 0:
        raise ConfigError("must begin above 0 with a factor", key="range.first", value=keys.first, nearest="step")
    found: list[float] = []
    value = keys.first
    while value <= keys.last * (1 + 1e-9):
        if len(found) == MAX_VALUES:
            raise ConfigError(f"has more than {MAX_VALUES} values", key="range", nearest="a larger factor or step")
        found.append(value)
        value = keys.first * keys.factor ** len(found) if keys.factor else keys.first + (keys.step or 0) * len(found)
    if len(found) < 2:
        raise ConfigError("holds one value only", key="range", value=found, nearest="a smaller factor or step")
    return tuple(int(value) if float(value).is_integer() else value for value in found)


def _place(keys: KnobKeys, values: Sequence[KnobValue]) -> Place:
    if (keys.file is None) != (keys.key is None):
        missing = "file" if keys.file is None else "key"
        raise ConfigError("is required beside the other", key=missing, nearest="file: NAME and key: a.b")
    if keys.environment is not None and not VARIABLE.fullmatch(keys.environment):
        raise ConfigError("is no name of an environment variable", key="environment", value=keys.environment)
    flag, words = "", {}
    if isinstance(keys.flag, str):
        flag = keys.flag
        if not FLAG.fullmatch(flag):
            raise ConfigError("is no flag", key="flag", value=flag, nearest="for example --ddp-bucket-size")
    elif keys.flag is not None:
        words = keys.flag
        texts = [text_of(value) or "null" for value in values]
        for text in words:
            if text not in texts:
                raise ConfigError("is none of the values", key="flag", value=text, nearest=did_you_mean(text, texts))
        words = {"" if text == "null" else text: line for text, line in words.items()}
    try:
        flags = split_words(words)
    except ValueError as error:
        raise ConfigError(f"cannot be split into words: {error}", key="flag") from None
    return Place(flag=flag, flags=flags, environment=keys.environment or "", file=keys.file or "", key=keys.key or "")


def _check_places(knobs: Sequence[Knob]) -> None:
    """Check that no two knobs that may be set together write the same variable or key."""
    for at, knob in enumerate(knobs):
        for other in knobs[:at]:
            place, taken = knob.place, other.place
            if knob.when.excludes(other.when):
                continue
            if place.environment and place.environment == taken.environment:
                raise ConfigError(
                    f"is set by the knob {other.name} too", key=f"space.knobs.{at}.environment", value=place.environment
                )
            if place.file and (place.file, place.key) == (taken.file, taken.key):
                raise ConfigError(f"is set by the knob {other.name} too", key=f"space.knobs.{at}.key", value=place.key)
            shared = place.flag_names & taken.flag_names
            if shared:
                raise ConfigError(
                    f"is set by the knob {other.name} too", key=f"space.knobs.{at}.flag", value=sorted(shared)[0]
                )


def _check_groups(knobs: Sequence[Knob]) -> None:
    """Check that knobs whose conditions name one another have not too many combinations."""
    linked: list[set[str]] = []
    for knob in knobs:
        joined = [group for group in linked if group & {*knob.when.knobs}]
        linked = [group for group in linked if group not in joined] + [{knob.name}.union(*joined)]
    sizes = {knob.name: len(knob.values) for knob in knobs}
    for group in linked:
        if math.prod(sizes[name] for name in group) > MAX_COMBINATIONS:
            raise ConfigError(
                f"links knobs with more than {MAX_COMBINATIONS:,} combinations by their conditions",
                key="space.knobs",
                value=sorted(group),
                nearest="fewer values, or conditions on the layout alone",
            )


def _is_same(one: KnobValue, other: KnobValue) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _shown(value: KnobValue) -> str:
    return "null" if value is None else text_of(value)
