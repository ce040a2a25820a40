"""Importer for configurations of GPT-NeoX (YAML; keys with dashes or underscores).

GPT-NeoX merges several files, as `merge_gpt_neox` does. What none of those that are given states is asked for.

Sources: EleutherAI/gpt-neox megatron/neox_arguments/neox_args.py and deepspeed_args.py (names and defaults),
arguments.py (`from_ymls`: several files; `calculate_batch_parameters`, `calculate_derived`: precision, ZeRO stage,
padding of the vocabulary),
megatron/model/transformer.py (`ParallelMLP`, and `LLaMAParallelMLP` of versions with `mlp_type`), configs/*.yml.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from costmodels.job.runtime import UNKNOWN
from hardware.io.config_file import parse_yaml
from hardware.io.errors import ConfigError
from tuner.imports.facts import facts_in_keys
from tuner.imports.imported import Doubt, Imported, Unread
from tuner.imports.keys import Keys
from tuner.imports.optimizer_names import read_optimizer
from tuner.imports.tokenizer_files import rows_of_files
from tuner.imports.vocabulary import named_by

_SIGNS = {
    *("pipe_parallel_size", "model_parallel_size", "num_attention_heads", "train_micro_batch_size_per_gpu"),
    *("zero_optimization", "checkpoint_activations"),
}
"""Keys that identify a configuration, of which a file has at least two."""
_GATED = ("geglu", "reglu", "bilinear", "glu", "swiglu")
_MULTIPLE = 256
"""Default multiple of the MLP's inner size (`multiple_of`, `mlp_multiple_of`)."""
_DIVISIBLE_BY = 128
"""Default of make_vocab_size_divisible_by."""
_OTHER_KINDS = {
    "mamba": "has state-space layers (Mamba)",
    "rwkv": "has state-space layers (RWKV)",
    "gmlp": "has gMLP layers in place of attention",
    "amlp": "has gMLP layers with attention",
}
"""Entries of attention_config that are no attention."""
_ASKED = {
    "zero_optimization.cpu_offload_params": "weights on the host are not modelled",
    "zero_optimization.offload_param": "weights on the host are not modelled",
    "checkpoint_in_cpu": "activations on the host are not modelled",
    "num_unique_layers": "layers that share their weights are not modelled",
}
"""Keys that change memory or the model in a way that no study has."""
_NOT_MODELLED = {
    "partition_activations": "Meshtune assumes that each rank keeps its whole inputs of layers",
    "gpt_j_residual": "Meshtune models the MLP behind attention, not beside it",
}


def merge_gpt_neox(files: Iterable[tuple[Path, str]]) -> str:
    """Return one configuration for the texts of several files, in the order in which `deepy.py` is given them.

    A key that another file has too is refused, as GPT-NeoX refuses it. It misses one that is written with dashes, and
    so does this function: the last value counts.

    Raises:
        ConfigError: two files share a key or a name, or one is no mapping; the message names the file.
    """
    merged: dict[str, Any] = {}
    names: set[str] = set()
    for path, text in files:
        if path.name in names:
            raise ConfigError("has the name of another file, which GPT-NeoX refuses", key=str(path))
        names.add(path.name)
        loaded = parse_yaml(text)
        if not isinstance(loaded, dict):
            raise ConfigError("must have a mapping at its top level, as files of GPT-NeoX have", key=str(path))
        for name, value in loaded.items():
            if name in merged:
                raise ConfigError(
                    "is in an earlier file too, which GPT-NeoX refuses", key=f"{path}: {name}", nearest="one of them"
                )
            merged[str(name).replace("-", "_")] = value
    return json.dumps(merged, default=str)  # which is YAML too


def import_gpt_neox(text: str) -> Imported:
    """Read model, parallel degrees, batch, ZeRO stage and precision of a configuration.

    Raises:
        ConfigError: the text is not such a configuration, a value is invalid, or the model is of a kind that is not
            modelled.
    """
    loaded = parse_yaml(text)
    if not isinstance(loaded, dict):
        raise ConfigError("must have a mapping at its top level, as files of GPT-NeoX have")
    keys = Keys({str(name).replace("-", "_"): value for name, value in loaded.items()})
    if len(_SIGNS & keys.mapping.keys()) < 2:
        raise ConfigError("has no keys of GPT-NeoX, such as pipe_parallel_size and num_attention_heads")
    _refuse_other_kinds(keys)
    unread = [
        Unread(what=name, why=f"not modelled: {why}")
        for name, why in _NOT_MODELLED.items()
        if keys.value(name) not in (None, False) and not (name == "partition_activations" and _tp(keys) == 1)
    ]
    degrees, open_keys = _degrees(keys)
    job = _job(keys, open_keys, unread)
    model, missing = _model(keys, unread)
    batch = keys.count("train_batch_size")
    rounds = keys.number("gradient_accumulation_steps", "gas", default=1)
    notes = ["GPT-NeoX pads the vocabulary to a multiple of 128 times tp; the imported model ignores the factor tp"]
    runtime = "gpt-neox"
    beyond = ["context parallelism"] if degrees["cp"] > 1 else []
    beyond += ["sequence parallelism"] if job.get("sequence_parallel") else []
    if beyond:
        runtime = UNKNOWN
        notes.append(f"the profile gpt-neox has no {' and '.join(beyond)}: the runtime is unknown")
    if _is_offloaded(keys):
        if runtime == UNKNOWN or not job.get("zero_stage"):
            why = "not modelled here: Meshtune assumes that the optimizer states stay on the device"
            unread.append(Unread(what="zero_optimization.offload_optimizer", why=why))
        else:
            job["offload"] = "optimizer"
    facts, unclear = facts_in_keys("deepspeed", keys.mapping)
    return Imported(
        framework="gpt-neox",
        facts=facts,
        runtime=runtime,
        model=model,
        missing=missing,
        job=job | ({"global_batch_size": batch} if batch else {}),
        degrees=degrees,
        open=open_keys,
        micro_batches=None if batch or "mbs" in open_keys else rounds,
        hosts=keys.count("num_nodes"),
        devices_per_host=keys.count("num_gpus"),
        unread=(*unread, *unclear),
        doubts=tuple(
            Doubt(flag=name, why=why) for name, why in _ASKED.items() if keys.value(name) not in (None, False)
        ),
        notes=tuple(notes),
    )


def _tp(keys: Keys) -> int:
    return keys.number("model_parallel_size", default=1)


def _refuse_other_kinds(keys: Keys) -> None:
    """Refuse what is no training of a whole decoder-only transformer.

    Raises:
        ConfigError: a key selects another kind; the message says what would be needed.
    """
    need = "; Meshtune does not model this, and would need"
    if keys.text("model_arch", default="gpt2").lower() == "t5":
        raise ConfigError(
            f"is a T5 model{need} an encoder and a decoder with cross attention, each with its own sequence length",
            key="model_arch",
        )
    for name in ("adapter_config", "soft_prompt_tuning", "lora_config"):
        value = keys.value(name)
        if isinstance(value, Mapping) and value and value.get("enabled", True):
            raise ConfigError(f"trains adapters{need} frozen weights with small trained matrices beside them", key=name)
    for kind in _attention(keys):
        if kind in _OTHER_KINDS:
            raise ConfigError(
                f"{_OTHER_KINDS[kind]}{need} their kernels and states", key="attention_config", value=kind
            )
    train = keys.text("train_impl", default="normal").lower()
    if train not in ("normal", "sft"):
        raise ConfigError(f"trains on preferences{need} the passes of a second model", key="train_impl", value=train)


def _attention(keys: Keys) -> set[str]:
    """Return the names of the kinds of attention, for example of `[[["global", "local"], 6]]`."""
    found: set[str] = set()

    def add(value: Any) -> None:
        if isinstance(value, str):
            found.add(value.lower())
        for inner in value if isinstance(value, list) else ():
            add(inner)

    add(keys.value("attention_config"))
    return found


def _degrees(keys: Keys) -> tuple[dict[str, int], dict[str, str]]:
    """Return the degrees, and what has to be asked for. A pipeline of 0 stages is none."""
    degrees = {
        "pp": max(1, keys.count("pipe_parallel_size", default=0, minimum=0) or 0),
        "tp": _tp(keys),
        "cp": keys.number("context_parallel_size", default=1),
        "ep": 1,
    }
    if _num_experts(keys):
        names = ("moe_expert_parallel_size", "moe_deepspeed_expert_parallel_size")
        degrees["ep"] = keys.number(*names, default=1)
    mbs = keys.count("train_micro_batch_size_per_gpu", "batch_size")
    if mbs:
        return degrees | {"mbs": mbs}, {}
    return degrees, {"mbs": "train_micro_batch_size_per_gpu is not there"}


def _job(keys: Keys, open_keys: dict[str, str], unread: list[Unread]) -> dict[str, Any]:
    """Return the keys of a study's `job:`.

    A file without the keys of training is one of several, so that their defaults do not hold: they are asked for.
    """
    momentum = keys.value("optimizer.params.momentum")
    named = keys.text("optimizer.type", "optimizer_type")
    optimizer, why = read_optimizer("gpt-neox", named, has_momentum=bool(momentum))
    if why:
        open_keys["optimizer"] = f"optimizer.type: {why}"
    trains = "mbs" not in open_keys or keys.value("train_batch_size") is not None
    stage = keys.count("zero_optimization.stage", "zero_stage", default=0 if trains else None, minimum=0)
    recompute = keys.value("checkpoint_activations")
    if recompute is None and not trains:
        open_keys["recompute"] = "checkpoint_activations is not there"
    if stage is None:
        open_keys["zero_stage"] = "zero_optimization is not there"
    unit = keys.number("checkpoint_num_layers", default=1)
    precision = _precision(keys)
    if precision == "fp32" and not trains:
        unread.append(Unread(what="precision", why="neither fp16 nor precision is there; read as fp32"))
    job = {
        "sequence_length": keys.count("seq_length"),
        "precision": precision,
        "optimizer": None if why else optimizer,
        "recompute": None if "recompute" in open_keys else "full" if keys.flag("checkpoint_activations") else "none",
        "recompute_unit": unit if recompute is True and unit > 1 else None,
        "zero_stage": stage,
        "sequence_parallel": keys.flag("sequence_parallel") or None,
    }
    return {name: value for name, value in job.items() if value is not None}


def _precision(keys: Keys) -> str:
    """Return the number format of matrix products; fp32 without a key."""
    if keys.value("te_fp8_format") is not None and any(
        keys.value(name) is True
        for name in ("te_columnparallel", "te_rowparallel", "te_layernorm_mlp", "te_mha", "te_fp8_mha")
    ):
        return "fp8"
    if keys.value("bf16.enabled") is True:
        return "bf16"
    if keys.value("fp16.enabled") is True:
        return "bf16" if keys.text("fp16.type").lower() == "bfloat16" else "fp16"
    return {"fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}.get(keys.text("precision").lower(), "fp32")


def _is_offloaded(keys: Keys) -> bool:
    """Return whether the optimizer's states are on the host, by the name of DeepSpeed's early versions or the later."""
    device = keys.text("zero_optimization.offload_optimizer.device", default="none")
    return keys.value("zero_optimization.cpu_offload") is True or device == "cpu"


def _num_experts(keys: Keys) -> int:
    """Return the number of routed experts of a layer; one expert, the default, is a dense model."""
    experts = keys.number("num_experts", "moe_num_experts", default=1)
    return experts if experts > 1 else 0


def _model(keys: Keys, unread: list[Unread]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the known fields of a ModelSpec, and the missing fields with the key that would state each."""
    needed = {
        "num_layers": keys.count("num_layers"),
        "hidden_size": keys.count("hidden_size"),
        "num_heads": keys.count("num_attention_heads"),
        "vocab_size": _vocab_size(keys),
    }
    known: dict[str, Any] = {name: size for name, size in needed.items() if size is not None}
    if not {"num_layers", "hidden_size", "num_heads"} & known.keys():
        return {}, {}
    names = {"num_heads": "num_attention_heads", "vocab_size": "padded_vocab_size"}
    missing = {name: names.get(name, name) for name in needed if name not in known}
    if "hidden_size" not in known or "num_heads" not in known:
        return known, missing
    unread += [
        Unread(what="attention_config", why=f"{kind} is read as attention over the whole sequence")
        for kind in sorted(_attention(keys) - {"global", "flash"})
    ]
    norm = keys.text("norm", default="layernorm").lower()
    if norm not in ("layernorm", "rmsnorm", "te_layernorm", "te_rmsnorm"):
        unread.append(Unread(what="norm", why=f"{norm} is read as layernorm"))
    ffn_size, gated = _mlp(keys, known["hidden_size"])
    bias = keys.flag("use_bias_in_attn_linear", default=True)
    learned = keys.text("pos_emb", default="learned").lower() == "learned"
    known |= {
        "tied_embeddings": not keys.flag("no_weight_tying"),
        "learned_positions": (keys.count("max_position_embeddings") or 0) if learned else 0,
        "norm": "rms" if norm.endswith("rmsnorm") else "layer",
        "num_kv_heads": keys.count("num_kv_heads") or known["num_heads"],
        "head_dim": max(1, known["hidden_size"] // known["num_heads"]),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": keys.flag("use_qk_layernorm"),
        "ffn_size": ffn_size,
        "gated_ffn": gated,
        "mlp_bias": keys.text("mlp_type") != "llama" and keys.flag("use_bias_in_mlp", default=True),
    }
    return known | _experts(keys, known.get("num_layers", 1), ffn_size), missing


def _vocab_size(keys: Keys) -> int | None:
    """Return the rows of the embedding table, if the file states them or names a known tokenizer."""
    padded = keys.count("padded_vocab_size")
    file = keys.text("vocab_file")
    stated, known = rows_of_files(file) if file else None, named_by(file)
    if padded is not None or (stated is None and known is None):
        return padded
    rows = stated[0] if stated is not None else known.rows if known is not None else 0
    multiple = keys.number("make_vocab_size_divisible_by", default=_DIVISIBLE_BY)
    return -(-rows // multiple) * multiple


def _mlp(keys: Keys, hidden_size: int) -> tuple[int, bool]:
    """Return the inner size of the MLP and whether it is gated.

    Versions with `mlp_type: llama` take intermediate_size as it is. Later ones give a gated MLP two thirds of it for
    both halves together, so that the number of parameters is that of an MLP without a gate.
    """
    multiple = keys.number("mlp_multiple_of", default=_MULTIPLE)
    stated = keys.count("intermediate_size", "feedforward_size")
    if keys.text("mlp_type") == "llama":
        default = int(2 * hidden_size * 4 / 3)
        return stated or -(-default // multiple) * multiple, True
    factor = keys.value("expansion_factor")
    grown = int(factor * hidden_size) if isinstance(factor, (int, float)) and 0 < factor < 1000 else 4 * hidden_size
    size = stated or max(grown, 1)
    if keys.text("activation", default="gelu").lower() not in _GATED:
        return size, False
    half = int(size * 2 / 3) // 2
    return max(1, -(-half // multiple)) * multiple, True


def _experts(keys: Keys, num_layers: int, ffn_size: int) -> dict[str, Any]:
    """Return the fields about experts.

    DeepSpeed's stand in every second layer by default, those of `moe_num_experts` (Megablocks) in every layer.
    """
    experts = _num_experts(keys)
    if not experts:
        return {}
    default = 2 if keys.value("moe_num_experts") is None else 1
    period = keys.number("moe_expert_interval", "expert_interval", default=default)
    residual = keys.flag("moe_use_residual")
    return {
        "num_experts": experts,
        "top_k": keys.number("moe_top_k", "moe_topk", default=1),
        "expert_ffn_size": ffn_size,
        "num_shared_experts": 1 if residual else 0,
        "shared_expert_ffn_size": ffn_size if residual else 0,
        "moe_layer_period": period if period <= num_layers else 1,
    }
