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
  environment: {{{environment}}}
  log:
    pattern: ["step (?P<iteration>\\\\d+): .* (?P<step_ms>[0-9.]+) ms"]
"""
PROGRAM = Path(__file__).with_name("jax_train.py")
COMPILER = Path(sys.prefix) / "gpu-compiler"
"""Folder into which `make frameworks` installs XLA's compiler for GPUs."""


def gpu_compiler() -> Path | None:
    """Return the folder of packages that has XLA's compiler for GPUs; None if it is not installed."""
    if (COMPILER / "jax_plugins").is_dir():
        return COMPILER
    try:
        found = importlib.util.find_spec("jax_plugins.xla_cuda12")
    except ImportError:  # of its parent package
        return None
    return Path(found.origin).parents[2] if found is not None and found.origin is not None else None


def write_study(folder: Path, *further: str, hosts: int = 1, batch: int = 64) -> Path:
    """Write the study with further flags of its command."""
    (folder / "train.py").write_text(PROGRAM.read_text())
    (folder / "model.yaml").write_text(MODEL)
    words = (sys.executable, "train.py", "--dp", "{dp}", "--tp", "{tp}", "--batch", str(batch), *further)
    quoted = ", ".join(f'"{word}"' for word in words)
    environment = f'PYTHONPATH: "{gpu_compiler()}"' if gpu_compiler() is not None else ""
    study = folder / "study.yaml"
    study.write_text(STUDY.format(words=quoted, environment=environment, hosts=hosts, batch=batch))
    return study
