"""Tables of flags as a framework's parser declares them, and the parser that turns arguments into typed values.

A wrong argument raises a ConfigError that names the flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from costmodels.job.fact_words import numbers_of_values
from hardware.io.errors import ConfigError, did_you_mean

FlagValue = bool | int | str | tuple[int, ...] | tuple[str, ...] | None
Values = Mapping[str, FlagValue]
"""Values by flag or key; keys that were not given are absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """Declaration of one flag.

    Attributes:
        kind: Kind of value: none (switch), one integer, one word, or a list of either.
        choices: Words that the flag accepts; empty if it accepts every word.
    """

    kind: Literal["switch", "number", "word", "numbers", "words"] = "number"
    choices: tuple[str, ...] = ()


def fact_flags(framework: str) -> dict[str, Flag]:
    """Return the flags of a framework that say facts of a run, as its parser declares them."""
    most = numbers_of_values(framework)
    return {
        name: Flag(kind="switch" if number == 0 else "word" if number == 1 else "words")
        for name, number in most.items()
    }


def read_flags(arguments: Sequence[str], table: Mapping[str, Flag]) -> dict[str, FlagValue]:
    """Parse arguments into values by flag.

    Raises:
        ConfigError: a flag is unknown or given twice, or its value has the wrong kind.
    """
    values: dict[str, FlagValue] = {}
    position = 0
    while position < len(arguments):
        name = arguments[position]
        if name not in table:
            raise ConfigError("is not a flag of this framework", value=name, nearest=did_you_mean(name, table))
        if name in values:
            raise ConfigError("is given twice", key=name)
        end = position + 1
        while end < len(arguments) and arguments[end] not in table and not arguments[end].startswith("--"):
            end += 1
        values[name] = _parse_value(name, arguments[position + 1 : end], table[name])
        position = end
    return values


def _parse_value(name: str, words: Sequence[str], flag: Flag) -> FlagValue:
    if flag.kind == "switch":
        if words:
            raise ConfigError("takes no value", key=name, value=words[0])
        return True
    several = flag.kind in ("numbers", "words")
    if not words or (len(words) > 1 and not several):
        raise ConfigError(f"takes {'at least ' if several else ''}one value", key=name, value=" ".join(words) or None)
    if flag.kind in ("number", "numbers"):
        numbers = tuple(_parse_number(name, word) for word in words)
        return numbers if several else numbers[0]
    for word in words:
        if flag.choices and word not in flag.choices:
            raise ConfigError("is not a choice", key=name, value=word, nearest=did_you_mean(word, flag.choices))
    return tuple(words) if several else words[0]


def _parse_number(name: str, word: str) -> int:
    """Convert a word to an integer of at most 18 characters."""
    if not word.removeprefix("-").isdecimal() or not word.isascii() or len(word) > 18:
        raise ConfigError("must be a whole number", key=name, value=word)
    return int(word)
