"""Study whose trials start a program of this folder that is of no framework that Meshtune reads."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.rehearsal.megatron_study import MODEL
from tests.support.studies.command_line import in_process

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


def rehearsed(folder: Path, name: str, *words: str, start: tuple[str, ...] = (), status: int = 0):
    """The answer of rank 3 of 8 for the program `name`, copied to a folder; `start` names it in the command."""
    (folder / name).write_text(Path(__file__).with_name(name).read_text())
    (folder / "model.yaml").write_text(MODEL)
    command = (sys.executable, *(start or (name,)), "--micro-batch-size", "{mbs}", *words)
    (folder / "study.yaml").write_text(STUDY.format(words=", ".join(f'"{word}"' for word in command)))
    options = ("--yes", "--json", "--config", "dp=8,mbs=1", "--ranks", "3")
    done = in_process("rehearse", folder / "study.yaml", *options, cwd=folder, timeout_s=600)
    assert done.status == status, done.out + done.err
    return done.json["ranks"][0]


def sent(answer, name):
    """The bytes of all collectives whose name contains a word."""
    return sum(one["size_bytes"] * one["count"] for one in answer["collectives"] if name in one["name"])
