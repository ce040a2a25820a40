"""Pages with generated regions, the functions that generate these regions, and the schema file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.site.commands import command_reference
from docs.site.facts import fact_tables
from docs.site.known_knobs import knob_tables
from docs.site.models import model_tables
from docs.site.placement_file import operator_tables, placement_tables
from docs.site.price_file import price_tables
from docs.site.regions import filled
from docs.site.study_file import key_tables
from docs.site.study_schema import plain_schema

DOCS = Path(__file__).parents[1]

PAGES: Mapping[Path, Callable[[], Mapping[str, str]]] = {
    DOCS / "commands.md": command_reference,
    DOCS / "study-file.md": key_tables,
    DOCS / "placement.md": placement_tables,
    DOCS / "research" / "operators.md": operator_tables,
    DOCS / "costs.md": price_tables,
    DOCS / "facts.md": fact_tables,
    DOCS / "known-knobs.md": knob_tables,
    DOCS / "models.md": model_tables,
}
"""Function that generates the regions of each page, by name of the region."""


def written(page: Path) -> str:
    """Return the text of a page with all its regions generated anew."""
    return filled(page.read_text(encoding="utf-8"), PAGES[page]())


def schema_text() -> str:
    """Return the text of the JSON schema of study files that editors use."""
    return json.dumps(plain_schema(), indent=2, ensure_ascii=False) + "\n"
