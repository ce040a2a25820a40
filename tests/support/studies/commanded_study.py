"""Study whose trials run a command of a few milliseconds, which fails for large micro-batches."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.studies.in_process_executor import InProcessExecutor
from tuner.run.loop import run_study
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest

MODEL = Path(__file__).resolve().parents[3] / "configs" / "models" / "gpt-small.yaml"

PROGRAM = """
import sys
tp, mbs = int(sys.argv[1]), int(sys.argv[2])
for line in range(300):
    print(f"building layer {line} | <b>of</b> `many` |")
if mbs > 4:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
for step in range(1, 6):
    print(f"step {step} took {40 / tp + 100 / mbs + step} ms, 1.5 GiB", flush=True)
"""

STUDY = """
name: own-command
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 128, global_batch_size: 16}}
current: {{tp: 1, dp: 2, mbs: 1}}
search: {{max_trials: {trials}, seed: 1}}
trial:
  backend: command
  command: [{python}, train.py, "{{tp}}", "{{mbs}}"]
  launch: once
  environment: {{API_KEY: hunter2-canary}}
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms, (?P<memory_gib>[\\\\d.]+) GiB"]}}
  warmup_steps: 1
  steps: 4
  logs: logs
storage: {storage}
"""


def write_study(folder: Path, *, trials: int, storage: str = "") -> Path:
    """Write the study file, with its program beside it."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    path = folder / "study.yaml"
    storage = storage or f"sqlite:///{folder / 'study.db'}"
    path.write_text(STUDY.format(model=MODEL, python=sys.executable, trials=trials, storage=storage), encoding="utf-8")
    return path


def run_here(file: Path, *overrides: str) -> StudyRequest:
    """Run the study of a file in this process, and return its configuration."""
    config = load_study(file, overrides=overrides)
    run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(config.trials.backend))
    return config
