"""Code blocks of the documentation, with their languages and the remarks that exempt them from running."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "configs/**/README.md")
    for path in ROOT.glob(pattern)
)

_FENCE = re.compile(
    r"(?:<!-- not run(?: \((?P<commands>[^)]*)\))?: (?P<reason>[^>]+) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Code block of a page.

    Attributes:
        page: File that contains the block.
        line: Line number at which the block begins.
        language: Language named after the opening fence.
        text: Content of the block.
        reason: Reason why the block, or a part of it, is not run; empty if all of it is run.
        not_run: Commands of `meshtune` that the reason is about; empty for all commands.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str
    not_run: tuple[str, ...]

    def runs(self, words: list[str]) -> bool:
        """Check whether a command line of the block is to be run."""
        return not self.reason or (bool(self.not_run) and words[1] not in self.not_run)


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            text=found["text"],
            reason=found["reason"] or "",
            not_run=tuple(re.findall(r"\w+", found["commands"] or "")),
        )
        for found in _FENCE.finditer(text)
    ]


def command_lines(text: str) -> list[list[str]]:
    """Split a shell block into commands, each a list of words, without comments and with continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def quoted_commands(page: Path) -> list[list[str]]:
    """Return the commands quoted in the prose of a page, each as a list of words."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    spans = re.findall(r"(?<!`)`((?:meshtune|python -m) [^`]+)`", text)
    return [shlex.split(" ".join(span.split())) for span in spans]
