"""A knob: a dimension of the user's own, of which the cost models know nothing but what it may affect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.job.parallel_config import KnobValue, ParallelConfig
from trials.knobs.condition import ALWAYS, Condition
from trials.knobs.places import NOWHERE, Place, without_flags


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """Setting beside the layout that the search varies.

    Attributes:
        name: Name of the knob, which is a parameter of trials and a placeholder of commands.
        values: Values that it may have, at least two.
        today: Value in use today, one of `values`; effects are counted relative to it.
        place: Places that the value goes to.
        when: Condition under which it is set at all.
        affects: Parts of the step and of memory that it may change; empty if that is not known.
    """

    name: str
    values: tuple[KnobValue, ...]
    today: KnobValue
    place: Place = NOWHERE
    when: Condition = ALWAYS
    affects: tuple[str, ...] = ()

    @property
    def code_today(self) -> int:
        """Position of today's value among the values."""
        return self.values.index(self.today)

    @property
    def is_ordered(self) -> bool:
        """Whether the values are numbers, so that neighbours have similar effects."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)


def active_knobs(knobs: Sequence[Knob], config: ParallelConfig) -> list[tuple[Knob, KnobValue]]:
    """Return the knobs that a configuration sets, with their values: those whose condition holds.

    A configuration without a value of a knob, such as one from before there was the knob, has today's.
    """
    chosen = today_of(knobs) | dict(config.knobs)
    return [(knob, chosen[knob.name]) for knob in knobs if knob.when.holds_for(config, chosen)]


def knob_words(knobs: Sequence[Knob], config: ParallelConfig) -> list[str]:
    """Return the words of the command for the knobs of a configuration."""
    return [word for knob, value in active_knobs(knobs, config) for word in knob.place.words(value)]


def without_knob_flags(arguments: Sequence[str], knobs: Sequence[Knob], config: ParallelConfig) -> list[str]:
    """Return a framework's flags without those that knobs of the configuration set."""
    active = active_knobs(knobs, config)
    owned = frozenset(name for knob, value in active for name in knob.place.replaced_flags(value))
    return without_flags(arguments, owned)


def knob_environment(knobs: Sequence[Knob], config: ParallelConfig) -> list[tuple[str, KnobValue]]:
    """Return the environment variables of the knobs of a configuration, with their values; None removes one."""
    return [(knob.place.environment, value) for knob, value in active_knobs(knobs, config) if knob.place.environment]


def knob_file_keys(knobs: Sequence[Knob], config: ParallelConfig) -> dict[str, dict[str, KnobValue]]:
    """Return the keys of files that the knobs of a configuration set, with their values, by the files' names."""
    found: dict[str, dict[str, KnobValue]] = {}
    for knob, value in active_knobs(knobs, config):
        if knob.place.file:
            found.setdefault(knob.place.file, {})[knob.place.key] = value
    return found


def today_of(knobs: Iterable[Knob]) -> dict[str, KnobValue]:
    """Return today's values of the knobs, by name."""
    return {knob.name: knob.today for knob in knobs}


def describe_knobs(knobs: Sequence[Knob]) -> list[dict[str, Any]]:
    """Return what gives the values of knobs their meaning, as JSON."""
    return [
        {
            "name": knob.name,
            "values": list(knob.values),
            "today": knob.today,
            "when": str(knob.when),
            "flag": {text: list(words) for text, words in knob.place.flags} or knob.place.flag,
            "environment": knob.place.environment,
            "file": [knob.place.file, knob.place.key] if knob.place.file else [],
        }
        for knob in knobs
    ]
