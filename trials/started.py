"""Command, environment and files that one trial starts, to be read before it runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What one trial starts.

    A value that is known only when the trial starts stands as its placeholder in braces, and one of the environment of
    `meshtune run`, which may be a secret, as `$NAME`.

    Attributes:
        in_words: Sentence on what starts where.
        command: Words of the user's command on one host; empty if a trial starts none.
        environment: Variables that are set for it, by name; None removes one.
        directory: Directory of the command; None without one.
        variables: Names of the variables of the environment of `meshtune run` that stand as `$NAME`.
        files: Texts of the files that the trial gets copies of, by the placeholders of their paths.
        submit: Words of the command that submits the batch file to a queue; empty if none does.
        batch_file: Batch file; None without a queue.
    """

    in_words: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    directory: Path | None = None
    variables: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    submit: tuple[str, ...] = ()
    batch_file: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what starts as JSON types."""
        return {
            "starts": self.in_words,
            "command": list(self.command) or None,
            "environment": dict(self.environment),
            "directory": None if self.directory is None else str(self.directory),
            "files": dict(self.files),
            "submit": list(self.submit) or None,
            "batch_file": self.batch_file,
        }

    def lines(self) -> list[str]:
        """Return what starts as lines to read, with words quoted as a shell needs them."""
        found = [self.in_words]
        if not self.command:
            return found
        found += [f"Directory: {self.directory}", "Environment, beside that of the host:"]
        found += [
            f"  unset {name}" if value is None else f"  {name}={self._quoted(value)}"
            for name, value in self.environment.items()
        ] or ["  nothing"]
        found += ["Command:", f"  {' '.join(map(self._quoted, self.command))}"]
        for name, text in self.files.items():
            found += [f"File {{{name}}}:", *(f"  {line}" for line in text.splitlines())]
        if self.batch_file is not None:
            found += ["Submitted by:", f"  {shlex.join(self.submit)}", "Batch file:"]
            found += [f"  {line}" for line in self.batch_file.splitlines()]
        return found

    def _quoted(self, text: str) -> str:
        """Return a text as one word of a shell, which expands the variables that stand in it."""
        word = shlex.quote(text)
        for name in self.variables:
            word = word.replace(f"${name}", f"'\"${name}\"'")
        return word.replace("''", "") or "''" if self.variables else word
