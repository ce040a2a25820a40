"""Places that a knob's value goes to: flags, an environment variable, a key of a file.

Beside its place, the value of each knob is a placeholder of the command under the knob's own name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.job.parallel_config import KnobValue
from hardware.io.errors import ConfigError, did_you_mean
from trials.knobs.subcommands import subcommand_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Places of one knob.

    Attributes:
        flag: Flag that takes the value; of a knob of true and false, the flag stands alone where it is true.
        flags: Words of the command for each value, by the value's text, in place of `flag`.
        environment: Environment variable that takes the value; null removes the variable.
        file: Name of the file of `trial.files` whose key takes the value.
        key: Key in that file, such as `zero_optimization.reduce_bucket_size`.
        removes: Flags of other settings that do not go with a value, by the value's text.
        keeps: Texts of values with which the framework's own flags stand.
    """

    flag: str = ""
    flags: tuple[tuple[str, tuple[str, ...]], ...] = ()
    environment: str = ""
    file: str = ""
    key: str = ""
    removes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    keeps: tuple[str, ...] = ()

    @property
    def takes_flags(self) -> bool:
        """Whether the value goes to words of the command."""
        return bool(self.flag or self.flags)

    @property
    def flag_names(self) -> frozenset[str]:
        """Flags that the knob sets, which no other part of the command may set."""
        named = {word.partition("=")[0] for _, words in self.flags for word in words if word.startswith("-")}
        return frozenset(named | ({self.flag.partition("=")[0]} if self.flag else set()))

    def replaced_flags(self, value: KnobValue) -> frozenset[str]:
        """Return the flags that no other part of the command may set beside a value."""
        if text_of(value) in self.keeps:
            return frozenset()
        return self.flag_names | frozenset(dict(self.removes).get(text_of(value), ()))

    def words(self, value: KnobValue) -> tuple[str, ...]:
        """Return the words of the command for a value; none where the knob has no flag or the value is absent."""
        if self.flags:
            return dict(self.flags).get(text_of(value), ())
        if not self.flag or value is None or value is False:
            return ()
        if value is True:
            return (self.flag,)
        return (f"{self.flag}{text_of(value)}",) if self.flag.endswith("=") else (self.flag, text_of(value))


NOWHERE = Place()
"""Place of a knob whose value goes to placeholders of the command only."""


def text_of(value: KnobValue) -> str:
    """Return a value as commands and variables spell it: true and false in lower case, whole floats without a dot."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def set_key(mapping: dict[str, Any], key: str, value: KnobValue) -> None:
    """Set a key such as `zero_optimization.stage` in a mapping of mappings; null takes it away.

    Raises:
        ConfigError: A part of the key is a value and no mapping.
    """
    *parents, last = key.split(".")
    for parent in parents:
        inner = mapping.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError("is no mapping in the file", key=key, value=parent, nearest=did_you_mean(parent, mapping))
        mapping = inner
    if value is None:
        mapping.pop(last, None)
    else:
        mapping[last] = value


def without_flags(arguments: Sequence[str], names: frozenset[str]) -> list[str]:
    """Return arguments without the flags of these names and the values that follow them.

    A value is a word after a flag that is no flag itself; a negative number is a value, and a subcommand is none.
    """
    found: list[str] = []
    is_dropped = False
    for argument in arguments:
        if _is_flag(argument):
            is_dropped = argument.partition("=")[0] in names
        if not is_dropped:
            found.append(argument)
    return found


def _is_flag(word: str) -> bool:
    if subcommand_of(word):
        return True
    return word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit()


def split_words(texts: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the words of each text, split as a shell does.

    Raises:
        ValueError: A quote has no partner.
    """
    return tuple((value, tuple(shlex.split(text))) for value, text in texts.items())
