"""Study of a plain torch program that wants its heads divided by tp, of which the study knows nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.studies.commanded_study import MODEL

PROGRAM = """\
import os
import sys
import time

import torch
import torch.distributed as dist

PP, TP, DP, MBS = map(int, sys.argv[1:5])
HEADS = 6
if HEADS % TP:
    raise ValueError(f"{HEADS} heads cannot be split over tp={TP}")
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64 * MBS)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    loss = model(torch.randn(MBS, 64)).square().mean()
    loss.backward()
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    print(f"step {step} took {100 / TP + 30 * PP + 20 / MBS} ms", flush=True)
"""
STUDY = """\
name: plain
model: {model}
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: 128, global_batch_size: 16}}
space: {{pp: [1], cp: [1], up: [1], vpp: [1]}}
search: {{draws: 20, max_trials: 4, seed: 0, confidence: 1.0, baseline: false, prune: false}}
trial:
  backend: command
  command: [{python}, train.py, "{{pp}}", "{{tp}}", "{{dp}}", "{{mbs}}"]
  launch: once
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms"]}}
  steps: 4
  warmup_steps: 1
"""


def write_study(folder: Path) -> Path:
    """Write the study and its program into a folder; the fastest layouts have the largest tp, 4 and 8."""
    (folder / "train.py").write_text(PROGRAM)
    study = folder / "study.yaml"
    study.write_text(STUDY.format(model=MODEL, python=sys.executable))
    return study
