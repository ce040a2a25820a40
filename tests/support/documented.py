"""What the documentation shows: its code blocks, with their languages and what is said of running them."""

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
    """One code block.

    Attributes:
        page: The file it stands in.
        line: Where it begins.
        language: What follows its fence.
        text: What it holds.
        reason: Why it, or some of it, is not run; empty if it is.
        not_run: The commands of `meshtune` that the reason is about; empty for all.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str
    not_run: tuple[str, ...]

    def runs(self, words: list[str]) -> bool:
        """Whether a command line of the block is to be run."""
        return not self.reason or (bool(self.not_run) and words[1] not in self.not_run)


def blocks_of(page: Path) -> list[Block]:
    """The code blocks of a page, in their order."""
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
    """The commands of a shell block as words: comments left out, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def quoted_commands(page: Path) -> list[list[str]]:
    """Commands that stand in a line of prose, as words."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    spans = re.findall(r"(?<!`)`((?:meshtune|python -m) [^`]+)`", text)
    return [shlex.split(" ".join(span.split())) for span in spans]
