"""Generated regions of a Markdown page: they lie between two HTML comments, which a rendered page does not show."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REGION = re.compile(r"(<!-- generated: (?P<name>\S+) -->\n).*?(<!-- end of (?P=name) -->\n)", re.DOTALL)


def names_of(page: str) -> list[str]:
    """Return the names of the regions of a page, in the order of the page."""
    return [found["name"] for found in _REGION.finditer(page)]


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with the content of every region replaced.

    Args:
        page: Text of the page in Markdown, with its regions.
        parts: New content of each region, by name of the region.

    Raises:
        KeyError: If the page has a region without an entry in `parts`.
    """
    return _REGION.sub(lambda found: f"{found[1]}\n{parts[found['name']]}\n\n{found[3]}", page)
