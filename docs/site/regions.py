"""Parts of a page that a program writes, between two comments that no reader sees."""

from __future__ import annotations

import re
from collections.abc import Mapping

_REGION = re.compile(r"(<!-- generated: (?P<name>\S+) -->\n).*?(<!-- end of (?P=name) -->\n)", re.DOTALL)


def names_of(page: str) -> list[str]:
    """The names of a page's regions, in their order."""
    return [found["name"] for found in _REGION.finditer(page)]


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with every region written anew.

    Args:
        page: Markdown.
        parts: What each of its regions holds, by name.
    """
    return _REGION.sub(lambda found: f"{found[1]}\n{parts[found['name']]}\n\n{found[3]}", page)
