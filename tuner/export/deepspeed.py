"""Exporter for DeepSpeed's JSON configuration file (DeepSpeed 0.19).

The file controls ZeRO, automatic tensor parallelism (AutoTP), Ulysses, and automatic expert parallelism (AutoEP). The
training script itself sets the number of pipeline stages and every parallel dimension that is combined with a
pipeline. The exporter writes one note for each of these degrees. The notes are also stored under `comments`, a key that
DeepSpeed ignores.

Sources: DeepSpeed runtime/config.py (keys; train batch = micro-batch * accumulation * data parallel ranks; removed
keys, including MiCS), runtime/zero/config.py and offload_config.py, runtime/tensor_parallel/config.py (`autotp_size`),
__init__.py (`sequence_parallel_size` and `data_parallel_size` define the mesh), module_inject/auto_ep_config.py and
auto_ep_folding.py (the tensor parallel degree of experts must be 1; AutoTP excludes Ulysses), runtime/pipe/engine.py
(no ZeRO 2 and 3; `activation_checkpoint_interval`).
"""

from __future__ import annotations

import json
from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.uneven_work import numbers_in_words
from tuner.export.exporter import Export
from tuner.export.parts import (
    HOST_MEMORY,
    closing_notes,
    describe_uneven_work,
    layers_of_parts,
    num_micro_batches,
    set_optimizer,
    with_facts_as_keys,
    without_experts,
)
from tuner.export.sequences import script_notes

VERSIONS = "DeepSpeed 0.19; checked with 0.19.8"
"""Versions of the framework that take the file."""

NAMED = ("recompute", "offload", "zero_stage", "sequence_parallel", "expert_tp")
"""Further dimensions that the file or one of its notes covers."""


def export_deepspeed(setting: Setting, config: ParallelConfig) -> Export:
    """Return the configuration as one JSON object for `deepspeed.initialize(config=...)`."""
    job = setting.job
    notes = (
        *_notes(setting, config),
        *describe_uneven_work(
            setting,
            config,
            framework="DeepSpeed",
            recomputed="has one activation_checkpoint_interval, which applies to all stages",
        ).notes,
        *script_notes(setting, "DeepSpeed"),
        *closing_notes(setting, config, "DeepSpeed", rule_sets=("megatron-deepspeed", "gpt-neox"), named=NAMED),
    )
    content: dict[str, Any] = {
        "comments": [],
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": config.mbs,
        "gradient_accumulation_steps": num_micro_batches(setting, config),
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": setting.runtime.overlaps_gradients,
            **offload_section(config),
            # ZeRO 3 gives Muon whole gradients only without it (stage3.py)
            **({"reduce_scatter": False} if config.zero_stage == 3 and job.optimizer == "muon" else {}),
        },
    }
    if job.precision in ("bf16", "fp8", "nvfp4"):
        content["bf16"] = {"enabled": True}
    if job.precision == "fp16":
        content["fp16"] = {"enabled": True}
    if config.pp > 1 and config.recompute == "full":
        content["pipeline"] = {"activation_checkpoint_interval": job.recompute_unit}
    content |= _model_parallel(setting, config)
    notes += with_facts_as_keys(content, setting, "deepspeed")
    content["comments"] = [str(config), f"Versions: {VERSIONS}", *notes]
    return Export(target="deepspeed", text=json.dumps(content, indent=2, allow_nan=False) + "\n", notes=notes)


def offloads(config: ParallelConfig) -> bool:
    """Return whether the optimizer's states are on the host, which ZeRO alone can do."""
    return config.offload == "optimizer" and config.zero_stage > 0


def offload_section(config: ParallelConfig) -> dict[str, Any]:
    """Return the keys of `zero_optimization` that keep the optimizer's states on the host; empty if they stay."""
    return {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offloads(config) else {}


def zero_notes(config: ParallelConfig) -> list[str]:
    """Return notes on the ZeRO stage beside a pipeline, and on offloading."""
    notes = []
    if config.zero_stage > 1 and config.pp > 1:
        notes.append(f"zero_stage: DeepSpeed's pipeline rejects stage {config.zero_stage}; it supports 0 and 1")
    if config.offload != "none":
        notes.append(HOST_MEMORY if offloads(config) else "offload: DeepSpeed offloads with ZeRO 1 or more only")
    return notes


def _uses_auto_tp(config: ParallelConfig) -> bool:
    """Return whether AutoTP can split the model, which requires that there is no pipeline."""
    return config.pp == 1 and config.tp > 1


def _uses_ulysses(config: ParallelConfig) -> bool:
    """Return whether the file can enable Ulysses, which requires pp = tp = cp = 1."""
    return config.pp == config.tp == config.cp == 1 and config.up > 1


def _uses_auto_ep(setting: Setting, config: ParallelConfig) -> bool:
    """Return whether AutoEP can split the experts, which requires expert tensor degree 1 and no pipeline."""
    expert_tp = config.expert_tp or config.tp
    return setting.job.model.is_moe and config.pp == 1 and config.ep > 1 and expert_tp == 1


def _model_parallel(setting: Setting, config: ParallelConfig) -> dict[str, Any]:
    """Return the keys of the parallel dimensions that the file can set, none of which works with a pipeline."""
    content: dict[str, Any] = {}
    if _uses_auto_tp(config):
        content["tensor_parallel"] = {"autotp_size": config.tp}
    if _uses_ulysses(config):
        content |= {"sequence_parallel_size": config.up, "data_parallel_size": config.dp}
    if _uses_auto_ep(setting, config):
        content["expert_parallel"] = {"enabled": True, "autoep_size": config.ep}
    return content


def _notes(setting: Setting, config: ParallelConfig) -> list[str]:
    job, notes = setting.job, []
    if config.pp > 1:
        held = numbers_in_words(layers_of_parts(setting, config)) if config.vpp == 1 else "as planned by the study"
        notes.append(
            f"pp: create PipelineModule(num_stages={config.pp}) in the training script; layers per stage: {held}"
        )
    if config.vpp > 1:
        notes.append(f"vpp: DeepSpeed's pipeline runs one model chunk per stage, not {config.vpp}")
    if config.tp > 1:
        notes.append(
            "tp: AutoTP supports Hugging Face models only; split any other model in the training script"
            if _uses_auto_tp(config)
            else f"tp: set it in the topology of the training script: PipeModelDataParallelTopology(num_mp={config.tp})"
        )
    if config.tp > 1 and config.sequence_parallel:
        notes.append("sequence_parallel: DeepSpeed does not split norms over tp; the model has to do this itself")
    if config.cp > 1:
        notes.append(f"cp: DeepSpeed has no ring attention; implement it for {config.cp} ranks in the training script")
    if config.up > 1:
        notes.append(
            "up: the model must call DistributedAttention with the sequence parallel group"
            if _uses_ulysses(config)
            else f"up: with tp, cp or pp, the configuration file cannot enable Ulysses; set degree {config.up} in the "
            "script's mpu object"
        )
    if config.ep > 1:
        notes += _expert_notes(setting, config)
    notes += zero_notes(config)
    notes += set_optimizer("deepspeed", "DeepSpeed", job, "set optimizer.type of the file to {name}")
    if config.recompute == "full" and config.pp == 1:
        notes.append("recompute: call model.gradient_checkpointing_enable() in the training script")
    if config.recompute == "selective":
        modules = ", ".join(job.recompute_modules)
        notes.append(f"recompute: the model must wrap {modules} in deepspeed.checkpointing.checkpoint")
    if job.precision in ("fp8", "nvfp4", "tf32"):
        notes.append(f"precision: the file has no key for {job.precision}; enable it in the model")
    return notes


def _expert_notes(setting: Setting, config: ParallelConfig) -> list[str]:
    """Return the note that says how the experts are split."""
    if not setting.job.model.is_moe:
        return [without_experts(config)]
    if _uses_auto_ep(setting, config):
        return [
            "ep: AutoEP supports Hugging Face models only; split the experts of any other model in the training script"
        ]
    return [f"ep: split the experts in the training script: deepspeed.moe.layer.MoE(ep_size={config.ep})"]
