"""From a Megatron-LM launch script to faster flags, as a newcomer goes: installed, and killed once.

The training program is docs/examples/small-gpt: real tensor and data parallel training with gloo.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.built_package import ROOT, copied_checkout, wheel_and_sdist

EXAMPLE = ROOT / "docs" / "examples" / "small-gpt"
TRIALS = 4
LIMIT_S = 240
FINISHED = (
    "select number, group_concat(param_name || '=' || param_value) from trials join trial_params using (trial_id) "
    "where state in ('COMPLETE', 'FAIL', 'PRUNED') group by number order by number"
)


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """A folder with a launch script, and a `meshtune` that knows of no checkout."""

    folder: Path
    environment: dict[str, str]

    def started(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that runs."""
        return subprocess.Popen(
            ["meshtune", *arguments],  # noqa: S607 # found as a user's shell finds it
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def told(self, *arguments: str) -> str:
        """What a command prints, which must succeed."""
        process = self.started(*arguments)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        return out

    def json(self, *arguments: str) -> dict:
        """What it prints with --json."""
        return json.loads(self.told(*arguments, "--json"))

    def finished_trials(self) -> list[tuple[int, str]]:
        """Number and configuration of each trial that the database holds as finished."""
        try:
            with contextlib.closing(
                sqlite3.connect(f"file:{self.folder / 'meshtune.db'}?mode=ro", uri=True)
            ) as database:
                return list(database.execute(FINISHED))
        except sqlite3.OperationalError:  # no database yet, or none with tables
            return []


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """Meshtune built and installed into an environment of its own, whose only other packages are its dependencies."""
    pytest.importorskip("torch", reason="the training program is torch's")
    base = tmp_path_factory.mktemp("newcomer")
    installed, folder = base / "venv", base / "work"
    subprocess.run([sys.executable, "-m", "venv", installed], check=True, capture_output=True)
    inside = next((installed / "lib").glob("python*")) / "site-packages"
    (inside / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    wheel, _ = wheel_and_sdist(copied_checkout(base), base)
    pip = [installed / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*pip, wheel], check=True, capture_output=True)
    shutil.copytree(EXAMPLE, folder)
    paths = [installed / "bin", sysconfig.get_path("scripts"), "/usr/bin", "/bin"]  # torchrun's is the second
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    environment = kept | {"HOME": str(base), "PATH": os.pathsep.join(map(str, paths))}
    return Newcomer(folder=folder, environment=environment)


@pytest.fixture(scope="module")
def journey(newcomer):
    """The study that `init` writes, killed after its second trial and run again; what each command told."""
    told = {"init": newcomer.told("init", "--from-megatron", "train.sh", "--cluster", "cpu-host")}
    study = newcomer.folder / "study.yaml"
    text = study.read_text(encoding="utf-8")
    assert "\n# space:" in text
    # what pretrain_gpt.py cannot run
    study.write_text(text.replace("\n# space:", "\nspace: {pp: [1], cp: [1], up: [1]}\n# space:"), encoding="utf-8")
    killed = newcomer.started("run", "study.yaml", "--trials", str(TRIALS))
    deadline_s = time.monotonic() + LIMIT_S
    while len(newcomer.finished_trials()) < 2 and killed.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    told["before"], killed_err = newcomer.finished_trials(), killed.communicate()[1]
    assert killed.returncode == -signal.SIGKILL, killed_err
    told["run"] = newcomer.json("run", "study.yaml", "--trials", str(TRIALS))
    told["after"] = newcomer.finished_trials()
    return told


def test_trials_run_the_scripts_own_command(newcomer, journey):
    """`init` makes a study of the script: its current configuration is what it runs, and trials start its program."""
    study = yaml.safe_load((newcomer.folder / "study.yaml").read_text(encoding="utf-8"))

    assert "Trials run your own command" in journey["init"]
    assert study["current"] == dict.fromkeys(("pp", "dp", "cp", "up", "vpp", "ep", "mbs"), 1) | {"tp": 2}
    assert study["trial"]["backend"] == "command"
    assert "pretrain_gpt.py" in study["trial"]["command"]


def test_what_was_measured_before_the_kill_is_kept(journey):
    """A run that is killed half-way loses no finished trial, and none is run twice."""
    assert len(journey["before"]) >= 2
    assert journey["after"][: len(journey["before"])] == journey["before"]
    assert len({config for _, config in journey["after"]}) == len(journey["after"])
    assert journey["run"]["trials"] == len(journey["after"]) <= TRIALS


def test_the_answer_is_measured_and_compared(journey):
    """What is found was trained for real, and is at least as fast as what the script runs today."""
    run = journey["run"]

    assert run["source"] == "measured"
    assert run["failed"] == 0
    assert run["gain_over_current"] >= 1.0


def test_the_flags_go_back_into_the_script(newcomer, journey):
    """The exported flags, in place of the script's own, are the configuration that was found."""
    flags = newcomer.told("export", "study.yaml", "--to", "megatron")
    script = (newcomer.folder / "train.sh").read_text(encoding="utf-8")
    before, _, rest = script.partition("PARALLEL_ARGS=(")
    after = rest.partition(")\n")[2].replace("--micro-batch-size 1\n", "").replace("--global-batch-size 16\n", "")
    (newcomer.folder / "faster.sh").write_text(before + flags + after, encoding="utf-8")
    newcomer.told("init", "--from-megatron", "faster.sh", "--cluster", "cpu-host", "--out", "faster.yaml")

    faster = yaml.safe_load((newcomer.folder / "faster.yaml").read_text(encoding="utf-8"))
    assert faster["current"] == {name: journey["run"]["best"][name] for name in faster["current"]}


def test_the_report_says_what_was_gained(newcomer, journey):
    """The report is one file with the configuration found and the gain over the script's."""
    newcomer.told("report", "study.yaml", "--out", "report.html")
    report = (newcomer.folder / "report.html").read_text(encoding="utf-8")

    assert f"{journey['run']['gain_over_current']:.2f}" in report
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=.?https?:", report)
