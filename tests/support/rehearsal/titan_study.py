"""Study whose trials start torchtitan's own program with its smallest model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

LAYERS, HIDDEN, VOCABULARY, FFN, LENGTH = 6, 256, 2048, 768, 2048
MODEL = f"""\
name: debugmodel
source: torchtitan models/llama3
num_layers: {LAYERS}
hidden_size: {HIDDEN}
vocab_size: {VOCABULARY}
tied_embeddings: false
norm: rms
num_heads: 16
num_kv_heads: 16
head_dim: 16
ffn_size: {FFN}
gated_ffn: true
"""
STUDY = """\
name: rehearsed
model: model.yaml
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: 2048, global_batch_size: 16, precision: bf16, zero_stage: 3}}
space: {{recompute: [none, selective, full]}}
runtime: torchtitan
facts: {{compiled: none, loss_chunks: 8}}
trial:
  backend: command
  command: [{words}]
  flags: torchtitan
  directory: "."
  log: torchtitan
"""


def needs_torchtitan() -> pytest.MarkDecorator:
    """Skip where torchtitan is not installed."""
    found = all(importlib.util.find_spec(name) is not None for name in ("torchtitan", "datasets"))
    return pytest.mark.skipif(not found, reason="`make frameworks` installs torchtitan")


def write_study(folder: Path, *further: str, module: str = "llama3", recipe: str = "llama3_debugmodel") -> Path:
    """Write the study with further flags of its command, and another recipe than that of its model."""
    (folder / "model.yaml").write_text(MODEL)
    words = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "{devices_per_host}")
    words = (*words, "--master-port={master_port}", "-m", "torchtitan.train", "--module", module, "--config", recipe)
    # the default needs a newer PyTorch
    words = (*words, "--parallelism.spmd_backend", "partial_dtensor", *further, "{flags}")
    study = folder / "study.yaml"
    study.write_text(STUDY.format(words=", ".join(f'"{word}"' for word in words)))
    return study
