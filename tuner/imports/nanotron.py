"""Importer for nanotron configurations (YAML).

Source: nanotron 0.4 config/config.py (TokensArgs, OptimizerArgs), config/parallelism_config.py and
config/models_config.py (LlamaConfig, Qwen2Config); the keys context_parallel_size, recompute_layer and
moe_config are those of the repository's main branch.
"""

from __future__ import annotations

from typing import Any

from costmodels.job.hugging_face.reader import model_from_hugging_face
from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.imports.facts import facts_in_keys
from tuner.imports.imported import Imported, Unread
from tuner.imports.keys import Keys
from tuner.imports.optimizer_names import read_optimizer

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
_SIZES = (
    "num_layers",
    "hidden_size",
    "vocab_size",
    "tied_embeddings",
    "norm",
    "ffn_size",
    "gated_ffn",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def import_nanotron(text: str) -> Imported:
    """Read model, parallel degrees, batch sizes and precision of a configuration.

    Raises:
        ConfigError: the text is not a nanotron configuration, or a value is invalid.
    """
    loaded = parse_yaml(text)
    if not isinstance(loaded, dict) or not isinstance(loaded.get("parallelism"), dict):
        raise ConfigError("has no section `parallelism:`, which nanotron requires")
    keys = Keys(loaded)
    unread: list[Unread] = []
    tp = keys.number("parallelism.tp", default=1)
    mode = keys.text("parallelism.tp_mode", default="ALL_REDUCE").upper().rpartition(".")[2]
    degrees = {
        "pp": keys.number("parallelism.pp", default=1),
        "tp": tp,
        "dp": keys.number("parallelism.dp", default=1),
        "cp": keys.number("parallelism.context_parallel_size", default=1),
        "ep": keys.number("parallelism.expert_parallel_size", default=1),
    }
    mbs = keys.count("tokens.micro_batch_size")
    open_keys = {} if mbs else {"mbs": "tokens.micro_batch_size is missing"}
    if mbs:
        degrees["mbs"] = mbs
    engine = keys.text("parallelism.pp_engine", default="1f1b").lower()
    if engine != "1f1b" and degrees["pp"] > 1:
        unread.append(Unread(what="parallelism.pp_engine", why=f"{engine} is not modelled; read as 1f1b"))
    precision = keys.text("model.dtype", default="bfloat16").rpartition(".")[2]
    optimizer, why = read_optimizer("nanotron", keys.text("optimizer.optimizer_factory.name"))
    if why:
        open_keys["optimizer"] = f"optimizer.optimizer_factory.name: {why}"
    job: dict[str, Any] = {
        "sequence_length": keys.count("tokens.sequence_length"),
        "precision": _PRECISIONS.get(precision, "bf16"),
        "optimizer": None if why else optimizer,
        "recompute": "full" if keys.flag("parallelism.recompute_layer") else "none",
        "zero_stage": keys.count("optimizer.zero_stage", default=0, minimum=0),
        **({"sequence_parallel": mode == "REDUCE_SCATTER"} if tp > 1 else {}),
    }
    facts, unclear = facts_in_keys("nanotron", loaded)
    return Imported(
        framework="nanotron",
        runtime="nanotron",
        facts=facts,
        model=_model(keys, unread),
        job={key: value for key, value in job.items() if value is not None},
        degrees=degrees,
        open=open_keys,
        micro_batches=keys.number("tokens.batch_accumulation_per_replica", default=1),
        unread=(*unread, *unclear),
    )


def _model(keys: Keys, unread: list[Unread]) -> dict[str, Any]:
    """Read the fields of a ModelSpec.

    The model sections of Llama and Qwen use the keys of Hugging Face. For any other model the result is empty, so that
    the user has to name the model with --model.
    """
    section = keys.value("model.model_config")
    if not isinstance(section, dict) or not {"is_llama_config", "is_qwen2_config"} & section.keys():
        unread.append(Unread(what="model.model_config", why="is neither a Llama nor a Qwen model"))
        return {}
    plain = {key: value for key, value in section.items() if key != "attention_bias"}
    model = model_from_hugging_face(plain | {"model_type": "llama"}, name="model", file="").plain
    sizes = {name: getattr(model, name) for name in _SIZES}
    sizes["qkv_bias"] = section.get("attention_bias") is True  # nanotron has no bias on the output projection
    experts = Keys(section).value("moe_config")
    if not isinstance(experts, dict):
        return sizes
    of = Keys(experts)
    width = of.number("moe_intermediate_size", default=model.ffn_size)
    shared = of.number("shared_expert_intermediate_size", default=0) if of.flag("enable_shared_expert") else 0
    return sizes | {
        "num_experts": of.number("num_experts", default=1),
        "top_k": of.number("top_k", "num_experts_per_token", default=1),
        "expert_ffn_size": width,
        "num_shared_experts": 1 if shared else 0,
        "shared_expert_ffn_size": shared,
    }
