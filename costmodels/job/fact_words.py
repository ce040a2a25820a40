"""Facts of a run in the words of frameworks: read from what a program is started with, and written for it.

`Given` holds what was found: the values of each flag, key or variable by its name; a switch has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from costmodels.job.facts import NUMBER, Fact, FactValue, facts
from hardware.io.errors import ConfigError

Given = Mapping[str, tuple[str, ...]]

_TYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "fp8"}
"""Words of frameworks for types, by those that logs print."""


def read_facts(framework: str, given: Given) -> tuple[dict[str, FactValue], dict[str, str]]:
    """Return the facts that the words of a framework say, and those that they leave open.

    Args:
        framework: Framework of the words.
        given: All words of a program by their names.

    Returns:
        Values of facts, where a word says them or its absence does, but not of those that the words of an earlier one
        settle; and for each fact whose words are given and not understood, these words.
    """
    plain = {name: tuple(map(_plain, values)) for name, values in given.items()}
    told: dict[str, FactValue] = {}
    unclear: dict[str, str] = {}
    settled: set[str] = set()
    for fact in facts().values():
        if framework not in fact.written or fact.name in settled:
            continue
        value = _said(fact, framework, plain)
        names = [name for name in _leading(fact, framework) if name in plain]
        if value is not None:
            told[fact.name] = value
            settled |= fact.fields_of(value).keys()
        elif names:
            unclear[fact.name] = " ".join([names[0], *given[names[0]]])
        elif framework in fact.absent:
            told[fact.name] = fact.absent[framework]
    return told, unclear


_SHARED = "--use-precision-aware-optimizer"
"""Flag that several facts need, and that says none of them by itself."""


def _leading(fact: Fact, framework: str) -> list[str]:
    """Return the names with which words of a fact begin; others only add to them."""
    pairs = (_parsed(words) for choices in fact.written[framework].values() for words in choices)
    firsts = (next(name for name, _ in named if name != _SHARED) for named in pairs)
    return list(dict.fromkeys(firsts))


def _said(fact: Fact, framework: str, given: Given) -> FactValue | None:
    """Return the value whose words are given; of several, that with the most words."""
    best: tuple[int, FactValue] | None = None
    everything = [dict(_parsed(words)) for choices in fact.written[framework].values() for words in choices]
    for text, choices in fact.written[framework].items():
        for words in choices:
            number = _matches(words, given)
            if number is None or _goes_on(dict(_parsed(words)), everything, given):
                continue
            try:
                value = fact.value_of(number if text == NUMBER else text)
            except ConfigError:
                continue
            if best is None or len(words.split()) >= best[0]:
                best = len(words.split()), value
    return best[1] if best else None


def _goes_on(words: Given, everything: Sequence[Given], given: Given) -> bool:
    """Return whether words are the begin of longer ones, of which a name is given with another value."""
    longer = (one for one in everything if len(one) > len(words) and words.items() <= one.items())
    further = {name for one in longer for name in one if name not in words and name in given}
    return any(not any(one.get(name) == given[name] for one in everything) for name in further)


def _matches(words: str, given: Given) -> str | None:
    """Return whether words are all given: None if not, else the number in place of `{}`, or an empty text."""
    number = ""
    for name, wanted in _parsed(words):
        found = given.get(name)
        if found is None:
            return None
        # what a shell would put there stands for further words of the command
        while len(found) > len(wanted) and found[-1].startswith("$"):
            found = found[:-1]
        if wanted == (NUMBER,):
            if len(found) != 1:
                return None
            number = found[0]
        elif found != tuple(map(_plain, wanted)) and not (wanted and _is_option(wanted[0], found)):
            return None
    return number


def _is_option(wanted: str, found: tuple[str, ...]) -> bool:
    """Return whether an option of a variable is among those that commas separate in its value."""
    return ":" in wanted and len(found) == 1 and wanted in found[0].split(",")


def _parsed(words: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names of words, each with its values."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for word in words.split():
        if word.startswith("--") and "=" not in word:
            found.append((word, ()))
        elif "=" in word:
            name, _, value = word.partition("=")
            found.append((name, (value,)))
        else:
            name, values = found.pop()
            found.append((name, (*values, word)))
    return found


def _plain(text: str) -> str:
    """Return a value without what logs put before it, such as `torch.bfloat16` and `AttnBackend.auto`."""
    last = text.rpartition(".")[2] if re.fullmatch(r"[A-Za-z]\w*\.[A-Za-z]\w*", text) else text
    return _TYPES.get(last, last)


def names_of(fact: Fact, framework: str) -> list[str]:
    """Return the names of a framework's flags, keys or variables for a fact."""
    texts = (words for choices in fact.written.get(framework, {}).values() for words in choices)
    return list(dict.fromkeys(name for words in texts for name, _ in _parsed(words)))


def all_names(framework: str) -> frozenset[str]:
    """Return the names of a framework's flags, keys or variables for all facts."""
    return frozenset(name for fact in facts().values() for name in names_of(fact, framework))


def numbers_of_values(framework: str) -> dict[str, int]:
    """Return the largest number of values of each of a framework's flags for facts."""
    texts = [
        words for fact in facts().values() for choices in fact.written.get(framework, {}).values() for words in choices
    ]
    found: dict[str, int] = {}
    for name, values in (pair for words in texts for pair in _parsed(words)):
        found[name] = max(found.get(name, 0), len(values))
    return found


def has_words(framework: str, name: str, value: FactValue) -> bool:
    """Return whether a framework can be told a fact, or has it without being told."""
    fact = facts()[name]
    choices = fact.written.get(framework, {})
    is_said = NUMBER in choices or any(fact.value_of(text) == value for text in choices)
    return is_said or fact.absent.get(framework) == value


def written_words(framework: str, told: Iterable[tuple[str, FactValue]]) -> tuple[str, ...]:
    """Return the words that say facts to a framework, each once; nothing where they are the framework's default."""
    found: dict[str, None] = {}
    for name, value in told:
        fact = facts()[name]
        choices = fact.written.get(framework, {})
        if fact.absent.get(framework) == value:
            continue
        text = next((text for text in choices if text != NUMBER and fact.value_of(text) == value), None)
        words = choices[text][0] if text is not None else choices[NUMBER][0] if NUMBER in choices else ""
        for flag, values in _parsed(words.replace(NUMBER, f"{value:g}" if isinstance(value, float) else str(value))):
            separator = " " if flag.startswith("--") else "="
            found[separator.join([flag, " ".join(values)]).strip()] = None
    return tuple(found)


def flat(mapping: Mapping[str, object], prefix: str = "") -> dict[str, tuple[str, ...]]:
    """Return the keys of a nested configuration in dotted form, with their values as texts."""
    found: dict[str, tuple[str, ...]] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = (str(value).lower() if isinstance(value, bool) else str(value),)
    return found
