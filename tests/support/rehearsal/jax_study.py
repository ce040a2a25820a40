"""Study whose trials start `jax_train.py` beside this file, which can be rehearsed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tests.support.rehearsal.megatron_study import MODEL

STUDY = """\
name: rehearsed
model: model.yaml
cluster: {{name: dgx-h100, hosts: {hosts}}}
job: {{sequence_length: 1024, global_batch_size: {batch}, precision: bf16}}
trial:
  backend: command
  command: [{words}]
  directory: "."
  log:
    pattern: ["step (?P<iteration>\\\\d+): .* (?P<step_ms>[0-9.]+) ms"]
"""
PROGRAM = Path(__file__).with_name("jax_train.py")


def has_gpu_compiler() -> bool:
    """Return whether XLA's compiler for GPUs is installed."""
    try:
        return importlib.util.find_spec("jax_plugins.xla_cuda12") is not None
    except ImportError:  # of its parent package
        return False


def write_study(folder: Path, *further: str, hosts: int = 1, batch: int = 64) -> Path:
    """Write the study with further flags of its command."""
    (folder / "train.py").write_text(PROGRAM.read_text())
    (folder / "model.yaml").write_text(MODEL)
    words = (sys.executable, "train.py", "--dp", "{dp}", "--tp", "{tp}", "--batch", str(batch), *further)
    study = folder / "study.yaml"
    study.write_text(STUDY.format(words=", ".join(f'"{word}"' for word in words), hosts=hosts, batch=batch))
    return study
