"""Pages as a browser renders them: headless Chromium, where it is installed (Debian: chromium)."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

import pytest

DRAWN_MS = 8_000
"""Virtual time for the scripts of a page [ms]; it passes at once while they only wait."""

FLAGS = (
    "--headless",
    "--no-sandbox",  # refuses root otherwise
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    f"--virtual-time-budget={DRAWN_MS}",
)


def rendered_dom(url: str) -> str:
    """Return the HTML of a page after its scripts have run."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed (Debian: chromium)")
    with tempfile.TemporaryDirectory(prefix="meshtune-chromium-", ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [program, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", url],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout
