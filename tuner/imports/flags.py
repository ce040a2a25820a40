"""The flags of a command by name, read with checks; what is no value is kept as unread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costmodels.job.model_spec import MAX_COUNT
from hardware.io.errors import ConfigError
from tuner.imports.bash.texts import Argument
from tuner.imports.imported import Unread


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag with its values."""

    name: str
    line: int
    values: tuple[Argument, ...]


def flags_among(words: Iterable[Argument]) -> list[Flag]:
    """The flags among words, in their order; a value is what follows up to the next flag, or behind `=`."""
    flags: list[tuple[str, int, list[Argument]]] = []
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text.partition("=")
            values = [Argument(text=value, line=word.line, unknown=word.unknown)] if equals else []
            flags.append((name, word.line, values))
        elif flags:
            flags[-1][2].append(word)
    return [Flag(name=name, line=line, values=tuple(values)) for name, line, values in flags]


class Flags:
    """The flags of one command, of which the last of a name counts.

    `unread` collects what was asked for and has no readable value.
    """

    def __init__(self, flags: Sequence[Flag]) -> None:
        self._flags = {flag.name: flag for flag in flags}
        self.unread: list[Unread] = []

    def has(self, *names: str) -> bool:
        """Whether one of the flags stands there."""
        return any(name in self._flags for name in names)

    def line(self, name: str) -> int | None:
        """Where a flag stands."""
        return self._flags[name].line if name in self._flags else None

    def text(self, name: str) -> str | None:
        """The first value; None where there is none that is known."""
        flag = self._flags.get(name)
        if flag is None:
            return None
        if not flag.values or flag.values[0].unknown:
            self.leave(name, flag.values[0].unknown if flag.values else "has no value")
            return None
        return flag.values[0].text.strip("'\"")

    def count(self, *names: str, minimum: int = 1) -> int | None:
        """The whole number behind the first of the flags that stands there; None where none has a known one.

        Raises:
            ConfigError: there is a value, and it is no whole number from `minimum` on.
        """
        for name in names:
            text = self.text(name)
            if text is None:
                continue
            if not re.fullmatch(r"[0-9]{1,10}", text) or not minimum <= int(text) <= MAX_COUNT:
                raise ConfigError(
                    f"must be a whole number from {minimum} to {MAX_COUNT}", key=self._place(name), value=text
                )
            return int(text)
        return None

    def values(self, name: str) -> tuple[Argument, ...]:
        """All words behind a flag."""
        return self._flags[name].values if name in self._flags else ()

    def counts(self, name: str) -> tuple[int, ...]:
        """All values, where they are whole numbers; else none."""
        texts = [value.text for value in self.values(name)]
        return tuple(map(int, texts)) if all(re.fullmatch(r"[0-9]{1,10}", text) for text in texts) else ()

    def one_of(self, name: str, known: dict[str, str], default: str) -> str:
        """What the value means by `known`; the default where the flag is missing or its value unknown."""
        text = self.text(name)
        if text is None:
            return default
        if text not in known:
            self.leave(name, f"{text} is not modelled; taken as {default}")
        return known.get(text, default)

    def leave(self, name: str, why: str) -> None:
        """Keeps a flag as unread."""
        self.unread.append(Unread(what=name, why=why, line=self.line(name)))

    def _place(self, name: str) -> str:
        return f"line {self.line(name)}: {name}"
