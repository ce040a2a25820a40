"""Watch over the file of a storage: that the path still leads to what was opened, and holds all that was written."""

from __future__ import annotations

import os
from pathlib import Path


class GoneError(Exception):
    """File of a storage that is no longer the one that was opened; the text says what has become of it."""


class OwnFile:
    """File that a storage has opened.

    An open file can be written to after somebody has deleted it, and all that is written vanishes with the process.

    Args:
        path: Path of the file, which exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = path.stat()

    def check(self) -> None:
        """Check that the file is still there, and has not become shorter.

        Raises:
            GoneError: It is not.
        """
        try:
            now = self._path.stat()
        except OSError as error:
            raise GoneError("it was deleted while the study ran" if _is_gone(error) else str(error.strerror)) from None
        if not os.path.samestat(now, self._opened):
            raise GoneError("another file has taken its place while the study ran")
        if now.st_size < self._opened.st_size:
            raise GoneError("it was cut short while the study ran")
        self._opened = now


def _is_gone(error: OSError) -> bool:
    return isinstance(error, FileNotFoundError | NotADirectoryError)
