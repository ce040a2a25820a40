"""Where a study file may lead: it is often somebody else's, and so are the files beside it.

What a study writes is its storage and whole logs of its commands. A file says where within its own folder and the
working directory, links followed; anywhere else only the user does, on the command line or by MESHTUNE_STORAGE. Reading
harms nobody and is allowed everywhere, but told where it leads out of these two.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hardware.io.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPaths:
    """The places of one study.

    Attributes:
        folder: Where its file lies.
        named: Keys that the user has given a value besides the file's.
    """

    folder: Path
    named: frozenset[str]

    def check_written(self, path: Path, *, key: str, value: str, nearest: str) -> None:
        """Refuses a path of the file that leads elsewhere.

        Args:
            path: What would be written; a relative one begins at the working directory.
            key: The key that names it.
            value: What it was given.
            nearest: How the user may allow it.

        Raises:
            ConfigError: it does.
        """
        if not self._is_users(key) and self._leads_out(path):
            raise ConfigError(
                "would be written outside the study file's folder and the working directory, where only you can send "
                "it, not the file",
                key=key,
                value=value,
                nearest=nearest,
            )

    def read_elsewhere(self, files: Iterable[tuple[str, Path]]) -> tuple[str, ...]:
        """A sentence for each file, under its key, that is read elsewhere because the file says so."""
        return tuple(
            f"{key} is read from {os.path.realpath(path)}, outside the study file's folder and the working directory"
            for key, path in files
            if not self._is_users(key) and path.exists() and self._leads_out(path)
        )

    def _is_users(self, key: str) -> bool:
        return any(key == named or key.startswith(f"{named}.") for named in self.named)

    def _leads_out(self, path: Path) -> bool:
        return not _is_below(path, (self.folder, Path()))


def _is_below(path: Path, folders: Collection[Path]) -> bool:
    real = Path(os.path.realpath(path))  # unlike resolve(), it puts up with links in a circle
    return any(real.is_relative_to(folder.resolve()) for folder in folders)
