"""Flags of Megatron-LM for the configuration of NeMo 1, from a log or a YAML file.

Its model has Megatron-LM's sizes under the names of Megatron-LM's flags, with few exceptions; so they are written as
these flags.

Sources: NeMo 1.23 examples/nlp/language_modeling/megatron_gpt_pretraining.py and conf/megatron_gpt_config.yaml (keys
and defaults), collections/nlp/models/language_modeling/megatron_gpt_model.py (`activation`, `normalization`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware.io.errors import ConfigError
from tuner.export.megatron_flags import names_in
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import flags_among
from tuner.imports.imported import Imported, Unread
from tuner.imports.keys import Keys
from tuner.imports.megatron import import_flags

_ACTIVATIONS = {"fast-swiglu": "--swiglu", "swiglu": "--swiglu", "fast-geglu": "--geglu", "geglu": "--geglu"}
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
_POSITIONS = {"learned_absolute": "learned_absolute", "rope": "rope", "alibi": "alibi", "none": "none"}


def import_nemo_1(loaded: Mapping[str, Any], vocab_size: str = "") -> Imported:
    """Return what a configuration says; what it does not state has Megatron-LM's default.

    Args:
        loaded: Configuration with the sections `model` and `trainer`.
        vocab_size: Size of the tokenizer's vocabulary; empty if unknown.

    Raises:
        ConfigError: It trains few of the weights, or a value is invalid.
    """
    keys = Keys(loaded)
    if keys.value("model.peft.peft_scheme") not in (None, "none"):
        raise ConfigError("is not supported: few of the weights are trained", key="model.peft.peft_scheme")
    flags = _flags(keys) + ([["--vocab-size", vocab_size]] if vocab_size else [])
    listed = flags_among(Argument(text=word, line=0) for flag in flags for word in flag)
    imported = import_flags(listed, is_log=True)
    hosts, per_host = keys.count("trainer.num_nodes", default=1), keys.count("trainer.devices")
    unread = [replace(one, line=None) for one in imported.unread]
    if keys.value("model.mcore_gpt") is not True:
        unread.append(Unread(what="model.mcore_gpt", why="is not set; read as a model of megatron-core"))
    # NeMo has other names for facts, which are not read
    imported = replace(imported, facts={}, unread=tuple(unread), notes=(), command=None)
    return replace(imported, hosts=hosts, devices_per_host=per_host)


def _flags(keys: Keys) -> list[list[str]]:
    """Return the flags of Megatron-LM that state the same."""

    def of(name: str, default: Any = None) -> Any:
        found = keys.value(f"model.{name}")
        return default if found is None else found

    flags = [
        [flag, str(value)]
        for flag, key in names_in("nemo_1").items()
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
