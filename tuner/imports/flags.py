"""Flags of a command by name, with checked access to their values.

Flags without a readable value are collected as unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costmodels.job.decoder import MAX_COUNT
from hardware.io.errors import ConfigError
from tuner.imports.bash.texts import Argument
from tuner.imports.imported import Doubt, Unread


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """Flag with its values, as it was found on one line of the script; line 0 if its file has no lines of flags."""

    name: str
    line: int
    values: tuple[Argument, ...]


def flag_name(text: str) -> str:
    """Return the name of the flag in a word, with dashes in place of underscores."""
    return text.partition("=")[0].replace("_", "-")


def flags_among(words: Iterable[Argument], *, dashed: bool = False) -> list[Flag]:
    """Return the flags among words, in their order; `dashed` writes their names with dashes in place of underscores.

    The values of a flag are the text after `=` and the words up to the next flag.
    """
    flags: list[tuple[str, int, list[Argument]]] = []
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text.partition("=")
            name = flag_name(name) if dashed else name
            values = [Argument(text=value, line=word.line, unknown=word.unknown)] if equals else []
            flags.append((name, word.line, values))
        elif flags:
            flags[-1][2].append(word)
    return [Flag(name=name, line=line, values=tuple(values)) for name, line, values in flags]


class Flags:
    """Flags of one command. If a flag is given several times, its last occurrence counts.

    Attributes:
        unread: Requested flags that have no readable value.
        doubts: Flags whose value no study has.
    """

    def __init__(self, flags: Sequence[Flag]) -> None:
        self._flags = {flag.name: flag for flag in flags}
        self._asked: set[str] = set()
        self.unread: list[Unread] = []
        self.doubts: list[Doubt] = []

    def has(self, *names: str) -> bool:
        """Return whether at least one of the flags is given."""
        self._asked.update(names)
        return any(name in self._flags for name in names)

    @property
    def asked(self) -> frozenset[str]:
        """Names of the flags that somebody has asked for so far."""
        return frozenset(self._asked)

    def is_unknown(self, name: str) -> bool:
        """Return whether a flag is given and its first value is missing or unknown."""
        values = self._flags[name].values if name in self._flags else ()
        return name in self._flags and (not values or bool(values[0].unknown))

    def line(self, name: str) -> int | None:
        """Return the line of a flag, or None if it is not given."""
        return self._flags[name].line if name in self._flags else None

    def text(self, name: str) -> str | None:
        """Return the first value of a flag, or None if the flag or its value is missing or unknown."""
        self._asked.add(name)
        flag = self._flags.get(name)
        if flag is None:
            return None
        if not flag.values or flag.values[0].unknown:
            self.leave(name, flag.values[0].unknown if flag.values else "has no value")
            return None
        return flag.values[0].text.strip("'\"")

    def text_if_known(self, name: str) -> str:
        """Return the first value of a flag, empty if it is missing or unknown, which is not recorded."""
        self._asked.add(name)
        flag = self._flags.get(name)
        return flag.values[0].text.strip("'\"") if flag and flag.values and not flag.values[0].unknown else ""

    def count(self, *names: str, minimum: int = 1) -> int | None:
        """Return the integer value of the first of the flags that has a known value, or None if none has one.

        Raises:
            ConfigError: the value is not an integer between `minimum` and the largest allowed count.
        """
        for name in names:
            text = self.text(name)
            if text is None:
                continue
            if not re.fullmatch(r"[0-9]{1,10}", text) or not minimum <= int(text) <= MAX_COUNT:
                raise ConfigError(
                    f"must be a whole number from {minimum} to {MAX_COUNT}", key=self.place(name), value=text
                )
            return int(text)
        return None

    def values(self, name: str) -> tuple[Argument, ...]:
        """Return all words after a flag."""
        self._asked.add(name)
        return self._flags[name].values if name in self._flags else ()

    def words(self, name: str) -> tuple[str, ...]:
        """Return the values of a flag as the command spells them, without quotes."""
        return tuple(value.text.strip("'\"") for value in self.values(name))

    def counts(self, name: str) -> tuple[int, ...]:
        """Return all values of a flag if every one of them is an integer, otherwise an empty tuple."""
        texts = [value.text for value in self.values(name)]
        return tuple(map(int, texts)) if all(re.fullmatch(r"[0-9]{1,10}", text) for text in texts) else ()

    def one_of(self, name: str, known: dict[str, str], default: str, *, key: str | None = None) -> str:
        """Look the value up in `known`. Return the default if the flag is missing or its value is not in `known`.

        With a key of the study, or an empty text for none, a value that is not in `known` is asked for.
        """
        text = self.text(name)
        if text is None:
            return default
        if text not in known and key is not None:
            self.doubt(name, f"{text} is not modelled; ignored, it counts as {default}", key)
        elif text not in known:
            self.leave(name, f"{text} is not modelled; read as {default}")
        return known.get(text, default)

    def imply(self, name: str, value: str, *, by: str) -> None:
        """Set a flag that another flag decides, on that flag's line; an empty value stands for a switch."""
        line = self.line(by) or 0
        values = (Argument(text=value, line=line),) if value else ()
        self._flags[name] = Flag(name=name, line=line, values=values)

    def leave(self, name: str, why: str) -> None:
        """Record a flag as unread, with the reason."""
        self.unread.append(Unread(what=name, why=why, line=self.line(name)))

    def doubt(self, name: str, why: str, key: str = "") -> None:
        """Record a flag that the user has to say the meaning of, by the key of the study if one is given."""
        self.doubts.append(Doubt(flag=name, why=why, key=key, line=self.line(name)))

    def place(self, name: str) -> str:
        """Return the name of a flag together with its line, if it has one, as the key of an error."""
        line = self.line(name)
        return f"line {line}: {name}" if line else name
