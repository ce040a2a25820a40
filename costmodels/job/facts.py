"""Table of the facts of a run (catalog/facts.yaml): their values, what they set in a profile, and their words.

Four places say them, each before the one left of it: the profile of the runtime, the script that `meshtune init` read,
`facts:` of a study, and a knob. Remarks of published runs say them too (costmodels/calibration).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field

from costmodels.job.runtime import RuntimeProfile
from hardware.io.config_file import StrictModel, number_in, read_mapping, validate_mapping
from hardware.io.errors import ConfigError, did_you_mean
from hardware.link import spelling_key

FactValue = bool | int | float | str
Told = tuple[tuple[str, FactValue], ...]
"""Facts with their values, in the order of the table."""

NUMBER = "{}"
"""Key and place of a number among the words of a framework."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """Row of the table.

    Attributes:
        name: Name of the fact.
        text: Meaning in words.
        values: Its values, in words or as numbers; empty if it is any number of a range.
        sets: Fields of a profile that each value stands for; empty if the field is the fact's own name.
        spelled: Further spellings of values.
        bounds: Smallest and largest number.
        is_whole: Whether its numbers are whole.
        needs: What a job must have for it: `experts`, `bf16` weights, `fp8`, `offload` or `muon`; empty if any job
            has it.
        written: Words of each framework by value; the first ones are written, all are read.
        absent: What holds in a framework whose words are absent.
        listed: Pattern that says it in a source that lists all its flags; empty if none does.
        remarks: Patterns in remarks of published runs, with the value of each.
    """

    name: str
    text: str
    values: tuple[FactValue, ...] = ()
    sets: Mapping[FactValue, Mapping[str, Any]] = field(default_factory=dict)
    spelled: Mapping[str, FactValue] = field(default_factory=dict)
    bounds: tuple[float, float] = (0.0, 0.0)
    is_whole: bool = True
    needs: str = ""
    written: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    absent: Mapping[str, FactValue] = field(default_factory=dict)
    listed: str = ""
    remarks: tuple[tuple[str, FactValue], ...] = ()

    def value_of(self, given: Any) -> FactValue:
        """Return the value that a key of a file or a cell of a table gives.

        Raises:
            ConfigError: The fact has no such value; the message names the nearest, or the bounds.
        """
        key, text = f"facts.{self.name}", shown(given)
        if not self.values:
            return self._number(given, text, key)
        known = {shown(value): value for value in self.values} | dict(self.spelled)
        meanings = {spelling_key(word): value for word, value in known.items()}
        if spelling_key(text) not in meanings:
            nearest = did_you_mean(text, [shown(value) for value in self.values])
            raise ConfigError("is not among its values", key=key, value=text or "(empty)", nearest=nearest)
        return meanings[spelling_key(text)]

    def _number(self, given: Any, text: str, key: str) -> FactValue:
        lower, upper = self.bounds
        # digits are bounded so that a forged file cannot make huge integers
        number = number_in(text) if len(text) <= 24 and not isinstance(given, bool) else None
        if number is None or not lower <= number <= upper or (self.is_whole and number != int(number)):
            kind = "a whole number" if self.is_whole else "a number"
            rule = f"must be {kind} from {lower:,.10g} to {upper:,.10g}"
            within = None if number is None else min(max(number, lower), upper)
            nearest = None if within is None else f"{round(within) if self.is_whole else within:g}"
            raise ConfigError(rule, key=key, value=given, nearest=nearest)
        return int(number) if self.is_whole else float(number)

    def fields_of(self, value: FactValue) -> Mapping[str, Any]:
        """Return the fields of a profile that a value stands for."""
        return self.sets[value] if self.sets else {self.name: value}

    def holds_in(self, profile: RuntimeProfile) -> FactValue | None:
        """Return the value that a profile has; None if it has none of them."""
        if not self.sets:
            return getattr(profile, self.name)  # type: ignore[no-any-return] # a field of a profile
        held = (value for value, sets in self.sets.items() if all(getattr(profile, k) == v for k, v in sets.items()))
        return next(held, None)


class _Row(StrictModel):
    """Grammar of one row."""

    text: str
    values: dict[str, dict[str, Any]] = Field(default_factory=dict)
    spelled: dict[str, str] = Field(default_factory=dict)
    range: Annotated[list[int | float], Field(min_length=2, max_length=2)] | None = None
    numbers: list[int] = Field(default_factory=list)
    needs: Literal["", "experts", "bf16", "fp8", "offload", "muon"] = ""
    written: dict[str, dict[str, list[str] | str]] = Field(default_factory=dict)
    listed: str = ""
    remarks: dict[str, bool | str] = Field(default_factory=dict)


@cache
def facts() -> Mapping[str, Fact]:
    """Return the rows of the table by name.

    A row with `values` stands before the rows of the fields that it sets, which are more exact than it.
    """
    path = Path(__file__).parents[1] / "catalog" / "facts.yaml"
    hints = get_type_hints(RuntimeProfile)
    return {
        name: _fact(name, validate_mapping(_Row, row, file=str(path)), hints.get(name))
        for name, row in read_mapping(path).items()
    }


def _fact(name: str, row: _Row, hint: Any) -> Fact:
    few = () if row.range else _values_of(hint)
    values: tuple[FactValue, ...] = tuple(row.values) or tuple(row.numbers) or few
    bare = Fact(
        name=name,
        text=row.text,
        values=values,
        sets={value: row.values[str(value)] for value in values} if row.values else {},
        spelled=row.spelled,
        bounds=(float(row.range[0]), float(row.range[1])) if row.range else (0.0, 0.0),
        is_whole=hint is not float,
        needs=row.needs,
        listed=row.listed,
    )
    named = {framework: dict(words) for framework, words in row.written.items()}
    absent = {framework: bare.value_of(words.pop("absent")) for framework, words in named.items() if "absent" in words}
    return replace(
        bare,
        written={
            framework: {value: tuple(words) for value, words in by_value.items()}
            for framework, by_value in named.items()
        },
        absent=absent,
        remarks=tuple((pattern, bare.value_of(value)) for pattern, value in row.remarks.items()),
    )


def _values_of(hint: Any) -> tuple[FactValue, ...]:
    """Return the values of a type that has only a few."""
    if hint is bool:
        return True, False
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for part in get_args(hint) for value in _values_of(part)) if _is_union(hint) else ()


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def find_fact(name: str) -> Fact:
    """Return a row of the table.

    Raises:
        ConfigError: The table has no such row; the message names the nearest.
    """
    if name not in facts():
        raise ConfigError("is no fact of a run", key=f"facts.{name}", nearest=did_you_mean(name, facts()))
    return facts()[name]


def parse_facts(given: Mapping[str, Any]) -> Told:
    """Return the facts that the keys of a study or the cells of a table give, in the order of the table.

    Raises:
        ConfigError: A fact is unknown, or has no such value.
    """
    found = {name: find_fact(name).value_of(value) for name, value in given.items()}
    return tuple((name, found[name]) for name in facts() if name in found)


def profile_fields(told: Iterable[tuple[str, FactValue]]) -> dict[str, Any]:
    """Return the fields of a profile that facts stand for; of two, the more exact one counts."""
    given = dict(told)
    found: dict[str, Any] = {}
    for name, fact in facts().items():
        if name in given:
            found |= fact.fields_of(given[name])
    return found


def with_facts(profile: RuntimeProfile, told: Told) -> RuntimeProfile:
    """Return a profile in which facts hold, also if other profiles predict the same run."""
    if not told:
        return profile
    new = profile_fields(told)
    # of facts that were stated before, those go whose fields are stated anew
    kept = {name: value for name, value in profile.stated if not find_fact(name).fields_of(value).keys() <= new.keys()}
    return replace(profile, **new, stated=parse_facts(kept | dict(told)))


def under_profile(profile: RuntimeProfile, stated: Told) -> RuntimeProfile:
    """Return another profile with the facts that are stated of a run, and with no others."""
    return replace(profile, **profile_fields(stated), stated=stated)


def shown(value: Any) -> str:
    """Return a value as files spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
