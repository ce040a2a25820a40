"""Contract of a finder: it is shown every line of a log, and keeps what its framework printed about itself."""

from __future__ import annotations

import ast
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tuner.imports.imported import Imported
from tuner.imports.log.lines import Line

MOST_LINES = 50_000
"""Number of lines that one printed configuration may have: torchtitan prints a hundred for each layer."""


class AbstractFinder(ABC):
    """Finder of what one framework prints before its first step."""

    @abstractmethod
    def begins(self, line: Line) -> bool:
        """Return whether the framework starts to print its configuration on this line."""

    @abstractmethod
    def take(self, line: Line) -> None:
        """Take one line of the log, in their order."""

    @abstractmethod
    def imported(self) -> Imported | None:
        """Return what was found, as the framework's importer understands it; None if there was nothing.

        Raises:
            ConfigError: The configuration is cut off, invalid, or that of a model that Meshtune does not know.
        """


def parse_mapping(lines: Sequence[str], indent: int) -> dict[str, Any] | None:
    """Parse a printed mapping, which is JSON or a Python literal; return None as long as it is incomplete.

    Its last line is a brace as far to the left as the line on which it begins, which is indented by `indent`.
    """
    last = lines[-1].rstrip()
    if len(lines) > 1 and (last.lstrip() != "}" or len(last) - 1 > indent):
        return None
    text = "\n".join(lines)
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return found if isinstance(found, dict) else None


def indent_of(text: str) -> int:
    """Return the number of blanks before a text."""
    return len(text) - len(text.lstrip())
