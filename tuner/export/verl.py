"""Exporter for verl's actor with Megatron: overrides in the grammar of Hydra.

Only the actor's training is written. The reference model takes the actor's degrees by default; the rollout has a
layout of its own (`meshtune place` plans both).

Sources: verl 0.7 trainer/config/engine/megatron.yaml, actor/actor.yaml, ref/megatron_ref.yaml.
"""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.megatron_flags import (
    COMM,
    CP,
    EP,
    EXPERT_TP,
    GRANULARITY,
    LAYOUT,
    LEVELS,
    MICRO,
    PP,
    TP,
    VPP,
    underscored,
)
from tuner.export.renamed import COUNTS_EMBEDDING, COUNTS_LOSS, FIRST, LAST, Program, export_renamed, hydra_words

ENGINE = "actor_rollout_ref.actor.megatron"
"""Section of the actor's engine."""
INNER = f"++{ENGINE}.override_transformer_config"
"""Section of further fields of its TransformerConfig, which `++` adds where they are not there."""
MICRO_KEY = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"

VERL = Program(
    target="verl",
    title="verl",
    versions="verl 0.7",
    keys={
        **{flag: (f"{ENGINE}.{underscored(flag)}",) for flag in (TP, PP, CP, EP, EXPERT_TP, "--sequence-parallel")},
        VPP: (f"{ENGINE}.virtual_pipeline_model_parallel_size",),
        "--use-distributed-optimizer": (f"{ENGINE}.use_distributed_optimizer",),
        MICRO: (MICRO_KEY,),
        FIRST: (f"{INNER}.num_layers_in_first_pipeline_stage",),
        LAST: (f"{INNER}.num_layers_in_last_pipeline_stage",),
        COUNTS_EMBEDDING: (f"{INNER}.account_for_embedding_in_pipeline_split",),
        COUNTS_LOSS: (f"{INNER}.account_for_loss_in_pipeline_split",),
        **{
            flag: (f"{INNER}.{underscored(flag)}",)
            for flag in (
                *(GRANULARITY, "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
                *(COMM, LEVELS, LAYOUT),
            )
        },
    },
    words=hydra_words,
    usage='python3 -m verl.trainer.main_ppo ... "${VERL_SETTINGS[@]}"',
    off={"--sequence-parallel": False},
    notes=("rollout: its layout is not written; `meshtune place` plans generation and training together",),
)
"""Settings of verl's actor."""


def export_verl(setting: Setting, config: ParallelConfig) -> Export:
    """Return a bash array of overrides for the actor's training."""
    return export_renamed(VERL, setting, config)
