"""Table of Megatron-LM's flags: how its parser declares them, and their names in programs that are built on it.

Exporters, importers and readers of logs share it. What no export writes and no other program names otherwise stands in
tuner/imports/megatron_arguments.yaml.

Sources: megatron/training/arguments.py of megatron-core 0.16 to 0.19 (also `_print_args`); for recipes of NeMo 2 those
of tuner/export/nemo.py, for Megatron-Bridge and NeMo 1 those of tuner/imports/log/bridge_config.py and nemo_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from costmodels.job.training_job import RECOMPUTE_MODULES
from costmodels.optimizers.registry import OPTIMIZERS
from tuner.export.flag_table import Flag, FlagValue

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
VPP, LAYOUT = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
PATTERN = "--hybrid-layer-pattern"
OF_ROUND, MTP = "--microbatch-group-size-per-virtual-pipeline-stage", "--mtp-num-layers"
EP, EXPERT_TP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
MICRO, GLOBAL, SEQUENCE = "--micro-batch-size", "--global-batch-size", "--seq-length"
COMM, LEVELS, INSTANCES = (
    "--cp-comm-type",
    "--hierarchical-context-parallel-sizes",
    "--num-distributed-optimizer-instances",
)
SHARDING, GRANULARITY = "--data-parallel-sharding-strategy", "--recompute-granularity"
FSDP2, KEEPS_WEIGHTS = "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"

_NUMBER, _SWITCH, _WORD = Flag(), Flag(kind="switch"), Flag(kind="word")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronFlag:
    """Flag of Megatron-LM. In a name elsewhere, `=` stands for the flag's own with underscores.

    Attributes:
        declared: Declaration by the parser.
        exports: Exports that may write it: none, those for Megatron-LM, or both those and MindSpeed-LLM's.
        nemo: Field of a recipe of NeMo 2.
        absent: Value of that field where the flag is absent, because recipes have their own; empty if it stays.
        bridge: Field of the model in a configuration that Megatron-Bridge prints.
        nemo_1: Key of `model:` in a configuration that NeMo 1 prints.
        printed: Name among the arguments that Megatron-LM prints, if it is not the flag's.
    """

    declared: Flag = _NUMBER
    exports: Literal["none", "megatron", "both"] = "none"
    nemo: str = ""
    absent: tuple[FlagValue, ...] = ()
    bridge: str = ""
    nemo_1: str = ""
    printed: str = ""


_STRATEGY, _DDP, _MODEL, _OPTIM = ("trainer.strategy.=", "trainer.strategy.ddp.=", "model.config.=", "optim.config.=")
_VIRTUAL, _ROUND = "virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

FLAGS: Mapping[str, MegatronFlag] = {
    TP: MegatronFlag(exports="both", nemo=_STRATEGY, bridge="=", nemo_1="="),
    "--sequence-parallel": MegatronFlag(declared=_SWITCH, exports="both", nemo=_STRATEGY, absent=(False,), bridge="="),
    PP: MegatronFlag(exports="both", nemo=_STRATEGY, bridge="=", nemo_1="="),
    VPP: MegatronFlag(
        exports="megatron",
        nemo=f"trainer.strategy.{_VIRTUAL}",
        absent=(None,),
        bridge=_VIRTUAL,
        nemo_1=_VIRTUAL,
        printed=_VIRTUAL,
    ),
    LAYOUT: MegatronFlag(declared=_WORD, exports="megatron", nemo=_STRATEGY, absent=(None,)),
    PATTERN: MegatronFlag(declared=_WORD, exports="megatron", bridge="="),
    OF_ROUND: MegatronFlag(
        exports="megatron", nemo=f"trainer.strategy.{_ROUND}", absent=(None,), bridge=_ROUND, printed=_ROUND
    ),
    CP: MegatronFlag(exports="both", nemo=_STRATEGY, bridge="=", nemo_1="="),
    COMM: MegatronFlag(
        declared=Flag(kind="words", choices=("p2p", "a2a", "allgather", "a2a+p2p")), exports="megatron", nemo=_MODEL
    ),
    LEVELS: MegatronFlag(declared=Flag(kind="numbers"), exports="megatron", bridge="="),
    EP: MegatronFlag(exports="both", nemo=_STRATEGY, bridge="=", nemo_1="="),
    EXPERT_TP: MegatronFlag(exports="both", nemo=_STRATEGY, bridge="="),
    "--moe-token-dispatcher-type": MegatronFlag(
        declared=Flag(kind="word", choices=("allgather", "alltoall", "flex")), exports="both", nemo=_MODEL
    ),
    "--moe-grouped-gemm": MegatronFlag(declared=_SWITCH, exports="both", nemo=_MODEL),
    MICRO: MegatronFlag(exports="both", nemo="data.=", nemo_1="="),
    GLOBAL: MegatronFlag(exports="both", nemo="data.=", nemo_1="="),
    SEQUENCE: MegatronFlag(exports="both", nemo="data.=", bridge="=", nemo_1="encoder_seq_length"),
    "--use-distributed-optimizer": MegatronFlag(declared=_SWITCH, exports="both", nemo=_OPTIM, absent=(False,)),
    "--optimizer-cpu-offload": MegatronFlag(declared=_SWITCH, exports="megatron", nemo=_OPTIM),
    "--optimizer-offload-fraction": MegatronFlag(exports="megatron", nemo=_OPTIM),
    "--overlap-cpu-optimizer-d2h-h2d": MegatronFlag(declared=_SWITCH, exports="megatron", nemo=_OPTIM),
    "--use-precision-aware-optimizer": MegatronFlag(declared=_SWITCH, exports="megatron", nemo=_OPTIM),
    INSTANCES: MegatronFlag(exports="megatron", nemo=_STRATEGY, absent=(1,)),
    "--overlap-grad-reduce": MegatronFlag(declared=_SWITCH, exports="both", nemo=_DDP, absent=(False,)),
    "--overlap-param-gather": MegatronFlag(declared=_SWITCH, exports="both", nemo=_DDP, absent=(False,)),
    SHARDING: MegatronFlag(
        declared=Flag(kind="word", choices=_STRATEGIES), exports="megatron", nemo=_DDP, absent=("no_shard",)
    ),
    "--use-megatron-fsdp": MegatronFlag(declared=_SWITCH, exports="megatron", nemo=_DDP, absent=(False,)),
    FSDP2: MegatronFlag(declared=_SWITCH, exports="megatron"),
    KEEPS_WEIGHTS: MegatronFlag(declared=_SWITCH, exports="megatron"),
    GRANULARITY: MegatronFlag(
        declared=Flag(kind="word", choices=("full", "selective")),
        exports="both",
        nemo=_MODEL,
        absent=(None,),
        bridge="=",
        nemo_1="activations_checkpoint_granularity",
        printed="activations_checkpoint_granularity",
    ),
    "--recompute-modules": MegatronFlag(
        declared=Flag(kind="words", choices=RECOMPUTE_MODULES), exports="megatron", nemo=_MODEL, bridge="="
    ),
    "--recompute-method": MegatronFlag(
        declared=Flag(kind="word", choices=("uniform", "block")),
        exports="both",
        nemo=_MODEL,
        absent=(None,),
        bridge="=",
        nemo_1="activations_checkpoint_method",
    ),
    "--recompute-num-layers": MegatronFlag(exports="both", nemo=_MODEL, absent=(None,), bridge="="),
    "--bf16": MegatronFlag(declared=_SWITCH, exports="both"),
    "--fp16": MegatronFlag(declared=_SWITCH, exports="both"),
    "--optimizer": MegatronFlag(
        declared=Flag(
            kind="word",
            choices=tuple(names[0] for one in OPTIMIZERS.values() if (names := one.spellings.get("megatron"))),
        ),
        exports="both",
    ),
    "--sgd-momentum": MegatronFlag(exports="both"),
    "--sft": MegatronFlag(declared=_SWITCH, exports="megatron"),
    "--outer-dp-sharding-strategy": MegatronFlag(
        declared=Flag(kind="word", choices=("no_shard", "optim")), exports="megatron"
    ),
    "--no-gradient-accumulation-fusion": MegatronFlag(declared=_SWITCH, exports="megatron"),
    "--ckpt-format": MegatronFlag(
        declared=Flag(kind="word", choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor")), exports="megatron"
    ),
    "--fp8-format": MegatronFlag(
        declared=Flag(kind="word", choices=("e4m3", "hybrid")), exports="megatron", printed="fp8"
    ),
    "--fp4-format": MegatronFlag(declared=Flag(kind="word", choices=("e2m1",)), exports="megatron", printed="fp4"),
    "--fp4-recipe": MegatronFlag(declared=Flag(kind="word", choices=("nvfp4", "custom")), exports="megatron"),
    "--num-layers": MegatronFlag(bridge="=", nemo_1="="),
    "--hidden-size": MegatronFlag(bridge="=", nemo_1="="),
    "--ffn-hidden-size": MegatronFlag(bridge="=", nemo_1="="),
    "--num-attention-heads": MegatronFlag(bridge="=", nemo_1="="),
    "--num-query-groups": MegatronFlag(nemo_1="="),
    "--kv-channels": MegatronFlag(bridge="=", nemo_1="="),
    "--vocab-size": MegatronFlag(bridge="="),
    "--make-vocab-size-divisible-by": MegatronFlag(bridge="=", nemo_1="="),
    "--normalization": MegatronFlag(declared=_WORD, bridge="="),
    "--position-embedding-type": MegatronFlag(declared=_WORD, bridge="="),
    "--max-position-embeddings": MegatronFlag(bridge="=", nemo_1="="),
    "--add-qkv-bias": MegatronFlag(declared=_SWITCH, bridge="="),
    "--qk-layernorm": MegatronFlag(declared=_SWITCH, bridge="="),
    "--multi-latent-attention": MegatronFlag(declared=_SWITCH, bridge="="),
    "--q-lora-rank": MegatronFlag(bridge="="),
    "--kv-lora-rank": MegatronFlag(bridge="="),
    "--qk-head-dim": MegatronFlag(bridge="="),
    "--qk-pos-emb-head-dim": MegatronFlag(bridge="="),
    "--v-head-dim": MegatronFlag(bridge="="),
    MTP: MegatronFlag(bridge="="),
    "--hybrid-override-pattern": MegatronFlag(declared=_WORD, bridge="="),
    "--mtp-hybrid-override-pattern": MegatronFlag(declared=_WORD, bridge="="),
    "--mamba-state-dim": MegatronFlag(bridge="="),
    "--mamba-head-dim": MegatronFlag(bridge="="),
    "--mamba-num-groups": MegatronFlag(bridge="="),
    "--mamba-num-heads": MegatronFlag(bridge="="),
    "--num-experts": MegatronFlag(bridge="num_moe_experts", nemo_1="num_moe_experts"),
    "--moe-router-topk": MegatronFlag(bridge="=", nemo_1="="),
    "--moe-ffn-hidden-size": MegatronFlag(bridge="="),
    "--moe-latent-size": MegatronFlag(bridge="="),
    "--moe-shared-expert-intermediate-size": MegatronFlag(bridge="="),
    "--decoder-first-pipeline-num-layers": MegatronFlag(bridge="num_layers_in_first_pipeline_stage"),
    "--decoder-last-pipeline-num-layers": MegatronFlag(bridge="num_layers_in_last_pipeline_stage"),
}
"""All flags with a line above, in the order in which recipes of NeMo 2 set them."""

COMMON_FLAGS = {flag: row.declared for flag, row in FLAGS.items() if row.exports == "both"}
"""Flags that both Megatron-LM and MindSpeed-LLM accept, of those that exports write."""
MEGATRON_FLAGS = {flag: row.declared for flag, row in FLAGS.items() if row.exports != "none"}
"""Flags that exports write."""


def underscored(flag: str) -> str:
    """Return the name of a flag with underscores."""
    return flag.removeprefix("--").replace("-", "_")


def names_in(program: Literal["nemo", "bridge", "nemo_1", "printed"]) -> dict[str, str]:
    """Return the flags that a program has under names of its own, with these names."""
    named = {flag: getattr(row, program) for flag, row in FLAGS.items()}
    return {flag: name.replace("=", underscored(flag)) for flag, name in named.items() if name}


_ALIKE: Mapping[str, str] = {
    "pipeline": f"{PP} --pipe-parallel-size {VPP} --num-layers-per-virtual-pipeline-stage {LAYOUT} --num-layer-list"
    " --custom-pipeline-layers"
    " --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers"
    " --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    f" {OF_ROUND} {PATTERN} --hybrid-override-pattern --mtp-hybrid-override-pattern --hybrid-attention-ratio"
    " --hybrid-mlp-ratio",
    "context": f"{COMM} {LEVELS} --context-parallel-algo --ulysses-degree-in-cp",
    "tensor": f"{TP} --model-parallel-size",
    "sequence": "--sequence-parallel --tp-comm-overlap --tp-comm-overlap-cfg",
    "experts": f"{EP} --moe-expert-parallel-size --moe-tp-extend-ep",
    "dispatcher": "--moe-token-dispatcher-type --moe-flex-dispatcher-backend --moe-enable-deepep",
    "micro-batch": f"{MICRO} --batch-size",
    "sharding": f"--use-megatron-fsdp --use-custom-fsdp {FSDP2} {KEEPS_WEIGHTS}",
    "offload": "--optimizer-cpu-offload --optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d",
    "recompute": f"{GRANULARITY} --recompute-method --recompute-num-layers --recompute-modules --recompute-activations"
    " --checkpoint-activations --checkpoint-num-layers",
    "precision": "--bf16 --fp16 --fp8-format --fp8-hybrid --fp8-e4m3 --fp4-format --fp4-recipe",
}
"""Flags that say one thing together, so that a command exchanges all of them or none."""

GROUPS: Mapping[str, str] = {flag: group for group, flags in _ALIKE.items() for flag in flags.split()}
"""Group of each of these flags."""

NEVER_ADDED = frozenset({"--overlap-grad-reduce", "--overlap-param-gather", "--moe-grouped-gemm"})
"""Habits of exports, which no configuration needs: a user's command without them stays without them."""

NEVER_REMOVED = frozenset({"--no-gradient-accumulation-fusion", "--use-precision-aware-optimizer"})
"""Flags that a configuration may need, and that a user's command may have for reasons of its own."""
