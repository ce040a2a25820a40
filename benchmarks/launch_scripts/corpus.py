"""Scripts of a folder, each with the command that starts it and the ways in that can read it.

The folder holds one folder for each project. A file `NAME.args` beside a script holds the words behind it, in the form
of a shell; leading `NAME=VALUE` words are variables of the environment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hardware.io.config_file import read_text
from tuner.imports.flagscale import train_file_of
from tuner.study_file.new_study import MOST_BYTES

SHELL = (".sh", ".bash", ".slurm", ".sbatch")
_FILES = (".toml", ".yaml", ".yml")
_FRAMEWORKS = {".toml": "torchtitan"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Launch script or configuration file.

    Attributes:
        project: Name of the project's folder.
        path: Path of the file.
        text: Its text.
        environment: Variables of the environment as `NAME=VALUE`.
        arguments: Words behind the script.
    """

    project: str
    path: Path
    text: str
    environment: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def is_shell(self) -> bool:
        """Whether a shell runs the file."""
        return self.path.suffix in SHELL

    @property
    def command(self) -> tuple[str, ...]:
        """Command that starts the script from its own folder."""
        start = ("bash", self.path.name, *self.arguments)
        return ("env", *self.environment, *start) if self.environment else start

    @property
    def framework(self) -> str:
        """Name of the importer of a configuration file."""
        if self.path.suffix in _FRAMEWORKS:
            return _FRAMEWORKS[self.path.suffix]
        if re.search(r"^parallelism:", self.text, re.M) and re.search(r"^tokens:", self.text, re.M):
            return "nanotron"
        return "flagscale" if re.search(r"^(experiment|system):", self.text, re.M) else "gpt-neox"

    @property
    def train_text(self) -> str:
        """Text of the file that an experiment of FlagScale names for training, or nothing."""
        beside = train_file_of(self.text) if self.framework == "flagscale" else ""
        path = self.path.parent / beside
        return read_text(path, most_bytes=MOST_BYTES) if beside and path.is_file() else ""


def scripts_in(folder: Path) -> Iterator[Script]:
    """Yield the scripts of a folder, in the order of their paths."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (*SHELL, *_FILES) or not path.is_file():
            continue
        beside = path.with_name(path.name + ".args")
        words = shlex.split(beside.read_text(encoding="utf-8")) if beside.is_file() else []
        variables = [word for word in words if re.match(r"[A-Za-z_]\w*=", word)]
        yield Script(
            project=path.relative_to(folder).parts[0],
            path=path,
            text=path.read_text(encoding="utf-8", errors="replace"),
            environment=tuple(variables),
            arguments=tuple(word for word in words if word not in variables),
        )
