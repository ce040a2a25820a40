"""Flags of Megatron-LM for the fields of Megatron-Bridge's `ConfigContainer`, from a log, a YAML file or overrides.

Its model has the fields of megatron-core's TransformerConfig, which are the names of Megatron-LM's flags with few
exceptions; so they are written as these flags.

Sources: Megatron-Bridge 0.6.2 training/config.py (`ConfigContainer`), training/mixed_precision.py,
models/gpt_provider.py; megatron-core 0.19.2 training/config/container.py (`print_yaml`, `to_yaml`) and yaml_utils.py
(functions and enumerations as mappings with `_target_`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hardware.io.errors import ConfigError
from tuner.export.flag_table import Flag as Declared
from tuner.export.flag_table import fact_flags
from tuner.export.megatron_flags import FLAGS, FSDP2, LAYOUT, names_in
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flag, flags_among
from tuner.imports.imported import Imported
from tuner.imports.keys import Keys
from tuner.imports.megatron import import_flags

_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_UNITS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}
"""Names of a layout's units in lists, and in text (megatron-core transformer/pipeline_parallel_layer_layout.py)."""
_FP8_RECIPES = {
    "mxfp8|fp8_?mx": "mxfp8",
    "fp8_subchannel|fp8_?sc|nanov2_bf16_with_fp8_current": "blockwise",
    "fp8_current|fp8_?cs": "tensorwise",
    "fp8_delayed|fp8_?ds": "delayed",
}
"""Scaling of tensors in fp8 by patterns in names (training/mixed_precision.py, perf_recipes/); nanov2's name says
another than it has."""


def import_container(loaded: Mapping[str, Any], vocab_size: str = "") -> Imported:
    """Return what a configuration says; what it does not state has Megatron-LM's default.

    Args:
        loaded: Configuration with the section `model`.
        vocab_size: Size of the tokenizer's vocabulary, if the model does not state it.

    Raises:
        ConfigError: It trains few of the weights, or a value is invalid.
    """
    imported = import_flags(container_flags(loaded, vocab_size), is_log=True)
    unread = tuple(replace(one, line=None) for one in imported.unread)
    return replace(imported, unread=unread, notes=(), command=None)


def container_flags(loaded: Mapping[str, Any], vocab_size: str = "") -> list[Flag]:
    """Return the flags that a configuration means.

    Raises:
        ConfigError: It trains few of the weights.
    """
    keys = Keys(loaded)
    if keys.value("peft") is not None:
        raise ConfigError("is not supported: few of the weights are trained", key="peft")
    stated = loaded["model"]
    inner = stated.get("transformer")  # a model's own configuration beside that of its layers
    model = {**stated, **(inner if isinstance(inner, dict) else {})}
    if model.get("vocab_size") is None and vocab_size:
        model["vocab_size"] = int(vocab_size)  # of the tokenizer
    flags = [*_model_flags(model, keys), *_training_flags(model, keys)]
    flags += _fact_flags({**loaded, "model": model}, {flag for flag, *_ in flags})
    words = [word for flag in flags for word in flag]
    return flags_among(Argument(text=word, line=0) for word in words)


def _model_flags(model: Mapping[str, Any], keys: Keys) -> list[list[str]]:
    """Return the flags of Megatron-LM for the model's fields."""

    def is_on(name: str, default: bool = False) -> bool:
        return bool(model.get(name, default))

    flags = [
        [flag, *words]
        for flag, name in names_in("bridge").items()
        if name not in _MLA or is_on("multi_latent_attention")
        if (words := _words_of(FLAGS[flag].declared, model.get(name))) is not None
    ]
    if "--seq-length" not in {flag for flag, *_ in flags}:
        length = keys.count("dataset.seq_length", "dataset.sequence_length")
        flags += [["--seq-length", str(length)]] if length else []
    groups = model.get("num_query_groups")
    flags += [["--group-query-attention", "--num-query-groups", str(groups)]] if groups else []
    if is_on("gated_linear_unit"):
        flags += [["--geglu" if "gelu" in str(model.get("activation_func")) else "--swiglu"]]
    flags += [] if is_on("add_bias_linear", default=True) else [["--disable-bias-linear"]]
    flags += (
        []
        if is_on("share_embeddings_and_output_weights", default=True)
        else [["--untie-embeddings-and-output-weights"]]
    )
    period = model.get("moe_layer_freq", 1)
    flags += [["--moe-layer-freq", str(period).replace(" ", "")]] if model.get("num_moe_experts") else []
    layout = _layout_text(model.get("pipeline_model_parallel_layout"))
    flags += [[LAYOUT, layout]] if layout else []
    comm = model.get("cp_comm_type")
    return flags + ([["--cp-comm-type", *([comm] if isinstance(comm, str) else map(str, comm))]] if comm else [])


def _words_of(declared: Declared, value: Any) -> list[str] | None:
    """Return the words of a flag for the value of a field; None if it does not give the flag."""
    if declared.kind == "switch":
        return [] if value else None
    if declared.kind in ("numbers", "words"):
        return list(map(str, value)) if isinstance(value, list) else None
    return [str(value)] if isinstance(value, (int, str)) and not isinstance(value, bool) else None


def _training_flags(model: Mapping[str, Any], keys: Keys) -> list[list[str]]:
    """Return the flags for batch, precision, optimizer and sharding."""
    flags = [
        [flag, str(value)]
        for name, flag in {
            "train.micro_batch_size": "--micro-batch-size",
            "train.global_batch_size": "--global-batch-size",
            "ddp.num_distributed_optimizer_instances": "--num-distributed-optimizer-instances",
            "optimizer.optimizer": "--optimizer",
        }.items()
        if (value := keys.value(name)) is not None
    ]
    shards = keys.value("ddp.use_distributed_optimizer") or keys.value("optimizer.use_distributed_optimizer")
    flags += [["--use-distributed-optimizer"]] if shards else []
    flags += [[FSDP2]] if keys.value("dist.use_torch_fsdp2") else []
    if keys.value("ddp.use_megatron_fsdp"):
        strategy = keys.text("ddp.data_parallel_sharding_strategy", default="no_shard")
        flags += [["--use-megatron-fsdp"], ["--data-parallel-sharding-strategy", strategy]]
    if keys.value("optimizer.optimizer_cpu_offload"):
        flags += [["--optimizer-cpu-offload"], ["--use-precision-aware-optimizer"]]
    return flags + _precision_flags(model, keys.value("mixed_precision"))


def _fact_flags(loaded: Mapping[str, Any], given: Collection[str]) -> list[list[str]]:
    """Return the flags of Megatron-LM for fields that say facts of the run, but for those that are given already."""
    # of two sections that have a field, the later one counts
    fields: dict[str, Any] = {}
    for name in ("model", "ddp", "optimizer", "comm_overlap", "mixed_precision"):
        section = loaded.get(name)
        known = section.items() if isinstance(section, dict) else ()
        fields |= {key: value for key, value in known if value is not None}
    fields["grad_reduce_in_bf16"] = fields.get("grad_reduce_in_fp32") is False
    fields["no_gradient_accumulation_fusion"] = fields.get("gradient_accumulation_fusion") is False
    fields["no_bias_swiglu_fusion"] = bool(fields.get("gated_linear_unit")) and (
        fields.get("bias_activation_fusion") is False
    )
    found = {}
    for flag, declared in fact_flags("megatron").items():
        value = fields.get(flag.removeprefix("--").replace("-", "_"))
        words = _words_of(declared, list(map(_named, value)) if isinstance(value, list) else _named(value))
        if flag not in given and words is not None:
            found[flag] = words
    return [[flag, *words] for flag, words in found.items()]


def _named(value: Any) -> Any:
    """Return the name of a type or of a member of an enumeration, a number with a point as text, others as they are."""
    if isinstance(value, dict):
        return value.get("_name_", None if value.get("_call_") else value.get("_target_"))
    return str(value) if isinstance(value, float) else value


def _precision_flags(model: Mapping[str, Any], mixed: Any) -> list[list[str]]:
    """Return the flags of the precision: that of a mixed precision, by its fields or its name, else the model's own."""
    if isinstance(mixed, str):
        recipe = fp8_recipe_of(mixed)
        narrow = "fp4" if "fp4" in mixed else "fp8" if "fp8" in mixed else ""
        stated: Mapping[str, Any] = {"bf16": mixed.startswith("bf16"), "fp16": mixed.startswith("fp16"), narrow: True}
    else:
        stated = mixed if isinstance(mixed, dict) else model
        recipe = str(stated.get("fp8_recipe") or "tensorwise") if isinstance(mixed, dict) else ""
    flags = [["--bf16"]] if stated.get("bf16") else [["--fp16"]] if stated.get("fp16") else []
    if stated.get("fp8"):
        flags += [["--fp8-format", "hybrid"], *([["--fp8-recipe", recipe]] if recipe else [])]
    return flags + ([["--fp4-format", "e2m1"]] if stated.get("fp4") else [])


def fp8_recipe_of(name: str) -> str:
    """Return the scaling of tensors in fp8 that the name of a mixed precision or of a recipe says; empty if none."""
    return next((recipe for pattern, recipe in _FP8_RECIPES.items() if re.search(pattern, name)), "")


def _layout_text(value: Any) -> str:
    """Return a layout of a pipeline as text, which recipes also write as a list of units for each virtual stage."""
    if isinstance(value, dict):  # an object of a dump
        value = value.get("input_data") or value.get("layout")
    if isinstance(value, list):
        return "|".join("".join(_UNITS.get(str(unit), "") for unit in stage or ()) for stage in value)
    return value if isinstance(value, str) else ""
