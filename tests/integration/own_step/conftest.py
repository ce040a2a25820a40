"""Studies of a user's own step in a folder with its program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def new_study(tmp_path, monkeypatch):
    """Writes a program, and returns what writes a study of it beside it; nobody's storage is seen."""
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)

    def new(world, program):
        (tmp_path / "own_program.py").write_text(program, encoding="utf-8")

        def write(factory="own_program:step", devices=4, **changes):
            content = {
                "name": "own",
                "model": {world: factory},
                "cluster": {"name": "cpu-host", "hosts": 1, "devices_per_host": devices},
                "trial": {"backend": world, "min_steps": 2, "max_steps": 2},
                "storage": f"sqlite:///{tmp_path}/own.db",
            }
            file = tmp_path / "study.yaml"
            file.write_text(yaml.safe_dump(content | changes), encoding="utf-8")
            return file

        return write

    yield new
    sys.modules.pop("own_program", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


@pytest.fixture
def meshtune(tmp_path):
    """Runs the command in the folder of the program."""

    def run(*words):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        environment.pop("MESHTUNE_STORAGE", None)
        return subprocess.run(
            [sys.executable, "-m", "tuner", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run
