"""Rights of a colleague, for tests that run as root, who may read and write everything."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def without_roots_rights() -> Iterator[None]:
    """Take root's rights over files away from this process in the block; others have none to lose."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let everybody read a folder and its files in the block, and nobody write them."""
    before = {path: path.stat().st_mode for path in (folder, *folder.iterdir())}
    for path in before:
        path.chmod(0o555 if path == folder else 0o444)
    try:
        yield
    finally:
        for path, mode in before.items():
            if path.exists():
                path.chmod(mode)


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """Create a folder to which every user of the machine can go, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
