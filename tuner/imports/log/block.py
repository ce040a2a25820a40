"""Contract of a finder: it is shown every line of a log, and keeps what its framework printed about itself."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
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


class AbstractYamlFinder(AbstractFinder):
    """Finder of a configuration that a framework prints as YAML; the last one that begins counts.

    Attributes:
        VOCABULARY: Expression for the tokenizer's vocabulary on any line of the log.
        begun: Line on which the configuration begins; None if there was none yet.
        lines: Lines of the YAML so far.
        is_open: Whether its end has not come yet.
        vocab_size: Size of the tokenizer's vocabulary; empty if unknown.
    """

    VOCABULARY: ClassVar[re.Pattern[str]]

    def __init__(self) -> None:
        self.begun: Line | None = None
        self.lines: list[str] = []
        self.is_open = False
        self.vocab_size = ""

    @abstractmethod
    def first_lines(self, line: Line) -> list[str]:
        """Return what belongs to the YAML of the line on which the configuration begins."""

    @abstractmethod
    def read_on(self, line: Line) -> None:
        """Take a line while the configuration is open."""

    def take(self, line: Line) -> None:
        """Take a line of the log, of which only those of the rank that printed the configuration belong to it."""
        if self.begins(line):
            self.begun, self.lines, self.is_open = line, self.first_lines(line), True
            return
        if "vocab" in line.text and (found := self.VOCABULARY.search(line.text)) is not None:
            self.vocab_size = found[1]
        if self.is_open and self.begun and line.rank == self.begun.rank and len(self.lines) <= MOST_LINES:
            self.read_on(line)

    def loaded(self, begun: Line, *, framework: str, nearest: str, is_whole: bool = True) -> dict[str, Any]:
        """Return the configuration that begins on that line.

        Args:
            begun: Line on which it begins.
            framework: Name of the framework, for the error.
            nearest: Kind of log that would do, for the error.
            is_whole: Whether its end was found, as far as it has a mark.

        Raises:
            ConfigError: It is cut off or invalid, or has no mapping `model:`.
        """
        try:
            found = parse_yaml(textwrap.dedent("\n".join(self.lines)))
        except ConfigError:
            found = None
        if not is_whole or not isinstance(found, dict) or not isinstance(found.get("model"), dict):
            raise ConfigError(
                f"{framework}'s configuration is cut off, or has no `model:`",
                key=f"line {begun.number}",
                value=begun.message.strip()[:80],
                nearest=nearest,
            )
        return found


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
