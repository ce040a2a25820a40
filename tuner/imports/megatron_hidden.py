"""What a script hides: words of a command that may hold further flags, and the keys that stay open because of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, starmap
from typing import TypeVar

from hardware.io.errors import ConfigError, quote_value
from tuner.imports.bash.script import UNDER_A_CONDITION, Script
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flags, flag_name, flags_among
from tuner.imports.imported import Unread
from tuner.imports.torchrun import Launch

_T = TypeVar("_T")
_SWITCH = re.compile(
    r"--(use|no|disable|enable|overlap|untie|add|apply)-|--log-(?!interval)|--(bf16|fp16|swiglu|sequence-parallel)$|--.*="
    r"|--(deepspeed|group-query-attention|multi-latent-attention|checkpoint-activations|recompute-activations|mock-data)$"
)
"""Flags that take no further word as their value."""
_HOLDS_FLAGS = re.compile(r"\$\{?\w*(ARG|OPT|FLAG|PARAM|CONFIG|EXTRA|@|\*)", re.I)
"""Variables that hold flags even behind a flag that takes a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """Unknown word of the command that may hold further flags.

    Attributes:
        word: The word, with the reason.
        flags: Names of the flags that it holds under some condition.
        may_hold_more: Whether it may hold any other flag too.
    """

    word: Unread
    flags: frozenset[str] = frozenset()
    may_hold_more: bool = True

    def place_of(self, flags: Iterable[str]) -> str:
        """Return where the word holds one of these flags: surely but under a condition, or perhaps."""
        if UNDER_A_CONDITION in self.word.why and not self.flags.isdisjoint(flags):
            return f"stands in {self.word.what}, which is set on line {self.word.line} {UNDER_A_CONDITION}"
        return f"may stand in {self.word.what} (line {self.word.line})"


def hidden_words(words: Sequence[Argument], script: Script) -> tuple[Hidden, ...]:
    """Return the unknown words that may hold flags.

    A word may hold flags if it is an expansion and follows no flag that takes a value, if it is an array, or if its
    name contains ARG, OPT, FLAG, PARAM, CONFIG or EXTRA.
    """
    hidden = []
    for before, word in zip(("", *(word.text for word in words)), words, strict=False):
        is_array = len(script.variables.get(word.text.removeprefix("$"), ())) > 1
        if not word.unknown or not _may_hold_flags(before, word.text, is_array=is_array):
            continue
        held = (word.otherwise or "").split()
        more = word.otherwise is None or any(starmap(_may_hold_flags, pairwise(("", *held))))
        names = frozenset(flag_name(text) for text in held if text.startswith("--"))
        if names or more:
            why = f"{word.unknown}; flags in it were not read"
            why += "; if they are of LoRA, no study describes the training" if more else ""
            unread = Unread(what=word.text, why=why, line=word.line)
            hidden.append(Hidden(word=unread, flags=names, may_hold_more=more))
    return tuple(dict.fromkeys(hidden))


def _may_hold_flags(before: str, text: str, is_array: bool = False) -> bool:
    """Return whether an unknown word may hold flags, by its text and by the word before it."""
    if text[:1] not in ("$", "`"):
        return False
    is_free = not before.startswith("--") or _SWITCH.match(before.replace("_", "-")) is not None
    return is_free or is_array or _HOLDS_FLAGS.match(text) is not None


def agreed_words(words: tuple[Argument, ...], rivals: Sequence[Launch]) -> tuple[Argument, ...]:
    """Return the words of a command with those unknown for which another command has another value."""
    others = [{flag.name: flag.values for flag in flags_among(rival.training, dashed=True)} for rival in rivals]
    agreed, name = list(words), ""
    for at, word in enumerate(words):
        if word.text.startswith("--"):
            name, begin = flag_name(word.text), at
            continue
        for values in (other[name] for other in others if name in other):
            rival = values[at - begin - 1] if at - begin <= len(values) else None
            if rival is not None and rival.text != word.text and not word.unknown:
                why = f"is {word.text} on line {word.line} and {rival.text} on line {rival.line}"
                agreed[at] = replace(word, unknown=why)
    return tuple(agreed)


def hidden_by_rivals(words: Sequence[Argument], rivals: Sequence[Launch]) -> tuple[Hidden, ...]:
    """Return the flags that only one of several commands of the same program has."""
    own = {flag.name for flag in flags_among(words, dashed=True)}
    hidden = []
    for rival in rivals:
        names = own ^ {flag.name for flag in flags_among(rival.training, dashed=True)}
        why = f"starts the same program, and not with the same flags: {', '.join(sorted(names))}"
        unread = Unread(what="the command", why=why, line=rival.program[0].line)
        hidden += [Hidden(word=unread, flags=frozenset(names), may_hold_more=False)] if names else []
    return tuple(hidden)


@dataclass(slots=True)
class Found:
    """Flags of the command, with the facts that are collected while they are read.

    Attributes:
        flags: Flags of the training program.
        hidden: Words of the command that may hold further flags.
        open: Degrees and keys of the job whose values could not be read, with the reason for each.
        origins: Flags that state the degrees and keys of the job, with their lines.
        layers: Number of layers of each virtual stage, or empty.
        segments: Layers between the bars of a hybrid model's pattern, or empty.
    """

    flags: Flags
    hidden: tuple[Hidden, ...] = ()
    open: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()

    def number(self, name: str, *flags: str, default: int | None = None, minimum: int = 1) -> int | None:
        """Return the integer value of the first flag that is given, otherwise the default.

        A flag with a value that cannot be read is recorded in `open` under `name`, and so is a missing one if a part of
        the command that is not known may hold it.
        """
        given = next((flag for flag in flags if self.flags.has(flag)), None)
        if given is None:
            return self.absent(name, default, *flags)
        if self.may_change(name, *flags):
            return None
        self.state(name, given)
        try:
            number = self.flags.count(given, minimum=minimum)
        except ConfigError as error:
            self.refuse(error, name)
            return None
        if number is None:
            self.open[name] = str(next(one for one in reversed(self.flags.unread) if one.what == given))
        return number

    def state(self, name: str, flag: str) -> None:
        """Record the flag that states a key."""
        line = self.flags.line(flag)
        self.origins[name] = f"{flag} (line {line})" if line else flag

    def refuse(self, error: ConfigError, *names: str) -> None:
        """Record the keys that a flag with an invalid value leaves open."""
        place = re.sub(r"^line (\d+): (.*)", r"\2 (line \1)", error.key or "")
        self.open |= dict.fromkeys(names, f"{place}: {quote_value(error.value)} {error.rule}")

    def leave_open(self, flag: str, *names: str) -> None:
        """Record the keys that a flag without a readable value leaves open."""
        self.open |= dict.fromkeys(names, f"{flag} (line {self.flags.line(flag)}) cannot be read")

    def absent(self, name: str, default: _T, *flags: str) -> _T | None:
        """Return the default of a key whose flags are missing; None, and an open key, if they may be hidden."""
        if default is not None and (why := self._why_hidden(flags)):
            self.open[name] = why
            return None
        return default

    def needed(self, name: str, *flags: str) -> None:
        """Record why a key that every study needs is open, if a hidden word may hold its missing flags."""
        if name not in self.open and not self.flags.has(*flags) and (why := self._why_hidden(flags)):
            self.open[name] = why

    def may_change(self, name: str, *flags: str) -> bool:
        """Return whether a hidden word holds one of the flags under some condition; the key is then open."""
        why = self._why_hidden(flags, surely=True)
        if why:
            self.open[name] = why
        return bool(why)

    def may_hold(self, *flags: str) -> bool:
        """Return whether a hidden word holds one of the flags under some condition."""
        return bool(self._why_hidden(flags, surely=True))

    def _why_hidden(self, flags: Sequence[str], *, surely: bool = False) -> str:
        """Return which hidden words may hold one of the flags, or nothing.

        With `surely` only words count whose flags are known, and known to be there under some condition.
        """
        words = [one for one in self.hidden if not one.flags.isdisjoint(flags) or (one.may_hold_more and not surely)]
        return " and ".join(dict.fromkeys(one.place_of(flags) for one in words))
