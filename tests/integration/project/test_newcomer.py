"""From a Megatron-LM launch script to faster flags, as a newcomer goes, with Meshtune installed.

The training program is docs/examples/small-gpt: real tensor and data parallel training with gloo.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.built_package import ROOT, copied_checkout, wheel_and_sdist

EXAMPLE = ROOT / "docs" / "examples" / "small-gpt"
TRIALS = 3
LIMIT_S = 240


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """A folder with a launch script, and a `meshtune` that knows of no checkout."""

    folder: Path
    environment: dict[str, str]

    def told(self, *arguments: str) -> str:
        """What a command prints, which must succeed."""
        done = subprocess.run(
            ["meshtune", *arguments],  # noqa: S607 # found as a user's shell finds it
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def written(self, name: str) -> dict:
        """A study file that a command has written."""
        return yaml.safe_load((self.folder / name).read_text(encoding="utf-8"))


@pytest.fixture
def newcomer(tmp_path):
    """Meshtune built and installed into an environment of its own, whose only other packages are its dependencies."""
    pytest.importorskip("torch", reason="the training program is torch's")
    installed, folder = tmp_path / "venv", tmp_path / "work"
    subprocess.run([sys.executable, "-m", "venv", installed], check=True, capture_output=True)
    inside = next((installed / "lib").glob("python*")) / "site-packages"
    (inside / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    wheel, _ = wheel_and_sdist(copied_checkout(tmp_path), tmp_path)
    pip = [installed / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    shutil.copytree(EXAMPLE, folder)
    script = (folder / "train.sh").read_text(encoding="utf-8")
    assert "--log-interval 10\n" in script
    (folder / "train.sh").write_text(script.replace("--log-interval 10\n", "--log-interval 1\n"), encoding="utf-8")
    paths = [installed / "bin", sysconfig.get_path("scripts"), "/usr/bin", "/bin"]  # torchrun's is the second
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    environment = kept | {"HOME": str(tmp_path), "PATH": os.pathsep.join(map(str, paths))}
    return Newcomer(folder=folder, environment=environment)


def test_a_newcomer_gets_faster_flags(newcomer):
    """`init` makes a study of a script, trials run its command, and its new flags are the answer."""
    init = newcomer.told("init", "--from-megatron", "train.sh", "--cluster", "cpu-host")
    study = newcomer.written("study.yaml")

    assert "Trials run your own command" in init
    assert study["current"] == dict.fromkeys(("pp", "dp", "cp", "up", "vpp", "ep", "mbs"), 1) | {"tp": 2}
    assert study["trial"]["backend"] == "command"
    assert "pretrain_gpt.py" in study["trial"]["command"]

    limits = ("--trials", str(TRIALS), "--set", "space={pp: [1], cp: [1], up: [1]}")  # what pretrain_gpt.py can run
    run = json.loads(newcomer.told("run", "study.yaml", "--json", *limits))

    assert (run["source"], run["trials"], run["failed"]) == ("measured", TRIALS, 0)
    assert run["gain_over_current"] >= 1.0

    # The exported flags, in place of the script's own, are the configuration that was found
    flags = newcomer.told("export", "study.yaml", "--to", "megatron")
    script = (newcomer.folder / "train.sh").read_text(encoding="utf-8")
    head, _, rest = script.partition("PARALLEL_ARGS=(")
    tail = rest.partition(")\n")[2].replace("--micro-batch-size 1\n", "").replace("--global-batch-size 16\n", "")
    (newcomer.folder / "faster.sh").write_text(head + flags + tail, encoding="utf-8")
    newcomer.told("init", "--from-megatron", "faster.sh", "--cluster", "cpu-host", "--out", "faster.yaml")
    faster = newcomer.written("faster.yaml")["current"]

    assert faster == {name: run["best"][name] for name in faster}

    newcomer.told("report", "study.yaml", "--out", "report.html")
    report = (newcomer.folder / "report.html").read_text(encoding="utf-8")

    assert f"{run['gain_over_current']:.2f}" in report
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=.?https?:", report)
