"""Configuration that NeMo 1 prints when it starts: its YAML, under a head of stars.

Its model has Megatron-LM's sizes under the names of Megatron-LM's flags, with few exceptions; so they are written as
these flags.

Sources: NeMo 1.23 examples/nlp/language_modeling/megatron_gpt_pretraining.py and conf/megatron_gpt_config.yaml (keys
and defaults), collections/nlp/models/language_modeling/megatron_gpt_model.py (`activation`, `normalization`).
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import replace
from typing import Any

from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.imports.imported import Imported, Unread
from tuner.imports.keys import Keys
from tuner.imports.log.block import MOST_LINES, AbstractFinder
from tuner.imports.log.lines import Line
from tuner.imports.megatron import import_megatron

_HEAD = "************** Experiment configuration"
_MESSAGE = "[NeMo "
_VOCABULARY = re.compile(r"original vocab_size: ([0-9]{1,9})")
_FLAGS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "kv_channels": "--kv-channels",
    "encoder_seq_length": "--seq-length",
    "max_position_embeddings": "--max-position-embeddings",
    "micro_batch_size": "--micro-batch-size",
    "global_batch_size": "--global-batch-size",
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "num_moe_experts": "--num-experts",
    "moe_router_topk": "--moe-router-topk",
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
    "num_query_groups": "--num-query-groups",
}
"""Flag of Megatron-LM for each key of `model:`."""
_ACTIVATIONS = {"fast-swiglu": "--swiglu", "swiglu": "--swiglu", "fast-geglu": "--geglu", "geglu": "--geglu"}
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
_POSITIONS = {"learned_absolute": "learned_absolute", "rope": "rope", "alibi": "alibi", "none": "none"}


class NemoConfig(AbstractFinder):
    """Finder of the printed YAML."""

    def __init__(self) -> None:
        self._begun: Line | None = None
        self._lines: list[str] = []
        self._is_open = False
        self._vocab_size = ""

    def begins(self, line: Line) -> bool:
        """Return whether the line is the head of the configuration."""
        return _HEAD in line.text

    def take(self, line: Line) -> None:
        """Take a line of the log."""
        if self.begins(line):
            self._begun, self._lines, self._is_open = line, [], True
            return
        if "vocab_size: " in line.text and (found := _VOCABULARY.search(line.text)) is not None:
            self._vocab_size = found[1]
        if not self._is_open or self._begun is None or line.rank != self._begun.rank or len(self._lines) > MOST_LINES:
            return
        if _MESSAGE in line.text:
            self._is_open = not any(":" in text for text in self._lines)  # the message of the YAML itself comes first
        elif line.text.strip():
            self._lines.append(line.text)

    def imported(self) -> Imported | None:
        """Return what the configuration says."""
        if self._begun is None:
            return None
        try:
            loaded = parse_yaml(textwrap.dedent("\n".join(self._lines)))
        except ConfigError:
            loaded = None
        if not isinstance(loaded, dict) or not isinstance(loaded.get("model"), dict):
            raise ConfigError(
                "NeMo's configuration is cut off, or has no `model:`",
                key=f"line {self._begun.number}",
                value=self._begun.message.strip()[:80],
                nearest="a log with all lines of it",
            )
        keys = Keys(loaded)
        if keys.value("model.peft.peft_scheme") not in (None, "none"):
            raise ConfigError("is not supported: few of the weights are trained", key="model.peft.peft_scheme")
        flags = _flags(keys) + ([["--vocab-size", self._vocab_size]] if self._vocab_size else [])
        imported = import_megatron(" \\\n".join(map(shlex.join, flags)), tells_unused=False)
        hosts, per_host = keys.count("trainer.num_nodes", default=1), keys.count("trainer.devices")
        unread = [replace(one, line=None) for one in imported.unread]
        if keys.value("model.mcore_gpt") is not True:
            unread.append(Unread(what="model.mcore_gpt", why="is not set; read as a model of megatron-core"))
        return replace(imported, hosts=hosts, devices_per_host=per_host, unread=tuple(unread), notes=(), command=None)


def _flags(keys: Keys) -> list[list[str]]:
    """Return the flags of Megatron-LM that state the same."""

    def of(name: str, default: Any = None) -> Any:
        found = keys.value(f"model.{name}")
        return default if found is None else found

    flags = [
        [flag, str(value)]
        for key, flag in _FLAGS.items()
        if (value := of(key)) is not None and not (isinstance(value, str) and value.startswith("${"))
    ]
    precision = str(keys.value("trainer.precision") or "").removesuffix("-mixed")
    flags += [["--bf16"]] if precision.startswith("bf16") else [["--fp16"]] if precision == "16" else []
    flags += [["--fp8-format", "hybrid"]] if of("fp8") is True else []
    activation = str(of("activation", "gelu"))
    flags += [[_ACTIVATIONS[activation]]] if activation in _ACTIVATIONS else []
    norm = str(of("normalization", "layernorm1p")).lower()
    flags += [["--normalization", _NORMS.get(norm, norm)]]
    positions = str(of("position_embedding_type", "learned_absolute"))
    flags += [["--position-embedding-type", _POSITIONS.get(positions, positions)]]
    flags += [] if of("share_embeddings_and_output_weights", True) else [["--untie-embeddings-and-output-weights"]]
    flags += [] if of("bias", True) else [["--disable-bias-linear"]]
    flags += [["--group-query-attention"]] if of("num_query_groups") else []
    flags += [["--sequence-parallel"]] if of("sequence_parallel") is True else []
    flags += [["--use-distributed-optimizer"]] if "distributed" in str(of("optim.name", "")) else []
    return flags
