"""Helpers that start the command line, in this process or in a separate one, and the studies they pass to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.studies.broken_studies import REPLAY, rows, study
from tuner.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = tuple(command.name or command.callback.__name__ for command in app.registered_commands)

MEASURED = (
    # pp, tp, dp, mbs, step time [s]; None failed
    (1, 8, 1, 1, 1.50),
    (1, 8, 1, 2, 1.40),
    (1, 8, 1, 4, 1.35),
    (1, 4, 2, 1, 1.20),
    (1, 4, 2, 2, 1.10),
    (1, 2, 4, 1, 1.00),
    (1, 2, 4, 2, 0.95),
    (1, 1, 8, 1, None),
    (1, 1, 8, 2, None),
    (2, 4, 1, 1, 1.60),
    (2, 2, 2, 1, 1.25),
    (8, 1, 1, 1, None),
)
FASTEST = {"pp": 1, "tp": 2, "dp": 4, "cp": 1, "up": 1, "vpp": 1, "ep": 1, "mbs": 2}


@dataclass(frozen=True, kw_only=True)
class Done:
    """Result of a command that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """JSON object that is the whole content of stdout."""
        content = json.loads(self.out)
        assert isinstance(content, dict)
        return content


def measured_rows(measured=MEASURED) -> str:
    """Return a CSV file of runs, failed ones included."""
    return rows(
        *(
            {
                "pp": pp,
                "tp": tp,
                "dp": dp,
                "mbs": mbs,
                "seq_parallel": int(tp > 1),
                "step_seconds": step_time_s or "",
                "notes": "" if step_time_s else "FAILED: out of memory",
            }
            for pp, tp, dp, mbs, step_time_s in measured
        )
    )


def write_replay(folder: Path, measured=MEASURED, **changes: str) -> Path:
    """Write a study that replays `measured` by a search of few draws, with its rows in a file beside it."""
    (folder / "rows.csv").write_text(measured_rows(measured), encoding="utf-8")
    path = folder / "replay.yaml"
    path.write_text(study(REPLAY, **{"name": "replayed", "search": "{draws: 10}"} | changes), encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    """Return the environment of a command without any Meshtune configuration."""
    kept = {name: value for name, value in os.environ.items() if name not in {"MESHTUNE_STORAGE", "RAY_ADDRESS"}}
    return kept | {"PYTHONPATH": str(ROOT)}


def in_process(*arguments: object, cwd: Path, timeout_s: float = 60, packages: Path | None = None) -> Done:
    """Run the command in a separate process, as a user does; `packages` is a further folder of Python packages."""
    own = environment()
    if packages is not None:
        own["PYTHONPATH"] += f":{packages}"
    done = subprocess.run(
        [sys.executable, "-m", "tuner", *map(str, arguments)],
        cwd=cwd,
        env=own,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Done(status=done.returncode, out=done.stdout, err=done.stderr)


def assert_users_mistake(done: Done, *words: str) -> None:
    """Assert exit status 2, one message on stderr that contains `words`, and an empty stdout.

    Further lines of the message, one for each of several problems, are indented.
    """
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("meshtune: ")
    assert all(line.startswith("  ") for line in done.err.splitlines()[1:])
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err
