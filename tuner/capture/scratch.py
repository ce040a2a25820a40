"""Folders of a capture: a short one for itself, and a copy of the working directory where there is no overlay."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SMALL_BYTES = 1_000_000
"""Largest file of the working directory that is copied [bytes]."""
MOST_BYTES = 16_000_000
"""Most that is copied of the working directory [bytes]."""
MOST_FILES = 2_000
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_TRIES = 1_000
_NO_FILE = (0, 0)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder of one's own with a short path, and remove it afterwards.

    A stand-in's path is written over that of a real program, so it has to be the shorter one.

    Raises:
        OSError: there is no place for it.
    """
    folder = _made_short() or Path(tempfile.mkdtemp(prefix="meshtune-capture-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _made_short() -> Path | None:
    if os.environ.get("TMPDIR", "/tmp") != "/tmp" or not Path("/tmp").is_dir():  # noqa: S108 # the folder is made anew
        return None
    for _ in range(_TRIES):
        number = int.from_bytes(os.urandom(4), "big")
        name = "".join(_LETTERS[number // len(_LETTERS) ** at % len(_LETTERS)] for at in range(3))
        with contextlib.suppress(FileExistsError):
            folder = Path("/tmp", name)  # noqa: S108 # made anew, or not used
            folder.mkdir(mode=0o700)
            return folder.resolve()
    return None


@dataclass(kw_only=True, slots=True)
class Copy:
    """Copy of a working directory.

    Attributes:
        to: Folder of the copy.
        links: Whether what is not copied is linked; otherwise it is left out.
        left_out: Places that are not copied.
        bytes_left: Bytes that may still be copied.
        files_left: Files and folders that may still be copied.
        copied: Size and time of change of each copied file, and nothing for folders and links.
    """

    to: Path
    links: bool
    left_out: list[str] = field(default_factory=list)
    bytes_left: int = MOST_BYTES
    files_left: int = MOST_FILES
    copied: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def fill(self, source: Path) -> None:
        """Copy the small files of a folder and of the folders in it, as long as there is room."""
        self.to.mkdir()
        device = source.stat().st_dev  # other file systems may be the kernel's own
        waiting = [(source, self.to)]
        while waiting:
            folder, target = waiting.pop(0)
            if self.files_left <= 0:
                target.rmdir()
                self._show(folder, target)
                continue
            entries = sorted(folder.iterdir())
            if len(entries) > MOST_FILES:
                self.left_out.append(f"{len(entries) - MOST_FILES} entries of {folder}")
            for entry in entries[:MOST_FILES]:
                own = target / entry.name
                if entry == self.to.parent:
                    continue  # the capture's own folder
                if entry.is_symlink():
                    own.symlink_to(os.path.realpath(entry) if self.links else os.devnull)
                    self.copied[own] = _NO_FILE
                elif self.files_left > 0 and _can_be_copied(entry, device):
                    own.mkdir()
                    self.copied[own] = _NO_FILE
                    self.files_left -= 1
                    waiting.append((entry, own))
                else:
                    self._file(entry, own)

    def _file(self, entry: Path, own: Path) -> None:
        try:
            size = entry.stat().st_size
            if entry.is_file() and size <= min(SMALL_BYTES, self.bytes_left) and self.files_left > 0:
                shutil.copy(entry, own)
                self.bytes_left, self.files_left = self.bytes_left - size, self.files_left - 1
                self.copied[own] = _mark(own)
                return
        except OSError:
            pass  # not readable
        self._show(entry, own)

    def _show(self, entry: Path, own: Path) -> None:
        """Link what is not copied, or leave it out."""
        if self.links:
            own.symlink_to(entry)
            self.copied[own] = _NO_FILE
        else:
            self.left_out.append(str(entry))

    def changes(self, most: int) -> list[str]:
        """Return what was written into the copy, by its path in it; removed files have a leading `-`."""
        found = [f"-{path}" for path in self.copied if not os.path.lexists(path)]  # pathlib has none
        for folder, folders, names in os.walk(self.to):
            for path in (Path(folder, name) for name in sorted((*names, *folders))):
                if path not in self.copied:
                    found.append(f"{path}/" if path.is_dir() and not path.is_symlink() else str(path))
                elif path.is_file() and not path.is_symlink() and self.copied[path] != _mark(path):
                    found.append(str(path))
            if len(found) > most:
                break
        return sorted(found)[:most]


def _can_be_copied(entry: Path, device: int) -> bool:
    """Return whether an entry is a folder of a file system that can be read."""
    return entry.is_dir() and entry.lstat().st_dev == device and os.access(entry, os.R_OK | os.X_OK)


def _mark(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
