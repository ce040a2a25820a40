"""A small disk of one's own, which can be filled without harm to others: a tmpfs, which only root can mount."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path

SIZE_MIB = 24
CHUNK_BYTES = 2**16


class SmallDisk:
    """A file system of SIZE_MIB, mounted on a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        folder.mkdir()
        told = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "none", str(folder)],  # noqa: S607 # root's own PATH
            capture_output=True,
            text=True,
            check=False,
        )
        if told.returncode:
            raise OSError(told.stderr.strip() or "mount failed")

    def fill(self) -> None:
        """Leaves no byte free."""
        with self._filler.open("ab", buffering=0) as file:
            size = CHUNK_BYTES
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    def empty(self) -> None:
        """Gives back what `fill` took."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmounts it."""
        subprocess.run(["umount", "--lazy", str(self.folder)], capture_output=True, check=False)  # noqa: S607 # as above


@cache
def why_no_disk() -> str:
    """Why no such disk can be had here; empty if one can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            SmallDisk(Path(folder) / "disk").close()
        except OSError as error:
            return f"no tmpfs can be mounted: {error}"
    return ""
