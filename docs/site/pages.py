"""The pages that hold generated parts, as they should be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.site.commands import command_reference
from docs.site.regions import filled
from docs.site.study_file import key_tables
from docs.site.study_schema import plain_schema

DOCS = Path(__file__).parents[1]
SCHEMA = DOCS / "study.schema.json"

PAGES: Mapping[Path, Callable[[], Mapping[str, str]]] = {
    DOCS / "commands.md": command_reference,
    DOCS / "study-file.md": key_tables,
}
"""What the regions of each page hold."""


def written(page: Path) -> str:
    """A page's text with its regions as they should be."""
    return filled(page.read_text(encoding="utf-8"), PAGES[page]())


def schema_text() -> str:
    """The schema of study files for editors."""
    return json.dumps(plain_schema(), indent=2, ensure_ascii=False) + "\n"
