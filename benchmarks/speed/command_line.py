"""Time the command line as a user experiences it: each command runs in a process of its own, start included.

    python -m benchmarks.speed.command_line [--help_repeats 10] [--repeats 3] [--json]

Target: `--help` under 0.5 s on 2 cores (median of 10).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.support.timing import arguments, median_s, publish

ROOT = Path(__file__).parents[2]
SMALL = "configs/studies/llama3-8b-dgx-h100.yaml"
LARGE = "configs/studies/flexparallel/pangu-135b-6144.yaml"
QUICK = (("--help",),)
COMMANDS = (
    ("space", SMALL),
    ("predict", SMALL, "--config", "tp=8,dp=8"),
    ("rank", SMALL),
    ("rank", SMALL, "--hosts", "2,4,8,16"),
    ("space", LARGE),
    ("rank", LARGE),
)


def main() -> None:
    """Time the help, and the commands that run no trial, on a small and a large study."""
    options = arguments(__doc__ or "", help_repeats=10, repeats=3)
    timed = [(command, options.help_repeats) for command in QUICK] + [
        (command, options.repeats) for command in COMMANDS
    ]
    rows = [
        {
            "command": f"meshtune {' '.join(Path(word).name for word in command)}",
            "repeats": repeats,
            "seconds": median_s(lambda command=command: _run(command), repeats),
        }
        for command, repeats in timed
    ]
    publish(rows, as_json=options.json)


def _run(command: tuple[str, ...]) -> None:
    subprocess.run(
        [sys.executable, "-m", "tuner", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


if __name__ == "__main__":
    main()
