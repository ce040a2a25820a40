"""The documented study of transformers' Trainer: its program trains alike by each plan of the study."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="models of transformers: pip install it")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: make frameworks")

from trials.command.log_pattern import StepSize
from tuner import load_study

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs/examples/hugging-face"


def train(ranks, *words):
    """Train four steps; the losses that Trainer prints with four digits, and the times of steps."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run(
        [*start, "finetune.py", "--steps=4", *words],
        cwd=FOLDER,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", run.stdout)], run.stdout


def test_trainer_trains_alike_by_each_plan(tmp_path, monkeypatch):
    """Losses of each candidate's plan, and of transformers' own DDP and FSDP in place of plans by hand, are those of
    one process; the study's pattern reads the time of each step.
    """
    monkeypatch.chdir(FOLDER)
    study = load_study("study.yaml", storage="sqlite:///:memory:")
    backend, plans = study.trials.backend, study.problem.subject.plans
    alone, told = train(1)
    assert len(alone) == 4
    size = StepSize(samples=8, tokens=256, devices=1)
    read = [found for line in told.splitlines() if (found := backend.pattern.reading(line, size))]
    assert [found.iteration for found in read] == [1, 2, 3, 4]
    assert all(found.step_time_s > 0 for found in read)

    configs = [each.config for tp in (1, 2) for each in plans.on(tp).candidates]
    assert {config.plan for config in configs} == {"hand", "descent"}
    for config in configs:
        file = tmp_path / "plan.json"
        file.write_text(backend.plans.text(config), encoding="utf-8")
        for words in ([], ["--own-way"]) if config.plan == "hand" else ([],):
            losses, _ = train(2, f"--plan={file}", *words)
            assert losses == pytest.approx(alone, abs=0.0011), (config, words)
