"""Importer for DeepSpeed configurations (JSON), which state batch sizes, ZeRO stage and precision.

These files state neither the model nor the sequence length.

Source: DeepSpeed 0.19.8 runtime/config.py, runtime/constants.py and runtime/zero/config.py (names and defaults),
runtime/tensor_parallel/config.py (autotp_size).
"""

from __future__ import annotations

from typing import Any

from hardware.io.errors import ConfigError
from tuner.imports.facts import facts_in_keys
from tuner.imports.imported import Doubt, Imported, Unread
from tuner.imports.keys import Keys, json_mapping
from tuner.imports.optimizer_names import read_optimizer

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_ASKED = {
    "zero_optimization.offload_param.device": "weights on the host are not modelled",
    "zero_optimization.zero_hpz_partition_size": "a second copy of the weights in each node is not modelled",
    "bf16.bf16_master_weights_and_grads": "16-bit master weights are not modelled",
    "bf16.bf16_optimizer_states": "16-bit optimizer states are not modelled",
    "fp16.fp16_master_weights_and_grads": "16-bit master weights are not modelled",
    "progressive_layer_drop.enabled": "layers that are left out while training are not modelled",
    "data_efficiency.enabled": "a curriculum, or tokens that are left out, are not modelled",
    "curriculum_learning.enabled": "sequences that grow while training are not modelled",
    "compression_training": "compressed weights and activations are not modelled",
    "sparse_attention": "sparse attention is not modelled",
}
"""Keys that change memory or work in a way that no study has, with the reason."""
_OFF: tuple[Any, ...] = (None, False, "none", 0, 1, {}, "auto")
"""Values of such keys without an effect."""


def import_deepspeed(text: str) -> Imported:
    """Read a configuration. Values of `auto` are left open, because the Hugging Face trainer fills them in.

    Raises:
        ConfigError: the text is not a DeepSpeed configuration, or a value is invalid.
    """
    mapping = json_mapping(text)
    keys = Keys({name: value for name, value in mapping.items() if value != "auto"})
    if not {*_BATCH, "zero_optimization", "bf16", "fp16"} & mapping.keys():
        raise ConfigError("has no key of DeepSpeed, such as train_micro_batch_size_per_gpu")
    batch, mbs, rounds = (keys.count(name) for name in _BATCH)
    doubts = [Doubt(flag=name, why=why) for name, why in _ASKED.items() if is_on(keys.value(name))]
    unread: list[Unread] = []
    degrees = {"pp": 1, "tp": keys.count("tensor_parallel.autotp_size", minimum=0) or 1}
    degrees["up"] = keys.number("sequence_parallel_size", default=1)
    open_keys = {}
    if mbs:
        degrees["mbs"] = mbs
    else:
        open_keys["mbs"] = "train_micro_batch_size_per_gpu is missing or auto"
    momentum = keys.value("optimizer.params.momentum")
    optimizer, why = read_optimizer("deepspeed", keys.text("optimizer.type"), has_momentum=bool(momentum))
    if why:
        open_keys["optimizer"] = f"optimizer.type: {why}"
    offload, left = _offload(keys)
    unread += left
    job: dict[str, Any] = {
        "precision": "bf16"
        if keys.value("bf16.enabled", "bfloat16.enabled") is True
        else "fp16"
        if keys.value("fp16.enabled") is True
        else "fp32",
        **({} if why else {"optimizer": optimizer}),
        "zero_stage": keys.count("zero_optimization.stage", default=0, minimum=0),
    }
    if offload != "none":
        job["offload"] = offload
    if batch:
        job["global_batch_size"] = batch
    facts, unclear = facts_in_keys("deepspeed", mapping)
    return Imported(
        framework="deepspeed",
        facts=facts,
        runtime="gpt-neox",
        job=job,
        degrees=degrees,
        open=open_keys,
        micro_batches=None if batch else rounds or 1,
        unread=(*unread, *unclear),
        doubts=tuple(doubts),
        notes=(
            "DeepSpeed's file does not say whether activations are recomputed: check job.recompute",
            "runtime gpt-neox models DeepSpeed with all ZeRO stages; choose another with --runtime",
        ),
    )


def is_on(value: Any) -> bool:
    """Return whether the value of a key has an effect; true and mappings have, the values of _OFF have not."""
    return value is True or all(value is not off and value != off for off in _OFF)


def _offload(keys: Keys) -> tuple[str, list[Unread]]:
    """Return the value of `job.offload`, and the settings of an offloaded optimizer that are not modelled."""
    name = "zero_optimization.offload_optimizer"
    if not isinstance(keys.value(name), dict) or not keys.count("zero_optimization.stage", default=0, minimum=0):
        return "none", []
    device = keys.text(f"{name}.device", default="none")
    if device not in ("none", "cpu"):
        return "none", [Unread(what=name, why=f"not modelled: {device}; read as none")]
    return ("optimizer" if device == "cpu" else "none"), []
