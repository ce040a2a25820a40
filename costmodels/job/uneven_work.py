"""Uneven work: layers of each stage, micro-batches of each replica, and the order of hosts.

An assignment belongs to a configuration beside its degrees. An empty field leaves its part to the runtime: layers and
micro-batches in equal shares, all hosts in the cluster's order. Hosts that a list of hosts leaves out are idle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from itertools import groupby

from hardware.io.errors import ConfigError, did_you_mean

MOST_NUMBERS = 1_000_000
_NUMBERS = re.compile(r"\d{1,9}(-\d{1,9})?(x\d{1,9})?(/\d{1,9}(-\d{1,9})?(x\d{1,9})?)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Work that unlike devices, or unlike stages, get.

    Attributes:
        layers: Layers of each virtual stage, in the order of the model [pp * vpp].
        recomputed: Layers of each virtual stage that the backward pass runs again in full [pp * vpp]; the others follow
            the configuration's `recompute`.
        micro_batches: Micro-batches of each data parallel replica [dp].
        hosts: Hosts of the cluster in the order in which ranks count them [hosts]; those left out are idle.
    """

    layers: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that no cluster could mean."""
        for name in ASSIGNMENT_FIELDS:
            values = getattr(self, name)
            if any(type(value) is not int or value < 0 for value in values):
                raise ConfigError("must be whole numbers of at least 0", key=name, value=values)
        if len(set(self.hosts)) < len(self.hosts):
            raise ConfigError("must name each host once", key="hosts", value=self.hosts)
        if 0 in self.micro_batches:
            raise ConfigError("must give every replica a micro-batch", key="micro_batches", value=self.micro_batches)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in ASSIGNMENT_FIELDS)

    def __str__(self) -> str:
        """Print the form that `parse_assignment` reads; nothing where everything is even."""
        told = [(name, getattr(self, name)) for name in ASSIGNMENT_FIELDS]
        return ",".join(f"{name}={numbers_in_words(values)}" for name, values in told if values)


ASSIGNMENT_FIELDS = tuple(field.name for field in fields(Assignment))

EVEN = Assignment()
"""Assignment with all work in equal shares."""


def numbers_in_words(numbers: tuple[int, ...]) -> str:
    """Abbreviate runs of equal and of ascending numbers: `6/6/6/8` as `6x3/8`, and `0/1/2/3/9` as `0-3/9`."""
    words: list[str] = []
    for _, group in groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0]):
        run = [number for _, number in group]
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    counted = [(word, len(list(equal))) for word, equal in groupby(words)]
    return "/".join(f"{word}x{count}" if count > 1 else word for word, count in counted)


def parse_numbers(text: str, key: str) -> tuple[int, ...]:
    """Parse the numbers that `numbers_in_words` writes.

    Raises:
        ConfigError: the text is no list of numbers, or one of its ranges descends.
    """
    if not _NUMBERS.fullmatch(text):
        raise ConfigError("must be whole numbers between slashes", key=key, value=text, nearest="for example 20x3/18")
    found: list[int] = []
    for word in text.split("/"):
        run, _, times = word.partition("x")
        first, _, last = run.partition("-")
        if int(last or first) < int(first):
            raise ConfigError("has a range that descends", key=key, value=word)
        if (int(last or first) - int(first) + 1) * int(times or 1) + len(found) > MOST_NUMBERS:
            raise ConfigError(f"has more than {MOST_NUMBERS:,} numbers", key=key, value=word)
        repeated = [*range(int(first), int(last or first) + 1)] * int(times or 1)
        found += repeated
    return tuple(found)


def parse_assignment(text: str) -> Assignment:
    """Parse an assignment such as `layers=20x3/18,micro_batches=40/24`; an empty text is EVEN.

    Raises:
        ConfigError: an entry is none of the fields, or its numbers can't be read.
    """
    values: dict[str, tuple[int, ...]] = {}
    for entry in filter(None, text.split(",")):
        name, _, numbers = entry.partition("=")
        if name not in ASSIGNMENT_FIELDS:
            nearest = did_you_mean(name, ASSIGNMENT_FIELDS)
            raise ConfigError("is no part of an assignment", key="assignment", value=entry, nearest=nearest)
        values[name] = parse_numbers(numbers, f"assignment.{name}")
    return Assignment(**values)
