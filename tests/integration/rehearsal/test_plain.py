"""Rehearsals of programs of plain PyTorch, which call an optimizer's step in a loop of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.rehearsal.megatron_study import MODEL
from tests.support.studies.command_line import in_process

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

HIDDEN = 256
PARAMETERS = 4 * HIDDEN * HIDDEN
STUDY = """\
name: plain
model: model.yaml
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: 1024, global_batch_size: 8, precision: bf16}}
space: {{pp: [1], tp: [1], cp: [1]}}
trial:
  backend: command
  command: [{words}]
  directory: "."
  log: megatron
"""


def rehearsed(folder: Path, *words: str, program: tuple[str, ...] = ("plain.py",)):
    """The answer of rank 3 of 8."""
    own = Path(__file__).parents[2] / "support" / "rehearsal" / "plain.py"
    (folder / "plain.py").write_text(own.read_text())
    (folder / "model.yaml").write_text(MODEL)
    command = (sys.executable, *program, "--micro-batch-size", "{mbs}", *words)
    (folder / "study.yaml").write_text(STUDY.format(words=", ".join(f'"{word}"' for word in command)))
    options = ("--yes", "--json", "--config", "dp=8,mbs=1", "--ranks", "3")
    done = in_process("rehearse", folder / "study.yaml", *options, cwd=folder, timeout_s=600)
    assert done.status == 0, done.out + done.err
    return done.json["ranks"][0]


@pytest.mark.parametrize("program", [("plain.py",), ("-m", "plain")])
def test_ddp_keeps_all_of_each_parameter(tmp_path, program):
    """Weights, their gradients, and two moments of Adam; gradients are summed over all eight ranks."""
    found = rehearsed(tmp_path, program=program)

    assert found["parameters"] == PARAMETERS
    assert found["parts_bytes"]["weights"] == 4 * PARAMETERS
    assert found["parts_bytes"]["optimizer"] == pytest.approx(8 * PARAMETERS, rel=0.01)
    assert next(one["ranks"] for one in found["collectives"] if "allreduce" in one["name"]) == list(range(8))
    summed = sum(one["size_bytes"] * one["count"] for one in found["collectives"] if "allreduce" in one["name"])
    assert summed == 4 * PARAMETERS


def test_fsdp2_shards_each_parameter(tmp_path):
    """Of eight ranks each holds an eighth of weights and moments, and gathers each layer."""
    found = rehearsed(tmp_path, "--fsdp")

    assert found["parameters"] == PARAMETERS // 8
    assert found["parts_bytes"]["weights"] == 4 * PARAMETERS // 8
    assert found["parts_bytes"]["optimizer"] == pytest.approx(8 * PARAMETERS // 8, rel=0.01)
    gathered = [one for one in found["collectives"] if "gather" in one["name"]]
    assert sum(one["count"] for one in gathered) >= 4
