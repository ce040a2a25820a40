"""What a measured row states about its runtime, its network and its kernels, in optional columns.

Without these columns the source's entry in catalog/sources.yaml decides, or guesses for an unknown source (sources.py).
What a row states overrides both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from costmodels.job.facts import Told, find_fact, parse_facts, shown
from costmodels.job.runtime import catalog_path
from costmodels.step.memory.peak import MemoryMeaning
from hardware.io.errors import ConfigError, did_you_mean
from hardware.link import link_spellings, spelling_key

PEAK = "peak_mem_counts"
STATED_COLUMNS = ("runtime", "devices_per_host", "link", "nic_gb_per_s", "attention", "facts", PEAK)
"""Columns that a file of measured runs may have, besides those that it must have."""

MOST = 1_000_000
"""Largest number of devices of a host and largest bandwidth, as in study files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedSetup:
    """Runtime, network and kernels that a row states; None and the empty tuple stand for what it leaves open.

    Attributes:
        runtime: Name of the runtime's profile in the catalog.
        devices_per_host: Devices that each host has.
        link: Kind of the network between hosts.
        nic_gb_per_s: Bandwidth of that network per device and direction [GB/s].
        facts: Facts of the run (costmodels/job/facts.py), the attention kernel among them.
        memory: What the measured peak counts.
    """

    runtime: str | None = None
    devices_per_host: int | None = None
    link: str | None = None
    nic_gb_per_s: float | None = None
    facts: Told = ()
    memory: MemoryMeaning | None = None

    def cells(self) -> dict[str, str]:
        """Return the text of each of STATED_COLUMNS that says the same."""
        others = (f"{name}={shown(value)}" for name, value in self.facts if name != "attention")
        return {
            "runtime": self.runtime or "",
            "devices_per_host": str(self.devices_per_host or ""),
            "link": self.link or "",
            "nic_gb_per_s": f"{self.nic_gb_per_s:g}" if self.nic_gb_per_s else "",
            "attention": str(dict(self.facts).get("attention", "")),
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


def _parse_facts(text: str, attention: str) -> Told:
    """Return the facts of a cell like `overlaps_gradients=true; gradient_bytes=2`, and that of the attention kernel."""
    facts: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            nearest = "for example overlaps_gradients=true; gradient_bytes=2"
            raise ConfigError("must be NAME=VALUE, several separated by ;", key="facts", value=part, nearest=nearest)
        if name in facts:
            raise ConfigError("states the fact twice; keep one", key=f"facts.{name}", value=value)
        facts[name] = value
    told = parse_facts(facts)
    if not attention:
        return told
    try:
        kernel = find_fact("attention").value_of(attention)
    except ConfigError as error:
        raise ConfigError(error.rule, key="attention", value=error.value, nearest=error.nearest) from None
    is_fused = find_fact("attention").fields_of(kernel)["fused_attention"]
    for name, said in (("attention", kernel), ("fused_attention", is_fused)):
        if dict(told).get(name, said) != said:
            rule = f"contradicts {name}={shown(dict(told)[name])} in `facts`"
            raise ConfigError(rule, key="attention", value=attention, nearest="state it in one column")
    return parse_facts(dict(told) | {"attention": kernel})
