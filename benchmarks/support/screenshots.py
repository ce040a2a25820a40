"""Take the pictures of a report that README and docs show.

    python -m benchmarks.support.screenshots [--out FOLDER]

An example study runs to its end in a temporary folder, its report is written, and headless Chromium renders it at two
widths. The program needs `chromium` (Debian's package, or any build of that name) on the path.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "configs" / "studies" / "ultrascale-llama-8b-128.yaml"
PICTURES = ROOT / "docs" / "pictures"
MAX_BYTES = 200_000
"""Maximum size of one picture [bytes]: the repository keeps every version of it."""
LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """One picture of the report.

    Attributes:
        name: File name without suffix.
        section: Identifier of the section at the top of the picture; empty for the top of the page.
        width: Width of the page in pixels.
        height: Height of the picture in pixels.
    """

    name: str
    section: str = ""
    width: int = 1280
    height: int


SHOTS = (
    Shot(name="report", height=1190),
    Shot(name="report-map", section="map", height=900),
    Shot(name="report-narrow", width=400, height=1500),
)


def main(given: Sequence[str] | None = None) -> None:
    """Run the study, write its report and take all pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.support.screenshots", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=PICTURES, help="the folder to write to (docs/pictures)")
    out = parser.parse_args(given).out
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("screenshots: no `chromium` on the path; `apt-get install chromium` has one")
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        storage = f"sqlite:///{folder / 'study.db'}"
        # one trial at a time, since the order in which parallel trials end differs from run to run
        _meshtune("run", "--set", "search.parallel_trials=1", "--storage", storage)
        _meshtune("report", "--storage", storage, "--out", str(folder / "report.html"))
        for shot in SHOTS:
            written = take(browser, folder / "report.html", shot, out)
            print(f"{written}: {written.stat().st_size:,} bytes")


def take(browser: str, page: Path, shot: Shot, out: Path) -> Path:
    """Render one part of a page into `out`.

    The page is shown in a frame, since Chromium has no windows as narrow as a telephone.
    """
    frame = page.with_name(f"frame-{shot.name}.html")
    source = f"{page.name}#{shot.section}" if shot.section else page.name
    frame.write_text(
        f'<body style="margin: 0"><iframe src="{source}" width="{shot.width}" height="{shot.height}" '
        'style="border: 0; display: block"></iframe>',
        encoding="utf-8",
    )
    written = out / f"{shot.name}.png"
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
        f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={shot.width},{shot.height}",
        "--virtual-time-budget=8000",
        f"--screenshot={written}",
        frame.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    size = written.stat().st_size
    assert size <= MAX_BYTES, f"{written} has {size:,} bytes, and {MAX_BYTES:,} are allowed"
    return written


def _meshtune(verb: str, *options: str) -> None:
    subprocess.run([sys.executable, "-m", "tuner", verb, str(STUDY), *options], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
