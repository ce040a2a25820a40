"""Exporter for the keys of GPT-NeoX's file that a configuration determines (YAML).

GPT-NeoX merges all files of its command line, so that the export is passed as the last of them.

Sources: EleutherAI/gpt-neox megatron/neox_arguments/neox_args.py (`NeoXArgsParallelism`, `NeoXArgsTraining`),
arguments.py (`calculate_batch_parameters`: train batch = micro-batch * accumulation * data parallel ranks;
`is_pipe_parallel`), deepspeed_args.py (keys that DeepSpeed gets); DeepSpeed runtime/pipe/engine.py (no ZeRO 2 and 3
with a pipeline, for which size 0 stands).
"""

from __future__ import annotations

from typing import Any

import yaml

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.deepspeed import offload_section, zero_notes
from tuner.export.exporter import Export
from tuner.export.parts import (
    closing_notes,
    describe_uneven_work,
    format_comments,
    num_micro_batches,
    set_optimizer,
    with_facts_as_keys,
    without_experts,
)
from tuner.export.sequences import script_notes

VERSIONS = "GPT-NeoX 2.0 and later; the keys that it hands on are checked with DeepSpeed 0.19.8"
"""Versions of the framework that take the export."""

NAMED = ("recompute", "offload", "zero_stage", "sequence_parallel")
"""Further dimensions that the file or one of its notes covers."""


def export_gpt_neox(setting: Setting, config: ParallelConfig) -> Export:
    """Return the keys of a file. Its other keys do not depend on the configuration."""
    job = setting.job
    has_experts = job.model.is_moe
    content: dict[str, Any] = {
        "pipe_parallel_size": config.pp if config.pp > 1 or config.zero_stage < 2 else 0,
        "model_parallel_size": config.tp,
        "seq_length": job.sequence_length,
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": config.mbs,
        "gradient_accumulation_steps": num_micro_batches(setting, config),
        "zero_optimization": {"stage": config.zero_stage, **offload_section(config)},
        "checkpoint_activations": config.recompute == "full",
        "checkpoint_num_layers": job.recompute_unit,
    }
    if has_experts:
        content["moe_expert_parallel_size"] = config.ep
    if config.tp > 1 and config.sequence_parallel:
        content["sequence_parallel"] = True
    if job.precision in ("bf16", "fp8", "nvfp4"):
        content |= {"precision": "bfloat16", "bf16": {"enabled": True}}
    elif job.precision == "fp16":
        content |= {"precision": "fp16", "fp16": {"enabled": True}}
    else:
        content["precision"] = "fp32"
    notes = (
        *_notes(setting, config),
        *describe_uneven_work(
            setting, config, framework="GPT-NeoX", recomputed="has one checkpoint_num_layers, for all stages"
        ).notes,
        *script_notes(setting, "GPT-NeoX"),
        *closing_notes(setting, config, "GPT-NeoX", rule_sets=("gpt-neox", "megatron-deepspeed"), named=NAMED),
    )
    notes += with_facts_as_keys(content, setting, "deepspeed")
    comments = format_comments((str(config), f"Versions: {VERSIONS}", *notes))
    return Export(target="gpt-neox", text="\n".join([*comments, yaml.safe_dump(content, sort_keys=False)]), notes=notes)


def _notes(setting: Setting, config: ParallelConfig) -> list[str]:
    """Return one note for each dimension that the keys cannot express."""
    job, notes = setting.job, []
    if config.assignment.layers:
        notes.append("pp: GPT-NeoX divides the layers by pipe_partition_method; the layers of a stage cannot be set")
    if config.vpp > 1:
        notes.append(f"vpp: DeepSpeed's pipeline runs one model chunk per stage, not {config.vpp}")
    if config.cp > 1:
        notes.append(f"cp: no release of GPT-NeoX has context parallelism; {config.cp} is not exported")
    if config.up > 1:
        notes.append(f"up: GPT-NeoX has no Ulysses attention; {config.up} is not exported")
    if config.ep > 1 and not job.model.is_moe:
        notes.append(without_experts(config))
    notes += zero_notes(config)
    if config.recompute == "selective":
        notes.append("recompute: GPT-NeoX recomputes whole layers or nothing; selective is exported as none")
    if job.precision in ("fp8", "nvfp4", "tf32"):
        notes.append(f"precision: no key here enables {job.precision}; set those of Transformer Engine (te_*)")
    notes += set_optimizer("gpt-neox", "GPT-NeoX", job, "set optimizer.type of the file to {name}")
    return notes
