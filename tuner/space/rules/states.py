"""Rules on what ranks keep: shards of states, offloading and recomputation."""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import OFFLOAD_MODES, RECOMPUTE_MODES
from costmodels.job.setting import Setting
from costmodels.optimizers.registry import OPTIMIZERS
from hardware.arrays import IntArray
from tuner.space.rules.rule import Columns, Keep, Rule, expert_tensor, replicas


def _is_dealt_by_layer(s: Setting) -> np.bool_:
    """Return whether Megatron-LM's distributed optimizer gives ranks whole weights of the job's optimizer."""
    return np.bool_(OPTIMIZERS[s.job.optimizer].sharded_by.get("megatron") == (1,))


def _shards_hold_experts(s: Setting, c: Columns) -> Keep:
    shards = c["tp"] * c["dp_shard"] * c["cp"] * c["up"]
    return np.asarray((c["dp_shard"] == 0) | (shards % (expert_tensor(c) * c["ep"]) == 0) | (not s.job.model.is_moe))


def _least_stage(s: Setting, c: Columns) -> IntArray:
    # offloaded states need a stage of at least 1, and without replicas the lowest possible stage stands for all
    least = min(s.runtime.offered_stages)
    return np.where(_is_offloaded(c), max(least, 1), least)


def _is_offloaded(c: Columns) -> Keep:
    return np.asarray(c["offload"] == OFFLOAD_MODES.index("optimizer"))


def _without_fsdp2(dimension: str, rule: str, default: int = 1) -> Rule:
    """Return a rule of FSDP2 in Megatron-LM (training/arguments.py, validate_args): a dimension is at its default."""
    return Rule(
        name=f"fsdp2_{dimension}",
        needs=(dimension,),
        keep=lambda s, c: (c[dimension] == default) | (not s.runtime.torch_fsdp2),
        reason=lambda _: (
            f"--use-torch-fsdp2 {rule}, so {dimension} must be {'none' if dimension == 'offload' else default}"
        ),
    )


STATE_RULES = (
    _without_fsdp2("pp", "runs no pipeline"),
    _without_fsdp2("ep", "deals no experts out to ranks"),
    # torch_fully_sharded_data_parallel.py: one mesh of all data and context parallel ranks
    _without_fsdp2("dp_shard", "shards over all replicas", 0),
    # training/arguments.py: offloading demands the distributed optimizer, which FSDP2 excludes
    _without_fsdp2("offload", "keeps the optimizer's states on the devices", OFFLOAD_MODES.index("none")),
    Rule(
        name="fsdp2_untied",
        needs=("zero_stage",),
        keep=lambda s, c: np.full(len(c["zero_stage"]), not (s.runtime.torch_fsdp2 and s.job.model.tied_embeddings)),
        reason=lambda s: (
            f"--use-torch-fsdp2 takes untied embeddings only; {s.job.model.name} "
            f"{'ties' if s.job.model.tied_embeddings else 'does not tie'} its own"
        ),
    ),
    Rule(
        name="fsdp2_fp16",
        needs=("zero_stage",),
        keep=lambda s, c: np.full(len(c["zero_stage"]), not (s.runtime.torch_fsdp2 and s.job.precision == "fp16")),
        reason=lambda _: "--use-torch-fsdp2 takes no fp16",
    ),
    Rule(
        name="dp_shard_within_dp",
        needs=("dp", "dp_shard"),
        keep=lambda _, c: c["dp"] % np.maximum(c["dp_shard"], 1) == 0,
        reason=lambda _: "dp_shard must divide dp",
    ),
    Rule(
        name="dp_shard_holds_experts",
        needs=("tp", "dp", "cp", "up", "ep", "expert_tp", "dp_shard"),
        keep=_shards_hold_experts,
        reason=lambda _: (
            "the ranks of one copy of the states, tp*dp_shard*cp*up, must be a multiple of ep times the experts' "
            "tensor degree"
        ),
    ),
    Rule(
        name="dp_shard_distinct",
        needs=("dp", "zero_stage", "dp_shard"),
        keep=lambda _, c: (c["dp_shard"] == 0) | ((c["dp_shard"] != c["dp"]) & (c["zero_stage"] > 0)),
        reason=lambda _: "dp_shard = 0 stands for dp_shard = dp, and for ZeRO stage 0, which shards nothing",
    ),
    Rule(
        name="recompute_supported",
        needs=("recompute",),
        keep=lambda s, c: np.isin(c["recompute"], [RECOMPUTE_MODES.index(m) for m in s.runtime.recompute_modes]),
        reason=lambda s: f"{s.runtime.name} offers recompute {', '.join(s.runtime.recompute_modes)}",
    ),
    Rule(
        name="recompute_layers_alone",
        needs=("recompute", "recompute_layers"),
        keep=lambda _, c: (c["recompute_layers"] == 0) | (c["recompute"] != RECOMPUTE_MODES.index("selective")),
        reason=lambda s: (
            f"{s.runtime.name} recomputes some layers in full or parts of all, not both (megatron-core "
            "transformer_config.py: recompute_method with recompute_granularity full)"
        ),
    ),
    Rule(
        name="recompute_layers_distinct",
        needs=("pp", "vpp", "recompute", "recompute_layers"),
        keep=lambda s, c: (
            (c["recompute_layers"] == 0)
            | (c["recompute"] != RECOMPUTE_MODES.index("full"))
            & (c["recompute_layers"] < -(-s.job.model.num_layers // (c["pp"] * c["vpp"])))
        ),
        reason=lambda _: "recompute full is all layers, and so are as many recompute_layers as a virtual stage has",
    ),
    Rule(
        name="offload_supported",
        needs=("offload",),
        keep=lambda s, c: np.isin(c["offload"], [OFFLOAD_MODES.index(m) for m in s.runtime.offload_modes]),
        reason=lambda s: f"{s.runtime.name} offers offload {', '.join(s.runtime.offload_modes)}",
    ),
    Rule(
        name="offload_needs_sharding",
        needs=("offload", "zero_stage"),
        keep=lambda _, c: ~_is_offloaded(c) | (c["zero_stage"] > 0),
        reason=lambda _: (
            "offload optimizer needs ZeRO stage 1 or more (megatron-core optimizer_config.py: the distributed "
            "optimizer; DeepSpeed runtime/zero/offload_config.py: stages 1 to 3)"
        ),
    ),
    Rule(
        name="offload_of_optimizer",
        needs=("offload",),
        keep=lambda s, c: ~_is_offloaded(c) | ("megatron" in OPTIMIZERS[s.job.optimizer].offloaded_by),
        reason=lambda s: (
            f"{s.runtime.name} keeps the states of Adam on the host, not those of {s.job.optimizer} (megatron-core "
            "optimizer/cpu_offloading/hybrid_optimizer.py)"
        ),
    ),
    Rule(
        name="zero_of_optimizer",
        needs=("zero_stage",),
        keep=lambda s, c: (c["zero_stage"] <= 1) | ~_is_dealt_by_layer(s),
        reason=lambda s: (
            f"{s.runtime.name} deals the states of {s.job.optimizer} out by whole weights, with ZeRO stages 0 and "
            "1 (training/arguments.py: emerging optimizers do not support FSDP)"
        ),
    ),
    Rule(
        name="dp_shard_of_optimizer",
        needs=("zero_stage", "dp_shard"),
        keep=lambda s, c: (c["dp_shard"] == 0) | (c["zero_stage"] == 0) | ~_is_dealt_by_layer(s),
        reason=lambda s: (
            f"{s.runtime.name} deals the states of {s.job.optimizer} out over all replicas "
            "(layer_wise_optimizer.py: one instance of the distributed optimizer)"
        ),
    ),
    Rule(
        name="zero_supported",
        needs=("zero_stage",),
        keep=lambda s, c: np.isin(c["zero_stage"], s.runtime.offered_stages),
        reason=lambda s: (
            f"{s.runtime.name} offers ZeRO stages {', '.join(map(str, s.runtime.offered_stages))}"
            f"{' with FSDP2' if s.runtime.torch_fsdp2 else ''}"
        ),
    ),
    Rule(
        name="zero_needs_replicas",
        needs=("dp", "cp", "up", "offload", "zero_stage"),
        keep=lambda s, c: (c["zero_stage"] == _least_stage(s, c)) | (replicas(c) > 1),
        reason=lambda s: (
            "without replicas (dp*cp*up = 1) every ZeRO stage is the same, and stage "
            f"{min(s.runtime.offered_stages)} stands for all (at least 1 if states are offloaded)"
        ),
    ),
    Rule(
        # DeepSpeed runtime/engine.py: "Native DeepSpeed MoE is not supported with ZeRO Stage 3"
        name="zero_3_without_experts",
        needs=("zero_stage",),
        keep=lambda s, c: (c["zero_stage"] < 3) | (not s.job.model.is_moe),
        reason=lambda s: f"{s.runtime.name} has no ZeRO stage 3 for models with experts",
    ),
    Rule(
        name="zero_without_pp",
        needs=("pp", "zero_stage"),
        keep=lambda _, c: (c["zero_stage"] <= 1) | (c["pp"] == 1),
        reason=lambda s: f"{s.runtime.name} runs ZeRO stages 2 and 3 without a pipeline only (pp = 1)",
    ),
)
