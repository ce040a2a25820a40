"""Exporter for the sections of nanotron's YAML file that a configuration determines.

Sources: nanotron config/parallelism_config.py (`ParallelismArgs`), config/config.py (`TokensArgs`, `OptimizerArgs`,
`Config.global_batch_size`), config/utils_config.py (`cast_str_to_pipeline_engine`: afab or 1f1b),
parallel/tensor_parallel/enum.py (REDUCE_SCATTER is sequence parallelism), models/base.py (stages get equal shares of
the blocks' cost), parallel/context.py (the world size is the product of all degrees, including the expert parallel
degree). `recompute_layer` and `context_parallel_size` exist in the repository only: they were added after 0.4, the
release on PyPI.
"""

from __future__ import annotations

from typing import Any

import yaml

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
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

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable that must be 1 beside asynchronous communication (parallel/utils.py)."""

VERSIONS = "nanotron 0.4, and its repository for the keys that a note names; checked with 0.4"
"""Versions of the framework that take the file."""

NAMED = ("recompute", "zero_stage", "sequence_parallel")
"""Further dimensions that the file or one of its notes covers."""


def export_nanotron(setting: Setting, config: ParallelConfig) -> Export:
    """Return three sections of the file. Its other sections do not depend on the configuration."""
    job = setting.job
    scatters = config.sequence_parallel and config.tp > 1
    waits = scatters and setting.runtime.overlaps_tensor
    parallelism: dict[str, Any] = {
        "dp": config.dp,
        "pp": config.pp,
        "tp": config.tp,
        "pp_engine": "1f1b",
        "tp_mode": "REDUCE_SCATTER" if scatters else "ALL_REDUCE",
        "tp_linear_async_communication": waits,
        "expert_parallel_size": 1,
    }
    if config.recompute == "full":
        parallelism["recompute_layer"] = True
    if config.cp * config.up > 1:
        parallelism["context_parallel_size"] = config.cp * config.up
    content: dict[str, Any] = {
        "parallelism": parallelism,
        "tokens": {
            "sequence_length": job.sequence_length,
            "micro_batch_size": config.mbs,
            "batch_accumulation_per_replica": num_micro_batches(setting, config),
        },
        "optimizer": {"zero_stage": min(config.zero_stage, 1)},
    }
    notes = (
        *_notes(setting, config),
        *((f"environment: set {CONNECTIONS}=1 for tp_linear_async_communication",) if waits else ()),
        *describe_uneven_work(setting, config, framework="nanotron", recomputed="recomputes all layers or none").notes,
        *script_notes(setting, "nanotron"),
        *closing_notes(setting, config, "nanotron", rule_sets=("nanotron",), named=NAMED),
    )
    notes += with_facts_as_keys(content, setting, "nanotron")
    text = "\n".join(
        [*format_comments((str(config), f"Versions: {VERSIONS}", *notes)), yaml.safe_dump(content, sort_keys=False)]
    )
    return Export(target="nanotron", text=text, notes=notes, environment=((CONNECTIONS, "1"),) if waits else ())


def _notes(setting: Setting, config: ParallelConfig) -> list[str]:
    job, notes = setting.job, []
    if config.vpp > 1:
        notes.append(
            f"vpp: each of nanotron's stages is contiguous; the {config.vpp} chunks of a rank are merged into one"
        )
    if config.assignment.layers:
        notes.append("pp: nanotron divides the blocks by cost; the number of layers per stage cannot be set")
    if config.up > 1:
        notes.append(f"up: nanotron has ring attention only; context_parallel_size is cp*up = {config.cp * config.up}")
    elif config.cp > 1:
        notes.append(
            "cp: context_parallel_size requires nanotron from its repository; version 0.4 on PyPI rejects the key"
        )
    if config.ep > 1:
        notes.append(
            f"ep: nanotron cannot place the {config.ep} expert parallel ranks within dp; each rank holds all experts"
            if job.model.is_moe
            else without_experts(config)
        )
    if config.zero_stage > 1:
        notes.append(
            f"zero_stage: nanotron shards the optimizer states only; stage {config.zero_stage} is exported as 1"
        )
    if config.recompute == "full":
        notes.append(
            "recompute: recompute_layer requires nanotron from its repository; version 0.4 on PyPI rejects the key"
        )
    if config.recompute == "selective":
        notes.append(
            "recompute: nanotron recomputes whole layers or nothing; selective is exported as no recomputation"
        )
    if job.precision not in ("bf16", "fp32"):
        notes.append(f"precision: nanotron does not support {job.precision}; set model.dtype to another format")
    notes += set_optimizer("nanotron", "nanotron", job, "set optimizer.optimizer_factory.name of the file to {name}")
    return notes
