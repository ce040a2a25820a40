"""Study whose trials start `pretrain.py` beside this file, which can be rehearsed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ENGINE = Path(sys.prefix) / "transformer-engine"
"""Folder into which `make frameworks` installs Transformer Engine's Python code."""
MODEL = """\
name: small
source: by hand
num_layers: 8
hidden_size: 512
vocab_size: 32000
tied_embeddings: false
norm: rms
num_heads: 8
num_kv_heads: 4
head_dim: 64
ffn_size: 1408
gated_ffn: true
"""
FLAGS = (
    *("--num-layers", "8", "--hidden-size", "512", "--ffn-hidden-size", "1408", "--num-attention-heads", "8"),
    *("--group-query-attention", "--num-query-groups", "4", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights", "--bf16"),
    *("--use-distributed-optimizer", "--train-iters", "5", "--lr", "1e-4", "--tokenizer-type", "NullTokenizer"),
    *("--mock-data", "--vocab-size", "32000", "--global-batch-size", "8", "--no-gradient-accumulation-fusion"),
)
STUDY = """\
name: rehearsed
model: model.yaml
cluster: {{name: dgx-h100, hosts: 1}}
job: {{sequence_length: 1024, global_batch_size: 8, precision: bf16, zero_stage: 1}}
space: {{recompute: [none, full]}}
runtime: megatron-core
trial:
  backend: command
  command: [{words}]
  flags: megatron
  directory: "."
  environment: {{PYTHONPATH: "{engine}"}}
  log: megatron
"""


def needs_megatron() -> pytest.MarkDecorator:
    """Skip where megatron-core or Transformer Engine's Python code is not installed."""
    found = importlib.util.find_spec("megatron") is not None and ENGINE.is_dir()
    return pytest.mark.skipif(not found, reason="`make frameworks` installs megatron-core and Transformer Engine")


def write_study(folder: Path, *further: str, program: str | None = None) -> Path:
    """Write the study with further flags of its command; `program` replaces the text of `pretrain.py`."""
    own = Path(__file__).with_name("pretrain.py")
    (folder / "pretrain.py").write_text(program if program is not None else own.read_text())
    (folder / "model.yaml").write_text(MODEL)
    words = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "{devices_per_host}")
    words = (*words, "--master-port={master_port}", "pretrain.py", *FLAGS, *further, "{flags}")
    study = folder / "study.yaml"
    study.write_text(STUDY.format(words=", ".join(f'"{word}"' for word in words), engine=ENGINE))
    return study
