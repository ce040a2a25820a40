"""Entry of a catalog: what its file states, and its row in a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hardware.io.catalogs import SHIPPED, CatalogFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Entry of a catalog.

    Attributes:
        file: File that states it, with its name and whose it is.
        keys: Its keys, as the file states them.
        row: Its telling values by column; None where there is none.
        sources: Sources that it cites, by the names in `keys`; empty where its keys say them.
        shadows: Whether it stands in place of one that Meshtune ships.
    """

    file: CatalogFile
    keys: Mapping[str, Any]
    row: Mapping[str, Any]
    sources: Mapping[str, str]
    shadows: bool = False

    @property
    def text(self) -> str:
        """YAML of the entry, as a file of a user's own catalog states it."""
        content = ({"sources": dict(self.sources)} if self.sources else {}) | dict(self.keys)
        text: str = yaml.safe_dump(content, sort_keys=False, width=110, allow_unicode=True)
        return text

    @property
    def origin_in_words(self) -> str:
        """Owner of the entry; empty for those that Meshtune ships."""
        if self.file.origin == SHIPPED:
            return ""
        return f"{self.file.origin}, in place of Meshtune's" if self.shadows else self.file.origin

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {"name": self.file.name, "origin": self.file.origin, "shadows": self.shadows, **self.row}

    def whole_as_json(self) -> dict[str, Any]:
        """Return the whole entry as JSON."""
        return {
            "name": self.file.name,
            "origin": self.file.origin,
            "shadows": self.shadows,
            "file": str(self.file.path),
            "entry": dict(self.keys),
            "sources": dict(self.sources),
        }


def cited(value: Any) -> set[str]:
    """Return the names of the sources that the numbers of an entry cite."""
    if isinstance(value, Mapping):
        own = {value["source"]} if "value" in value and "source" in value else set()
        return own.union(*map(cited, value.values()))
    return set().union(*map(cited, value)) if isinstance(value, list) else set()
