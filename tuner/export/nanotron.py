"""The parts of nanotron's YAML file that a configuration decides.

Sources: nanotron config/parallelism_config.py (`ParallelismArgs`), config/config.py (`TokensArgs`, `OptimizerArgs`,
`Config.global_batch_size`), config/utils_config.py (`cast_str_to_pipeline_engine`: afab or 1f1b),
parallel/tensor_parallel/enum.py (REDUCE_SCATTER is sequence parallelism), models/base.py (blocks are cut at equal
shares of their cost), parallel/context.py (expert ranks multiply the devices). `recompute_layer` and
`context_parallel_size` are in the repository since 0.4, which is what PyPI has.
"""

from __future__ import annotations

from typing import Any

import yaml

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.parts import comments, runtime_note, uneven


def export_nanotron(setting: Setting, config: ParallelConfig) -> Export:
    """Three sections of the file; what else stands there is not about the configuration."""
    job = setting.job
    scatters = config.sequence_parallel and config.tp > 1
    parallelism: dict[str, Any] = {
        "dp": config.dp,
        "pp": config.pp,
        "tp": config.tp,
        "pp_engine": "1f1b",
        "tp_mode": "REDUCE_SCATTER" if scatters else "ALL_REDUCE",
        "tp_linear_async_communication": scatters and setting.runtime.overlaps_tensor,
        "expert_parallel_size": 1,
    }
    if config.recompute == "full":
        parallelism["recompute_layer"] = True
    if config.cp * config.up > 1:
        parallelism["context_parallel_size"] = config.cp * config.up
    content = {
        "parallelism": parallelism,
        "tokens": {
            "sequence_length": job.sequence_length,
            "micro_batch_size": config.mbs,
            "batch_accumulation_per_replica": max(job.global_batch_size // (config.dp * config.mbs), 1),
        },
        "optimizer": {"zero_stage": min(config.zero_stage, 1)},
    }
    notes = (
        *_notes(setting, config),
        *uneven(setting, config, framework="nanotron", recomputed="recomputes all layers or none").notes,
        *runtime_note(setting, "nanotron", ("nanotron",)),
    )
    text = "\n".join([*comments((str(config), *notes)), yaml.safe_dump(content, sort_keys=False)])
    return Export(target="nanotron", text=text, notes=notes)


def _notes(setting: Setting, config: ParallelConfig) -> list[str]:
    job, notes = setting.job, []
    if config.vpp > 1:
        notes.append(f"vpp: nanotron's stages are contiguous blocks; {config.vpp} chunks of a rank become one")
    if config.assignment.layers:
        notes.append("pp: nanotron cuts stages by the cost of blocks and takes no layers of yours")
    if config.up > 1:
        notes.append(f"up: nanotron has ring attention alone; context_parallel_size is cp*up = {config.cp * config.up}")
    elif config.cp > 1:
        notes.append("cp: context_parallel_size needs nanotron from its repository; 0.4 of PyPI refuses the key")
    if config.ep > 1:
        notes.append(
            f"ep: nanotron's expert ranks stand beside dp, not within it as these {config.ep}; each rank holds all"
            if job.model.is_moe
            else f"ep: {config.ep} has no meaning for a model without experts"
        )
    if config.expert_tp not in (0, config.tp):
        notes.append(f"expert_tp: nanotron splits experts by tp, not by {config.expert_tp}")
    if config.zero_stage > 1:
        notes.append(f"zero_stage: nanotron shards the optimizer's states alone; stage {config.zero_stage} becomes 1")
    if config.dp_shard and config.zero_stage:
        notes.append(f"dp_shard: nanotron shards over all of dp, not over {config.dp_shard}")
    if config.recompute == "full":
        notes.append("recompute: recompute_layer needs nanotron from its repository; 0.4 of PyPI refuses the key")
    if config.recompute == "selective":
        notes.append("recompute: nanotron recomputes whole layers or nothing; selective becomes nothing")
    if job.precision not in ("bf16", "fp32"):
        notes.append(f"precision: model.dtype of the file says it; nanotron has no {job.precision} there")
    if job.optimizer != "adam":
        notes.append(f"optimizer: optimizer.optimizer_factory of the file says {job.optimizer}")
    return notes
