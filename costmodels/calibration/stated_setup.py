"""What a measured row states about its runtime, its network and its kernels, in optional columns.

Without these columns the source's entry in catalog/sources.yaml decides, or guesses for an unknown source (sources.py).
What a row states overrides both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from costmodels.job.runtime import RuntimeProfile, catalog_path
from costmodels.step.memory.peak import MemoryMeaning
from hardware.io.errors import ConfigError, did_you_mean
from hardware.link import link_spellings, spelling_key

PEAK = "peak_mem_counts"
STATED_COLUMNS = ("runtime", "devices_per_host", "link", "nic_gb_per_s", "attention", "facts", PEAK)
"""Columns that a file of measured runs may have, besides those that it must have."""

ATTENTION_KERNELS = {"flash": True, "unfused": False}
"""Words for the attention kernel: one that keeps no scores, such as FlashAttention or cuDNN's, or separate kernels."""

LEAST = {
    "layer_padding": 1,
    "vocabulary_multiple": 1,
    "gradient_bytes": 1,
    "gradient_message_bytes": 1,
    "gradient_bucket": 0,
    "weight_bucket": 0,
    "stalled_hosts": 0,
}
"""Facts that are whole numbers, with the smallest value that each may have."""

MOST = 1_000_000
"""Largest number of devices of a host and largest bandwidth, as in study files."""

Fact = bool | int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedSetup:
    """Runtime, network and kernels that a row states; None and the empty tuple stand for what it leaves open.

    Attributes:
        runtime: Name of the runtime's profile in the catalog.
        devices_per_host: Devices that each host has.
        link: Kind of the network between hosts.
        nic_gb_per_s: Bandwidth of that network per device and direction [GB/s].
        facts: Pairs of a fact of the profile and its value, the attention kernel among them.
        memory: What the measured peak counts.
    """

    runtime: str | None = None
    devices_per_host: int | None = None
    link: str | None = None
    nic_gb_per_s: float | None = None
    facts: tuple[tuple[str, Fact], ...] = ()
    memory: MemoryMeaning | None = None

    def cells(self) -> dict[str, str]:
        """Return the text of each of STATED_COLUMNS that says the same."""
        is_fused = dict(self.facts).get("fused_attention")
        others = (f"{name}={_shown(value)}" for name, value in self.facts if name != "fused_attention")
        return {
            "runtime": self.runtime or "",
            "devices_per_host": str(self.devices_per_host or ""),
            "link": self.link or "",
            "nic_gb_per_s": f"{self.nic_gb_per_s:g}" if self.nic_gb_per_s else "",
            "attention": next((word for word, value in ATTENTION_KERNELS.items() if value == is_fused), ""),
            "facts": "; ".join(others),
            PEAK: self.memory or "",
        }

    def __str__(self) -> str:
        """Describe what is stated, apart from the meaning of the peak; empty if that is nothing."""
        return "; ".join(f"{column} {text}" for column, text in self.cells().items() if text and column != PEAK)


NOTHING = StatedSetup()


def parse_stated(
    cells: Mapping[str, str], *, devices_per_host: int | None, nic_gb_per_s: float | None, place: str
) -> StatedSetup:
    """Return what a row states in STATED_COLUMNS.

    Args:
        cells: Texts of the row by column, empty where a column is absent.
        devices_per_host: The cell of that column as a number.
        nic_gb_per_s: The cell of that column as a number.
        place: Position of the row, for messages.

    Raises:
        ConfigError: a cell names no runtime, link, kernel or fact, or a fact has a value that it cannot have.
    """
    if not any(cells[column] for column in STATED_COLUMNS):
        return NOTHING
    try:
        for column, number in (("devices_per_host", devices_per_host), ("nic_gb_per_s", nic_gb_per_s)):
            if number is not None and not 0 < number <= MOST:
                raise ConfigError(f"must be above 0 and at most {MOST:,}", key=column, value=cells[column])
        if cells["runtime"]:
            _check_runtime(cells["runtime"])
        meanings = dict(zip(get_args(MemoryMeaning), get_args(MemoryMeaning), strict=True))
        links = dict.fromkeys(link_spellings(), cells["link"])
        return StatedSetup(
            runtime=cells["runtime"] or None,
            devices_per_host=devices_per_host,
            link=_find_word(cells["link"], links, "link"),
            nic_gb_per_s=nic_gb_per_s,
            facts=_parse_facts(cells["facts"], cells["attention"]),
            memory=_find_word(cells[PEAK], meanings, PEAK),
        )
    except ConfigError as error:
        raise error.in_file(place) from None


def _check_runtime(name: str) -> None:
    try:
        catalog_path(name)
    except ConfigError as error:
        raise ConfigError(error.rule, key="runtime", value=name, nearest=error.nearest) from None


def _find_word(text: str, choices: Mapping[str, Any], key: str) -> Any:
    """Return what the text means; None if it is empty. Case, spaces, dashes and underscores don't matter."""
    if not text:
        return None
    meanings = {spelling_key(name): meaning for name, meaning in choices.items()}
    if spelling_key(text) not in meanings:
        raise ConfigError("is not among its values", key=key, value=text, nearest=did_you_mean(text, choices))
    return meanings[spelling_key(text)]


def _parse_facts(text: str, attention: str) -> tuple[tuple[str, Fact], ...]:
    """Return the facts of a cell like `overlaps_gradients=true; gradient_bytes=2`, and that of the attention kernel."""
    facts: dict[str, Fact] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            nearest = "for example overlaps_gradients=true; gradient_bytes=2"
            raise ConfigError("must be NAME=VALUE, several separated by ;", key="facts", value=part, nearest=nearest)
        if name in facts:
            raise ConfigError("states the fact twice; keep one", key=f"facts.{name}", value=value)
        facts[name] = _parse_fact(name, value)
    is_fused = _find_word(attention, ATTENTION_KERNELS, "attention")
    if is_fused is not None and facts.setdefault("fused_attention", is_fused) != is_fused:
        rule = f"contradicts fused_attention={_shown(not is_fused)} in `facts`"
        raise ConfigError(rule, key="attention", value=attention, nearest="state it in one column")
    return tuple(sorted(facts.items()))


def _parse_fact(name: str, text: str) -> Fact:
    key = f"facts.{name}"
    if name in LEAST:
        # digits are bounded so that a forged file cannot make huge integers
        if not re.fullmatch(r"\d{1,12}", text) or int(text) < LEAST[name]:
            rule = f"must be a whole number from {LEAST[name]}, of at most 12 digits"
            raise ConfigError(rule, key=key, value=text)
        return int(text)
    if name not in FACT_VALUES:
        nearest = did_you_mean(name, {*FACT_VALUES, *LEAST})
        raise ConfigError("is no fact that a row can state", key=key, value=text, nearest=nearest)
    fact: Fact = _find_word(text or "(empty)", {_shown(value): value for value in FACT_VALUES[name]}, key)
    return fact


def _values_of(hint: Any) -> tuple[Fact, ...]:
    """Return the values of a type that has only a few; empty for all other types."""
    if hint is bool:
        return True, False
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return tuple(value for part in get_args(hint) for value in _values_of(part))
    return ()


def _shown(value: Fact) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


FACT_VALUES = {
    name: values
    for name, hint in get_type_hints(RuntimeProfile).items()
    if name != "knows_cluster"
    if (values := _values_of(hint))
}
"""Values of each fact of a profile that has only a few; `knows_cluster` is none, it says how the profile was made."""
