"""Table of Megatron-LM's flags as megatron/training/arguments.py of megatron-core 0.16 to 0.19 declares them."""

from __future__ import annotations

from costmodels.job.optimizers import OPTIMIZERS
from costmodels.job.training_job import RECOMPUTE_MODULES
from tuner.export.flag_table import Flag

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
VPP, LAYOUT = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
EP, EXPERT_TP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
MICRO, GLOBAL, SEQUENCE = "--micro-batch-size", "--global-batch-size", "--seq-length"
COMM, LEVELS, INSTANCES = (
    "--cp-comm-type",
    "--hierarchical-context-parallel-sizes",
    "--num-distributed-optimizer-instances",
)
SHARDING, GRANULARITY = "--data-parallel-sharding-strategy", "--recompute-granularity"

_SWITCH, _NUMBER = Flag(kind="switch"), Flag()
COMMON_FLAGS: dict[str, Flag] = {
    TP: _NUMBER,
    PP: _NUMBER,
    CP: _NUMBER,
    EP: _NUMBER,
    EXPERT_TP: _NUMBER,
    MICRO: _NUMBER,
    GLOBAL: _NUMBER,
    SEQUENCE: _NUMBER,
    "--sequence-parallel": _SWITCH,
    "--moe-token-dispatcher-type": Flag(kind="word", choices=("allgather", "alltoall", "flex")),
    "--moe-grouped-gemm": _SWITCH,
    "--use-distributed-optimizer": _SWITCH,
    "--overlap-grad-reduce": _SWITCH,
    "--overlap-param-gather": _SWITCH,
    GRANULARITY: Flag(kind="word", choices=("full", "selective")),
    "--recompute-method": Flag(kind="word", choices=("uniform", "block")),
    "--recompute-num-layers": _NUMBER,
    "--bf16": _SWITCH,
    "--fp16": _SWITCH,
    "--optimizer": Flag(kind="word", choices=tuple(one.spellings["megatron"][0] for one in OPTIMIZERS.values())),
}
"""Flags that both Megatron-LM and MindSpeed-LLM accept."""

MEGATRON_FLAGS: dict[str, Flag] = COMMON_FLAGS | {
    VPP: _NUMBER,
    LAYOUT: Flag(kind="word"),
    COMM: Flag(kind="words", choices=("p2p", "a2a", "allgather", "a2a+p2p")),
    LEVELS: Flag(kind="numbers"),
    "--sft": _SWITCH,
    INSTANCES: _NUMBER,
    "--use-megatron-fsdp": _SWITCH,
    "--optimizer-cpu-offload": _SWITCH,
    "--optimizer-offload-fraction": _NUMBER,
    "--overlap-cpu-optimizer-d2h-h2d": _SWITCH,
    "--use-precision-aware-optimizer": _SWITCH,
    SHARDING: Flag(kind="word", choices=("no_shard", "optim", "optim_grads", "optim_grads_params")),
    "--outer-dp-sharding-strategy": Flag(kind="word", choices=("no_shard", "optim")),
    "--no-gradient-accumulation-fusion": _SWITCH,
    "--ckpt-format": Flag(kind="word", choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor")),
    "--recompute-modules": Flag(kind="words", choices=RECOMPUTE_MODULES),
    "--fp8-format": Flag(kind="word", choices=("e4m3", "hybrid")),
    "--fp4-format": Flag(kind="word", choices=("e2m1",)),
    "--fp4-recipe": Flag(kind="word", choices=("nvfp4", "custom")),
}
