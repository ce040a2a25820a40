"""Exporter for Megatron-Bridge: overrides of a recipe's `ConfigContainer` in the grammar of Hydra.

Sources: Megatron-Bridge 0.6 (main of August 2026) training/config.py (`ConfigContainer` and its sections),
training/utils/omegaconf_utils.py (`parse_hydra_overrides`), scripts/training/run_recipe.py (overrides behind its
options); megatron-core 0.19 distributed_data_parallel_config.py and optimizer/optimizer_config.py (fields).
"""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.megatron_flags import (
    COMM,
    FSDP2,
    GLOBAL,
    INSTANCES,
    LAYOUT,
    MEGATRON_FLAGS,
    MICRO,
    SEQUENCE,
    SHARDING,
    names_in,
    underscored,
)
from tuner.export.renamed import COUNTS_EMBEDDING, COUNTS_LOSS, FIRST, LAST, Program, export_renamed, hydra_words

_OPTIMIZER = (
    *("--optimizer-cpu-offload", "--optimizer-offload-fraction", "--overlap-cpu-optimizer-d2h-h2d"),
    "--use-precision-aware-optimizer",
)

_FUSES = "model.gradient_accumulation_fusion"
"""Field that the flag --no-gradient-accumulation-fusion turns off."""

BRIDGE = Program(
    target="bridge",
    title="Megatron-Bridge",
    versions="Megatron-Bridge 0.6",
    keys={
        **{flag: (f"model.{name}",) for flag, name in names_in("bridge").items() if flag in MEGATRON_FLAGS},
        FIRST: ("model.num_layers_in_first_pipeline_stage",),
        LAST: ("model.num_layers_in_last_pipeline_stage",),
        COUNTS_EMBEDDING: ("model.account_for_embedding_in_pipeline_split",),
        COUNTS_LOSS: ("model.account_for_loss_in_pipeline_split",),
        COMM: ("model.cp_comm_type",),
        LAYOUT: ("model.pipeline_model_parallel_layout",),
        SEQUENCE: ("model.seq_length", "dataset.seq_length"),
        MICRO: ("train.micro_batch_size",),
        GLOBAL: ("train.global_batch_size",),
        "--use-distributed-optimizer": ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
        INSTANCES: ("ddp.num_distributed_optimizer_instances",),
        "--use-megatron-fsdp": ("ddp.use_megatron_fsdp",),
        FSDP2: ("dist.use_torch_fsdp2",),
        SHARDING: ("ddp.data_parallel_sharding_strategy",),
        "--outer-dp-sharding-strategy": ("ddp.outer_dp_sharding_strategy",),
        "--ckpt-format": ("checkpoint.ckpt_format",),
        "--no-gradient-accumulation-fusion": (_FUSES,),
        **{flag: (f"optimizer.{underscored(flag)}",) for flag in _OPTIMIZER},
    },
    words=lambda key, value: hydra_words(key, False if key == _FUSES else value),
    usage='torchrun ... scripts/training/run_recipe.py --recipe ... "${BRIDGE_SETTINGS[@]}"',
    off={
        LAYOUT: None,
        INSTANCES: 1,
        "--use-megatron-fsdp": False,
        "--optimizer-cpu-offload": False,
        "--ckpt-format": "torch_dist",
    },
)
"""Settings of Megatron-Bridge."""


def export_bridge(setting: Setting, config: ParallelConfig) -> Export:
    """Return a bash array of overrides, which a script that runs a recipe is called with."""
    return export_renamed(BRIDGE, setting, config)
