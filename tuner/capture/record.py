"""Record of one command that a stand-in received instead of the real program."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tuner.capture.slurm import Allocation

MOST_BYTES = 250_000
"""Largest configuration file that is kept with a record [bytes]."""
CONFIGURATIONS = (".json", ".toml", ".yaml", ".yml")
"""Endings of the files among a command's arguments whose text is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Command that a script started.

    Attributes:
        words: Name of the program and its arguments, as the shell passed them.
        directory: Working directory.
        environment: Environment variables of the command.
        through: Commands around it, outermost first, such as `srun` and its options.
        files: Text of each configuration file that the arguments name, by the word that names it.
        allocation: Hosts and devices that Slurm's options or MPI's give to the command.
        held_back: Whether the program is one that a capture never runs, other than a training program.
    """

    words: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    through: tuple[tuple[str, ...], ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    allocation: Allocation = field(default_factory=Allocation)
    held_back: bool = False

    def to_json(self) -> str:
        """Return the record as one JSON object."""
        return json.dumps(asdict(self))


def record_paths(folder: Path, *, most: int, most_bytes: int) -> list[Path]:
    """Return the files of records in a folder in their order, up to a number and a size of all [bytes].

    A script may put other things there: what is no plain file is left out.
    """
    found = []
    for path in sorted(folder.glob("[0-9]*.json"))[:most]:
        status = path.lstat()
        most_bytes -= status.st_size
        if most_bytes < 0:
            break
        if stat.S_ISREG(status.st_mode):
            found.append(path)
    return found


def files_among(words: tuple[str, ...], directory: Path) -> dict[str, str]:
    """Return the text of each configuration file that the words name.

    Names are relative to the directory, or to a folder that another word names, as GPT-NeoX's launcher takes them.
    """
    found = {}
    # a list of numbers is longer than any name, which pathlib refuses to look for
    folders = [directory, *(directory / word for word in words if os.path.isdir(directory / word))]  # noqa: PTH112
    for word in words:
        name = word.rpartition("=")[2] if word.startswith("-") else word
        if not name.endswith(CONFIGURATIONS):
            continue
        path = next((folder / name for folder in folders if os.path.isfile(folder / name)), directory / name)  # noqa: PTH113
        try:
            if path.is_file() and path.stat().st_size <= MOST_BYTES:
                found[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    return found


_BLANK = "\u00a0"
"""Stands for a blank in the words of a command whose output is not known, so that a shell keeps them together."""


def output_of(words: Sequence[str]) -> str:
    """Return the text that stands for the output of a command which could not be run: one word of a shell."""
    return f"$({' '.join(words)})".replace(" ", _BLANK)


def split_outputs(word: str) -> list[tuple[str, bool]]:
    """Split a word of a record into plain parts and commands `$(...)` whose output is not known."""
    parts = re.split(rf"(\$\([^()]*{_BLANK}?[^()]*\))", word) if _BLANK in word else [word]
    return [(part.replace(_BLANK, " "), part.startswith("$(") and _BLANK in part) for part in parts if part]
