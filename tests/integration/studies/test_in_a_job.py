"""What the commands refuse in a Ray job; ray/test_submitted_job.py has jobs that run."""

import sys
from pathlib import Path

import pytest

from tuner.cli.main import main

STUDY = str(Path(__file__).resolve().parents[3] / "configs" / "studies" / "llama3-8b-dgx-h100.yaml")
CHOSEN = ("--config", "pp=2,tp=4,dp=8")
ELSEWHERE = ("--storage", "sqlite:////nowhere/study.db")


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (("run", STUDY, "--storage", "sqlite:///meshtune.db"), "storage = 'sqlite:///meshtune.db'"),
        (("run", STUDY, "--storage", "sqlite://"), "storage = 'sqlite://'"),
        (("status", STUDY, "--storage", "sqlite:///a.db"), "storage = 'sqlite:///a.db'"),
        (("best", STUDY, "--storage", "sqlite:///a.db"), "storage = 'sqlite:///a.db'"),
        (("report", STUDY, *ELSEWHERE), "--out = 'report.html'"),
        (("export", STUDY, "--to", "json", *CHOSEN, "--out", "flags.json"), "--out = 'flags.json'"),
        (("simulate", STUDY, *CHOSEN, "--trace", "step.json"), "--trace = 'step.json'"),
        (("calibrate", "--measured", "runs.csv", "--out", "ours.yaml"), "--out = 'ours.yaml'"),
    ],
)
def test_what_would_be_lost_is_refused(monkeypatch, tmp_path, capsys, command, refused):
    """A database or file in the job's working directory is one message, with the way out, and status 2."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["meshtune", *command])

    with pytest.raises(SystemExit) as ended:
        main()

    told = capsys.readouterr().err
    assert ended.value.code == 2, told
    assert f"meshtune: {refused}: would be written into the working directory of this Ray job" in told
    assert "absolute path" in told
    assert list(tmp_path.iterdir()) == []
