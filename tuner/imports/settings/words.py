"""Settings among the words of a command: `key=value`, as Hydra and MaxText take them, and options with values."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.imports.bash.texts import Argument

_OVERRIDE = re.compile(r"(?P<signs>[+~]{0,2})(?P<key>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Words of a command that belong together: one setting, or one word that is none.

    Attributes:
        words: The words.
        keys: Keys that the setting sets; empty for a word that is no setting.
        text: Value as the command gives it.
        unknown: Why the value is unknown; empty if it is known.
    """

    words: tuple[Argument, ...]
    keys: tuple[str, ...] = ()
    text: str = ""
    unknown: str = ""

    @property
    def line(self) -> int:
        """Line of the script on which the setting stands."""
        return self.words[0].line


def overrides_among(words: Sequence[Argument], options: Mapping[str, tuple[str, ...]]) -> list[Item]:
    """Return the words of a command as settings `key=value`, options that set keys, and all others.

    Args:
        words: Words behind the program.
        options: Keys that each option sets by the word behind it, or behind its `=`.
    """
    found: list[Item] = []
    at = 0
    while at < len(words):
        word = words[at]
        name, equals, value = word.text.partition("=")
        override = None if word.text.startswith("-") else _OVERRIDE.fullmatch(word.text)
        if name in options and (equals or at + 1 < len(words)):
            behind = word if equals else words[at + 1]
            taken = (word,) if equals else (word, behind)
            text = value if equals else behind.text
            found.append(Item(words=taken, keys=options[name], text=text, unknown=behind.unknown))
            at += len(taken)
            continue
        if override is not None:
            found.append(Item(words=(word,), keys=(override["key"],), text=override["value"], unknown=word.unknown))
        else:
            found.append(Item(words=(word,), unknown=word.unknown))
        at += 1
    return found


def flags_with_values(words: Sequence[Argument]) -> list[Item]:
    """Return the words of a command as options `--name value...`, by names with underscores, and all others."""
    found: list[Item] = []
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            name, _, value = word.text.removeprefix("--").partition("=")
            found.append(Item(words=(word,), keys=(name.replace("-", "_"),), text=value, unknown=word.unknown))
        elif found and found[-1].keys:
            last = found.pop()
            text = f"{last.text} {word.text}".strip()
            found.append(
                Item(words=(*last.words, word), keys=last.keys, text=text, unknown=last.unknown or word.unknown)
            )
        else:
            found.append(Item(words=(word,), unknown=word.unknown))
    return found


def known_values(items: Iterable[Item]) -> dict[str, Any]:
    """Return the known values of settings by their keys; of several the last one counts."""
    return {key: parse_value(item.text) for item in items if not item.unknown for key in item.keys}


def unknown_values(items: Iterable[Item]) -> dict[str, str]:
    """Return why the values of settings are unknown, by their keys."""
    return {key: item.unknown for item in items if item.unknown for key in item.keys}


def parse_value(text: str) -> Any:
    """Return a value as YAML reads it, which is as Hydra does for what settings hold; text that is no YAML stays."""
    if text in ("None", "none"):
        return None
    if re.fullmatch(r"'.*'|\".*\"", text, re.S):
        return text[1:-1]
    try:
        return parse_yaml(text)
    except ConfigError:
        return text


def merged(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings with values under dotted keys set in them."""
    result = copy.deepcopy(dict(base))
    for key, value in values.items():
        *path, name = key.split(".")
        inner = result
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[name] = value
    return result
