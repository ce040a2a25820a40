"""Limits on the paths in a study file, which is often written by somebody else, as are the files beside it.

A study writes its storage and the whole logs of its commands. The file may name places within its own folder and the
working directory, after links are followed. Any other place must be named by the user, on the command line or by
MESHTUNE_STORAGE. Reading is harmless and allowed everywhere, but the user is told of files outside these two folders.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hardware.io.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPaths:
    """Folders of one study, with the keys that its user has set.

    Attributes:
        folder: Folder of the study file.
        named: Names of keys that the user has set on the command line or in the environment.
    """

    folder: Path
    named: frozenset[str]

    def check_written(self, path: Path, *, key: str, value: str, nearest: str) -> None:
        """Check that a path of the file does not lead out of the allowed folders.

        A relative path begins at the working directory. The error's advice is the option by which the user allows it.

        Raises:
            ConfigError: The path leads elsewhere, and the user has not set the key.
        """
        if not self.is_users(key) and self._leads_out(path):
            raise ConfigError(
                "would be written outside the study file's folder and the working directory, which only you can allow, "
                "not the file",
                key=key,
                value=value,
                nearest=nearest,
            )

    def read_elsewhere(self, files: Iterable[tuple[str, Path]]) -> tuple[str, ...]:
        """Return a sentence for each file, given by key and path, that is read elsewhere without the user's request."""
        return tuple(
            f"{key} is read from {os.path.realpath(path)}, outside the study file's folder and the working directory"
            for key, path in files
            if not self.is_users(key) and path.exists() and self._leads_out(path)
        )

    def is_users(self, key: str) -> bool:
        """Return whether the user has set the key, or what contains it."""
        return any(key == named or key.startswith(f"{named}.") for named in self.named)

    def _leads_out(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))  # unlike resolve(), it accepts links in a circle
        return not any(real.is_relative_to(folder.resolve()) for folder in (self.folder, Path()))
