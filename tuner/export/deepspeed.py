"""DeepSpeed's configuration file (DeepSpeed 0.19), as JSON.

The file shards states, automatic tensor parallelism (AutoTP), Ulysses and experts (AutoEP). A pipeline's stages, and
everything beside a pipeline, are arguments of the training script; each such degree is a note, and an entry under
`comments`, a key that DeepSpeed passes over.

Sources: DeepSpeed runtime/config.py (keys; train batch = micro-batch * accumulation * data parallel ranks; removed
keys, MiCS among them), runtime/zero/config.py, runtime/tensor_parallel/config.py (`autotp_size`), __init__.py
(`sequence_parallel_size` and `data_parallel_size` make the mesh), module_inject/auto_ep_config.py and
auto_ep_folding.py (experts' tensor degree must be 1; AutoTP excludes Ulysses), runtime/pipe/engine.py (no ZeRO 2 and 3;
`activation_checkpoint_interval`).
"""

from __future__ import annotations

import json
from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.uneven_work import numbers_in_words
from tuner.export.exporter import Export
from tuner.export.parts import layers_of_parts, runtime_note, uneven


def export_deepspeed(setting: Setting, config: ParallelConfig) -> Export:
    """One JSON object, to be handed to `deepspeed.initialize(config=...)`."""
    job = setting.job
    notes = (
        *_notes(setting, config),
        *uneven(
            setting,
            config,
            framework="DeepSpeed",
            recomputed="runs every activation_checkpoint_interval layers of a stage again, the same on all stages",
        ).notes,
        *runtime_note(setting, "DeepSpeed", ("megatron-deepspeed", "gpt-neox")),
    )
    content: dict[str, Any] = {
        "comments": [str(config), *notes],
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": config.mbs,
        "gradient_accumulation_steps": max(job.global_batch_size // (config.dp * config.mbs), 1),
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": setting.runtime.overlaps_gradients},
    }
    if job.precision in ("bf16", "fp8", "nvfp4"):
        content["bf16"] = {"enabled": True}
    if job.precision == "fp16":
        content["fp16"] = {"enabled": True}
    if config.pp > 1 and config.recompute == "full":
        content["pipeline"] = {"activation_checkpoint_interval": 1}
    content |= _model_parallel(setting, config)
    return Export(target="deepspeed", text=json.dumps(content, indent=2, allow_nan=False) + "\n", notes=notes)


def _automatic_tp(config: ParallelConfig) -> bool:
    return config.pp == 1 and config.tp > 1


def _automatic_ulysses(config: ParallelConfig) -> bool:
    return config.pp == config.tp == config.cp == 1 and config.up > 1


def _automatic_ep(setting: Setting, config: ParallelConfig) -> bool:
    own = config.expert_tp or config.tp
    return setting.job.model.is_moe and config.pp == 1 and config.ep > 1 and own == 1


def _model_parallel(setting: Setting, config: ParallelConfig) -> dict[str, Any]:
    """What a model without a pipeline is split by."""
    content: dict[str, Any] = {}
    if _automatic_tp(config):
        content["tensor_parallel"] = {"autotp_size": config.tp}
    if _automatic_ulysses(config):
        content |= {"sequence_parallel_size": config.up, "data_parallel_size": config.dp}
    if _automatic_ep(setting, config):
        content["expert_parallel"] = {"enabled": True, "autoep_size": config.ep}
    return content


def _notes(setting: Setting, config: ParallelConfig) -> list[str]:
    job, notes = setting.job, []
    if config.pp > 1:
        held = numbers_in_words(layers_of_parts(setting, config)) if config.vpp == 1 else "as planned"
        notes.append(
            f"pp: the training script builds PipelineModule(num_stages={config.pp}), its stages with layers {held}"
        )
    if config.vpp > 1:
        notes.append(f"vpp: DeepSpeed's pipeline has one chunk of layers for each stage, not {config.vpp}")
    if config.tp > 1:
        notes.append(
            "tp: AutoTP splits Hugging Face models; another model's script splits its own"
            if _automatic_tp(config)
            else f"tp: the training script's topology says it: PipeModelDataParallelTopology(num_mp={config.tp})"
        )
    if config.tp > 1 and config.sequence_parallel:
        notes.append("sequence_parallel: DeepSpeed leaves norms whole; the model itself must split them over tp")
    if config.cp > 1:
        notes.append(f"cp: DeepSpeed has no ring attention; the training script brings it for {config.cp} ranks")
    if config.up > 1:
        notes.append(
            "up: the model calls DistributedAttention over the sequence parallel group"
            if _automatic_ulysses(config)
            else f"up: the configuration file has Ulysses alone; beside tp, cp or pp the script's mpu says {config.up}"
        )
    if config.ep > 1:
        notes += _expert_notes(setting, config)
    if config.zero_stage > 1 and config.pp > 1:
        notes.append(f"zero_stage: DeepSpeed's pipeline refuses stage {config.zero_stage}; 1 is the most it runs")
    if config.dp_shard and config.zero_stage:
        notes.append(f"dp_shard: DeepSpeed shards over all of dp, not over {config.dp_shard}")
    if config.recompute == "full" and config.pp == 1:
        notes.append("recompute: the script asks for it: model.gradient_checkpointing_enable()")
    if config.recompute == "selective":
        modules = ", ".join(job.recompute_modules)
        notes.append(f"recompute: the model itself wraps {modules} in deepspeed.checkpointing.checkpoint")
    if job.precision in ("fp8", "nvfp4", "tf32"):
        notes.append(f"precision: no key of the file asks for {job.precision}; the model does")
    return notes


def _expert_notes(setting: Setting, config: ParallelConfig) -> list[str]:
    if not setting.job.model.is_moe:
        return [f"ep: {config.ep} has no meaning for a model without experts"]
    if _automatic_ep(setting, config):
        return ["ep: AutoEP splits the experts of Hugging Face models; another model's script splits its own"]
    return [f"ep: the training script's deepspeed.moe.layer.MoE(ep_size={config.ep}) splits the experts"]
