"""Meshtune as users get it: a copy of the checkout, and the wheel and source distribution built from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = shutil.ignore_patterns(
    ".*", "__pycache__", "*.pyc", "*.egg-info", "build", "dist", "*.db*", "meshtune-runs", "report.html"
)
BACKEND = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # the backend changes sys.argv
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


def copied_checkout(folder: Path) -> Path:
    """Copy the files of the checkout, so that build products do not end up in the checkout itself."""
    return Path(shutil.copytree(ROOT, folder / "meshtune", ignore=LEFT_BEHIND))


def wheel_and_sdist(checkout: Path, out: Path) -> tuple[Path, Path]:
    """Build the wheel and the source distribution of a checkout with the project's own build backend."""
    subprocess.run([sys.executable, "-c", BACKEND, out], cwd=checkout, capture_output=True, check=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist
