"""Rules on expert parallelism, and on the tensor degree of experts."""

from __future__ import annotations

import numpy as np

from costmodels.blocks.experts import slot_sizes
from costmodels.job.setting import Setting
from tuner.space.rules.rule import Columns, Keep, Rule, expert_tensor, joined, own_shards, replicas


def _experts_by_dp(s: Setting, c: Columns) -> Keep:
    experts = max(s.job.model.num_experts, 1)
    return np.asarray((experts % c["dp"] == 0) | (c["dp"] % experts == 0))


def _token_chunks(s: Setting) -> int:
    """Return the number of chunks of a sequence that fill slots of experts by themselves; 0 for a dense model."""
    model = s.job.model
    if not model.is_moe:
        return 0
    return slot_sizes(s.job.sequence_length, top_k=model.top_k, num_experts=model.num_experts)["chunks"]


def _cuts_experts_evenly(s: Setting, c: Columns) -> Keep:
    # where FSDP has more ranks than experts, it cuts dimension 1 of their weights, their inner or the hidden size
    model, shards = s.job.model, own_shards(c)
    copies = np.maximum(c["dp"] // shards, 1)
    is_dealt = c["ep"] > 1
    cut_by = np.where(is_dealt, np.maximum(shards * c["cp"] * c["tp"] // c["ep"], 1), shards * c["cp"])
    ranks = np.where(is_dealt, cut_by * c["ep"], cut_by * copies)
    (width, *_) = model.sizes("expert_ffn") or (0,)
    inner = np.where(is_dealt, width, width // c["tp"])
    is_even = (inner % cut_by == 0) & (model.hidden_size % cut_by == 0)
    return np.asarray((ranks <= model.num_experts) | is_even | (not model.is_moe))


EXPERT_RULES = (
    Rule(
        name="experts",
        needs=("ep",),
        keep=lambda s, c: max(s.job.model.num_experts, 1) % c["ep"] == 0,
        reason=lambda s: f"ep must divide the {s.job.model.num_experts} experts (1 for a dense model)",
    ),
    Rule(
        name="experts_by_dp",
        needs=("dp",),
        keep=_experts_by_dp,
        reason=lambda s: f"of dp and the {max(s.job.model.num_experts, 1)} experts one must divide the other",
    ),
    Rule(
        name="ep_within_dp",
        needs=("dp", "ep"),
        keep=lambda _, c: c["dp"] % c["ep"] == 0,
        reason=lambda _: "ep must divide dp",
    ),
    Rule(
        name="ep_within_dp_cp",
        needs=("dp", "cp", "up", "ep"),
        keep=lambda _, c: replicas(c) % c["ep"] == 0,
        reason=lambda _: "ep must divide dp*cp*up, the ranks that share a weight",
    ),
    Rule(
        name="ep_within_stage",
        needs=("tp", "dp", "cp", "up", "ep", "expert_tp"),
        keep=lambda _, c: c["tp"] * replicas(c) % (expert_tensor(c) * c["ep"]) == 0,
        reason=lambda _: (
            "ep times the experts' tensor degree (expert_tp, or tp where that is 0) must divide tp*dp*cp*up, the "
            "ranks of a stage"
        ),
    ),
    Rule(
        # torchtitan distributed/parallel_dims.py: efsdp * ep = dp_shard * cp * tp
        name="ep_within_shards",
        needs=("tp", "dp", "cp", "ep", "zero_stage", "dp_shard"),
        keep=lambda s, c: ((c["tp"] * c["cp"] * own_shards(c)) % c["ep"] == 0) | (not s.job.model.is_moe),
        reason=lambda _: (
            "ep must divide dp_shard*cp*tp, the ranks of one copy of the states (dp_shard is dp where it is 0, and "
            "1 for ZeRO stage 0)"
        ),
    ),
    Rule(
        # torchtitan distributed/fsdp.py, expert_shard_placement; torch FSDP cuts evenly but along dimension 0
        name="experts_cut_evenly",
        needs=("tp", "dp", "cp", "ep", "zero_stage", "dp_shard"),
        keep=_cuts_experts_evenly,
        reason=lambda s: (
            f"where ranks outnumber the {s.job.model.num_experts} experts, dp_shard*cp*tp/ep of them (dp_shard*cp "
            f"without ep) must divide the experts' inner size {joined(s.job.model.sizes('expert_ffn'))} (its "
            f"tp-th part without ep) and the hidden size {s.job.model.hidden_size}"
        ),
    ),
    Rule(
        # tuner/planners/sharding/hand_made.py deals experts out over whole axes of a plan's mesh; dp may be two
        name="ep_whole_axes",
        needs=("dp", "cp", "up", "ep"),
        keep=lambda _, c: (
            (c["ep"] == 1)
            | (c["ep"] == c["up"])
            | ((c["ep"] % (c["cp"] * c["up"]) == 0) & (c["dp"] % np.maximum(c["ep"] // (c["cp"] * c["up"]), 1) == 0))
        ),
        reason=lambda _: "ep must be up, or cp*up times a divisor of dp: experts are distributed over whole axes",
    ),
    Rule(
        name="token_chunks",
        needs=("tp", "cp", "up"),
        keep=lambda s, c: _token_chunks(s) % (c["tp"] * c["cp"] * c["up"]) == 0,
        reason=lambda s: f"tp*cp*up must divide the {_token_chunks(s)} chunks of tokens that fill the experts' slots",
    ),
    Rule(
        name="expert_tp_distinct",
        needs=("tp", "expert_tp"),
        keep=lambda s, c: (c["expert_tp"] == 0) | ((c["expert_tp"] != c["tp"]) & s.job.model.is_moe),
        reason=lambda _: "expert_tp = 0 stands for expert_tp = tp, and for every model without experts",
    ),
    Rule(
        # torchtitan 0.3 has no expert_tensor_parallel_degree: models/common/moe_sharding.py
        name="expert_tp_uncut",
        needs=("tp", "ep", "expert_tp"),
        keep=lambda s, c: (
            ((c["expert_tp"] <= 1) & ((c["ep"] == 1) | (expert_tensor(c) == 1))) | (not s.job.model.is_moe)
        ),
        reason=lambda s: f"{s.runtime.name} cuts no expert that ep deals out, so expert_tp must be 1",
    ),
    Rule(
        name="experts_need_sequence_parallel",
        needs=("tp", "sequence_parallel"),
        keep=lambda s, c: (c["sequence_parallel"] == 1) | (c["tp"] == 1) | (not s.job.model.is_moe),
        reason=lambda _: "experts with tp > 1 need sequence parallelism (megatron-core transformer_config.py)",
    ),
)
