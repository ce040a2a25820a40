"""Captures beside a study: scripts that would empty the user's files, killed while they run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
#!/bin/bash
export PATH=$PWD/site:/usr/bin:/bin
echo lost > kept; : > logs/train.log; python3 -c "import os; os.remove('logs/train.log')"
(while :; do :; done) &
setsid python3 -c "import time; time.sleep(60)" &
$PWD/site/srun torchrun train.py
while :; do :; done
"""
MEASURED = "measured\n" * 1_000


def kill_a_capture(folder: Path, environment: Mapping[str, str], after_s: float) -> list[str]:
    """Starts a capture in a new folder, kills it after that time, and returns the files that are not as before."""
    (folder / "site").mkdir(parents=True)
    (folder / "logs").mkdir()
    srun = folder / "site" / "srun"
    srun.write_text(f"#!/bin/sh\ntouch {folder}/started\n", encoding="utf-8")
    srun.chmod(0o755)
    (folder / "train.sh").write_text(SCRIPT, encoding="utf-8")
    kept = [folder / "kept", folder / "logs" / "train.log"]
    for file in kept:
        file.write_text(MEASURED, encoding="utf-8")
    words = [sys.executable, "-m", "tuner", "init", "--capture", "--yes", "--", "bash", "train.sh"]
    capture = subprocess.Popen(
        words,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(after_s)
    capture.kill()
    capture.wait()
    changed = [file.name for file in kept if not file.is_file() or file.read_text(encoding="utf-8") != MEASURED]
    return [*changed, *(["started"] if (folder / "started").exists() else [])]
