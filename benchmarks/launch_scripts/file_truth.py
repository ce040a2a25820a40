"""Facts of configuration files: torchtitan, nanotron, GPT-NeoX and FlagScale.

Sources: torchtitan's config/job_config.py and models/*/__init__.py (flavors), nanotron config/config.py, GPT-NeoX
megatron/neox_arguments/neox_args.py, FlagScale flagscale/runner/utils.py (`flatten_dict_to_args`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from benchmarks.launch_scripts.megatron_truth import truth_of
from benchmarks.launch_scripts.truth import NOTHING, Truth
from benchmarks.launch_scripts.words import command_of

_FLAVORS = {
    "llama2.13b": (40, 5120, 40, 40, 13824, 1),
    "llama2.70b": (80, 8192, 64, 8, 28672, 1),
    "llama3.8b": (32, 4096, 32, 8, 14336, 1),
    "llama3.70b": (80, 8192, 64, 8, 28672, 1),
    "llama3.405b": (126, 16384, 128, 8, 53248, 1),
    "qwen3.32b": (64, 5120, 64, 8, 25600, 1),
    "deepseek_v3.671b": (61, 7168, 128, 128, 18432, 256),
}
"""Layers, hidden size, heads, heads of keys, inner size and experts, by torchtitan's name and flavor."""


def _value(mapping: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    for name in names:
        found: Any = mapping
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    return default


def torchtitan_truth(text: str) -> Truth:
    """Return the truth of a TOML file."""
    try:
        keys = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return NOTHING
    if "training" not in keys:
        return NOTHING
    name = f"{_value(keys, 'model.name')}.{_value(keys, 'model.flavor')}".lower()
    if re.match(r"flux|siglip|vit|mamba|kimi_linear|qwen3_vl|lfm2|nemotron3", name):
        return Truth(framework="torchtitan", other="another kind of model")
    if "lora" in str(_value(keys, "model.converters", default="")):
        return Truth(framework="torchtitan", other="adapters")

    def degree(key: str) -> int:
        return _value(keys, *(f"{section}.{key}" for section in ("parallelism", "experimental", "training")), default=1)

    pp, tp = degree("pipeline_parallel_degree"), degree("tensor_parallel_degree")
    local = _value(keys, "training.local_batch_size", "training.batch_size", default=8)
    facts: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": degree("context_parallel_degree"),
        "ep": degree("expert_parallel_degree"),
        "mbs": local,
        "sequence": _value(keys, "training.seq_len", default=2048),
        "recompute": _value(keys, "activation_checkpoint.mode", default="selective"),
        "precision": "fp8" if _is_fp8(keys) else "bf16",
        "offload": "none",
    }
    if pp > 1:
        is_old = "experimental" in keys and "parallelism" not in keys
        facts["mbs"] = (
            max(1, local // pp) if is_old else _value(keys, "parallelism.pipeline_parallel_microbatch_size", default=1)
        )
    if tp > 1:
        facts["sequence_parallel"] = True
    shard = _value(keys, "parallelism.data_parallel_shard_degree", "training.data_parallel_degree", default=-1)
    replicas = degree("data_parallel_replicate_degree")
    if shard != -1:
        facts["dp"] = shard * replicas
        facts["world"] = facts["dp"] * tp * pp * facts["cp"]
        facts["gbs"] = _value(keys, "training.global_batch_size", default=local * facts["dp"])
    policy = _value(keys, "parallelism.fsdp_reshard_after_forward", default="default")
    keeps = policy == "never" or (policy == "default" and pp > 1)
    facts["zero_stage"] = 0 if shard == 1 else 2 if keeps else 3
    if name in _FLAVORS:
        names = ("layers", "hidden", "heads", "kv_heads", "ffn", "experts")
        facts |= dict(zip(names, _FLAVORS[name], strict=True))
    return Truth(framework="torchtitan", facts=facts)


def _is_fp8(keys: Mapping[str, Any]) -> bool:
    old = _value(keys, "float8.enable_float8_linear", "training.enable_float8_linear", "training.enable_fp8_linear")
    return old is True or "float8" in str(_value(keys, "model.converters", default=""))


def yaml_truth(text: str, train: str = "") -> Truth:
    """Return the truth of a YAML file of nanotron, FlagScale or GPT-NeoX.

    Args:
        text: Text of the file.
        train: Text of the file that an experiment of FlagScale names.
    """
    try:
        keys = yaml.safe_load(text)
    except yaml.YAMLError:
        return NOTHING
    if not isinstance(keys, dict):
        return NOTHING
    if isinstance(keys.get("parallelism"), dict) and "tokens" in keys:
        return _nanotron(keys)
    if "experiment" in keys or "system" in keys:
        return _flagscale(keys, yaml.safe_load(train) if train else {})
    plain = {str(name).replace("-", "_"): value for name, value in keys.items()}
    return _gpt_neox(plain) if "num_layers" in plain else NOTHING


def _nanotron(keys: Mapping[str, Any]) -> Truth:
    of, model, tokens = keys["parallelism"], _value(keys, "model.model_config", default={}), keys["tokens"]
    degrees = {"tp": of.get("tp", 1), "pp": of.get("pp", 1), "dp": of.get("dp", 1)}
    degrees |= {"cp": of.get("context_parallel_size", 1), "ep": of.get("expert_parallel_size", 1)}
    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
    facts: dict[str, Any] = degrees | {
        "world": degrees["tp"] * degrees["pp"] * degrees["dp"] * degrees["cp"],
        "mbs": tokens["micro_batch_size"],
        "gbs": tokens["micro_batch_size"] * tokens.get("batch_accumulation_per_replica", 1) * degrees["dp"],
        "sequence": tokens["sequence_length"],
        "precision": precision[str(_value(keys, "model.dtype", default="bfloat16"))],
        "recompute": "full" if of.get("recompute_layer") else "none",
        "zero_stage": _value(keys, "optimizer.zero_stage", default=0),
        "offload": "none",
        "layers": model.get("num_hidden_layers"),
        "hidden": model.get("hidden_size"),
        "heads": model.get("num_attention_heads"),
        "kv_heads": model.get("num_key_value_heads") or model.get("num_attention_heads"),
        "ffn": model.get("intermediate_size"),
        "experts": (model.get("moe_config") or {}).get("num_experts", 1),
    }
    if degrees["tp"] > 1:
        facts["sequence_parallel"] = str(of.get("tp_mode", "ALL_REDUCE")).upper().endswith("REDUCE_SCATTER")
    if facts["experts"] > 1:
        facts["top_k"] = model["moe_config"].get("top_k")
    padded = (model["vocab_size"],) if model.get("vocab_size") else ()
    return Truth(framework="nanotron", facts=_stated(facts), padded=padded)


def _gpt_neox(keys: Mapping[str, Any]) -> Truth:
    zero = keys.get("zero_optimization") or {}
    is_whole = "train_micro_batch_size_per_gpu" in keys or "train_batch_size" in keys
    facts: dict[str, Any] = {
        "tp": keys.get("model_parallel_size", 1),
        "pp": max(1, keys.get("pipe_parallel_size", 0)),
        "cp": 1,
        "mbs": keys.get("train_micro_batch_size_per_gpu"),
        "sequence": keys.get("seq_length"),
        "layers": keys.get("num_layers"),
        "hidden": keys.get("hidden_size"),
        "heads": keys.get("num_attention_heads"),
        "kv_heads": keys.get("num_kv_heads") or keys.get("num_attention_heads"),
        "experts": keys.get("num_experts", keys.get("moe_num_experts", 1)),
        "precision": _neox_precision(keys),
    }
    facts["ep"] = keys.get("moe_expert_parallel_size", 1) if facts["experts"] > 1 else 1
    if is_whole:
        facts["recompute"] = "full" if keys.get("checkpoint_activations") else "none"
        facts["zero_stage"] = zero.get("stage", 0)
        device = (zero.get("offload_optimizer") or {}).get("device")
        facts["offload"] = "optimizer" if zero.get("cpu_offload") or device == "cpu" else "none"
    if "intermediate_size" not in keys and keys.get("activation", "gelu") in ("gelu", "relu", "silu"):
        facts["ffn"] = 4 * keys["hidden_size"] if keys.get("mlp_type") != "llama" else None
    return Truth(framework="gpt-neox", facts=_stated(facts))


def _neox_precision(keys: Mapping[str, Any]) -> str | None:
    if "te_fp8_format" in keys and any(keys.get(f"te_{part}") is True for part in ("layernorm_mlp", "mha", "fp8_mha")):
        return "fp8"
    if _value(keys, "bf16.enabled") is True or keys.get("precision") in ("bfloat16", "bf16"):
        return "bf16"
    if _value(keys, "fp16.enabled") is True or keys.get("precision") == "fp16":
        return "fp16"
    return "fp32" if "train_micro_batch_size_per_gpu" in keys else None


def _flagscale(experiment: Mapping[str, Any], train: Any) -> Truth:
    whole = {**experiment, "train": train} if train else dict(experiment)
    sections = train or experiment
    kind = _value(experiment, "experiment.task.type", default="train")
    backend = _value(experiment, "experiment.task.backend", default="megatron")
    if kind != "train" or backend != "megatron":
        return Truth(framework="flagscale", other=f"{kind} by {backend}")
    if not isinstance(sections.get("system"), dict) or "hidden_size" not in (sections.get("model") or {}):
        return NOTHING
    if _value(sections, "system.hetero.enable_hetero"):
        return Truth(framework="flagscale", other="several meshes")
    program = _value(experiment, "experiment.task.entrypoint", default="train_gpt.py")
    words = [word for name in ("system", "model", "data") for word in _words(sections.get(name) or {}, whole)]
    runner = _value(experiment, "experiment.runner", default={})
    one = None if runner.get("hostfile") or "experiment" not in experiment else 1
    visible = str(_value(experiment, "experiment.envs.CUDA_VISIBLE_DEVICES", default=""))
    hosts, devices = runner.get("nnodes") or one, runner.get("nproc_per_node")
    devices = devices or (len(visible.split(",")) if visible else None)
    is_known = isinstance(hosts, int) and isinstance(devices, int)
    command = command_of(["python", str(program).rpartition("/")[2], *words])
    found = truth_of(command, hosts * devices if is_known else None, {})
    return Truth(
        framework="flagscale", facts=found.facts, padded=found.padded, other=found.other, impossible=found.impossible
    )


def _words(section: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _words(value, whole)
        elif value is not None and value is not False:
            yield "--" + str(name).replace("_", "-")
            for item in value if isinstance(value, list) else () if value is True else (value,):
                reference = re.fullmatch(r"\$\{([\w.]+)\}", str(item).strip())
                yield str(_value(whole, reference[1], default=item) if reference else item)


def _stated(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
