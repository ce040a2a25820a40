"""Rules that a configuration must obey: named, vectorised predicates, each with its own reason text.

A rule takes columns of degrees [n] and a Setting, and returns a mask of the rows that it keeps. RULE_SETS lists the
rules of each framework; a runtime profile names its set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.experts import Experts, slot_sizes
from costmodels.job.parallel_config import DIMENSIONS, OFFLOAD_MODES, RECOMPUTE_MODES
from costmodels.job.setting import Setting
from costmodels.optimizers.registry import OPTIMIZERS
from hardware.arrays import IntArray

Keep = NDArray[np.bool_]
Columns = Mapping[str, IntArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One condition that a configuration must meet.

    Attributes:
        name: Name by which studies switch the rule off and reports count it.
        needs: Names of the dimensions that the rule reads.
        keep: Function that returns a mask [n] of the rows that meet the rule.
        reason: Function that explains the rule with the numbers of a setting, for configurations that break it.
    """

    name: str
    needs: tuple[str, ...]
    keep: Callable[[Setting, Columns], Keep]
    reason: Callable[[Setting], str]


def _replicas(c: Columns) -> IntArray:
    return np.asarray(c["dp"] * c["cp"] * c["up"])


def _micro_batches(s: Setting, c: Columns) -> IntArray:
    return np.asarray(s.job.global_batch_size // np.maximum(c["dp"] * c["mbs"], 1))


def _vpp_rounds(s: Setting, c: Columns) -> Keep:
    # torch's interleaved schedule runs m micro-batches in max(m // pp, 1) rounds, which must be of equal length
    micro_batches = _micro_batches(s, c)
    return np.asarray((c["vpp"] == 1) | (micro_batches % np.maximum(micro_batches // c["pp"], 1) == 0))


def shortens_chunks(num_layers: int, pp: IntArray, vpp: IntArray) -> Keep:
    """Return whether the longest of pp*vpp chunks has fewer layers than with a smaller vpp, or all are equal [n]."""
    longest = -(-num_layers // (pp * vpp))
    before = -(-num_layers // (pp * np.maximum(vpp - 1, 1)))
    return np.asarray((vpp == 1) | (num_layers % (pp * vpp) == 0) | (longest < before))


def _joined_in(s: Setting) -> str:
    is_host = s.cluster.num_domains == s.cluster.num_hosts
    return "of a host" if is_host else "that a domain of several hosts joins"


def _context_chunks(c: Columns) -> IntArray:
    # ring attention cuts the sequence into 2cp chunks, so that each rank has an early and a late one
    return np.asarray(c["up"] * np.where(c["cp"] > 1, 2 * c["cp"], 1))


def _experts_by_dp(s: Setting, c: Columns) -> Keep:
    experts = max(s.job.model.num_experts, 1)
    return np.asarray((experts % c["dp"] == 0) | (c["dp"] % experts == 0))


def _is_dealt_by_layer(s: Setting) -> np.bool_:
    """Return whether Megatron-LM's distributed optimizer gives ranks whole weights of the job's optimizer."""
    return np.bool_(OPTIMIZERS[s.job.optimizer].sharded_by.get("megatron") == (1,))


def _token_chunks(s: Setting) -> int:
    """Return the number of chunks of a sequence that fill slots of experts by themselves; 0 for a dense model."""
    model = s.job.model
    if not model.is_moe:
        return 0
    return slot_sizes(s.job.sequence_length, top_k=model.top_k, num_experts=model.num_experts)["chunks"]


def _expert_tensor(c: Columns) -> IntArray:
    return np.where(c["expert_tp"] == 0, c["tp"], c["expert_tp"])


def _shards_hold_experts(s: Setting, c: Columns) -> Keep:
    shards = c["tp"] * c["dp_shard"] * c["cp"] * c["up"]
    return np.asarray((c["dp_shard"] == 0) | (shards % (_expert_tensor(c) * c["ep"]) == 0) | (not s.job.model.is_moe))


def _joined(sizes: Sequence[int]) -> str:
    return " and ".join(str(size) for size in sizes)


def _all_divide(sizes: Sequence[int], degree: IntArray) -> Keep:
    return np.asarray(np.all([degree > 0, *(size % degree == 0 for size in sizes)], axis=0))


def _own_shards(c: Columns) -> IntArray:
    # torchtitan's data_parallel_shard_degree; 1 without ZeRO
    shards = np.where(c["dp_shard"] == 0, c["dp"], c["dp_shard"])
    return np.where(c["zero_stage"] == 0, 1, shards)


def _cuts_experts_evenly(s: Setting, c: Columns) -> Keep:
    # where FSDP has more ranks than experts, it cuts dimension 1 of their weights, their inner or the hidden size
    model, shards = s.job.model, _own_shards(c)
    copies = np.maximum(c["dp"] // shards, 1)
    is_dealt = c["ep"] > 1
    cut_by = np.where(is_dealt, np.maximum(shards * c["cp"] * c["tp"] // c["ep"], 1), shards * c["cp"])
    ranks = np.where(is_dealt, cut_by * c["ep"], cut_by * copies)
    (width, *_) = model.sizes("expert_ffn") or (0,)
    inner = np.where(is_dealt, width, width // c["tp"])
    is_even = (inner % cut_by == 0) & (model.hidden_size % cut_by == 0)
    return np.asarray((ranks <= model.num_experts) | is_even | (not model.is_moe))


def _split_length(c: Columns, chunks: IntArray) -> IntArray:
    # norms are split over tp with sequence parallelism alone
    return np.asarray(np.where(c["sequence_parallel"] == 1, c["tp"], 1) * chunks)


def _ffn_sizes(s: Setting) -> list[int]:
    return list(s.job.model.sizes("ffn"))


def _told_ffn_sizes(s: Setting) -> list[int]:
    """Return what Megatron-LM is told as --ffn-hidden-size of gated MLPs: of dense ones, else of experts."""
    blocks = {block for layer in s.job.model.layers for block in layer}
    dense = [one for one in blocks if isinstance(one, DenseMlp)]
    experts = [one for one in blocks if isinstance(one, Experts)]
    return sorted({one.ffn_size for one in dense or experts if one.gated})


def _explain_ffn(s: Setting) -> str:
    told = [f"tp must divide the MLP's inner sizes {_ffn_sizes(s)}"] if _ffn_sizes(s) else []
    if s.job.model.is_moe:
        size = _joined(s.job.model.sizes("expert_ffn"))
        told.append(f"expert_tp (tp where that is 0) must divide the experts' inner size {size}")
    return ", and ".join(told)


def _explain_heads(s: Setting) -> str:
    told = []
    if heads := s.job.model.sizes("heads"):
        told.append(f"tp*up must divide the {_joined(heads)} attention heads")
    if states := s.job.model.sizes("state_heads"):
        told.append(f"tp must divide the {_joined(states)} heads of the recurrent mixers")
    return ", and ".join(told) or "tp*up must divide the attention heads"


def _scans_whole_heads(s: Setting, c: Columns) -> Keep:
    # a rank of cp*up has whole heads of a state, and whole groups of them, or one group of which others have a copy
    ranks = c["tp"] * c["cp"] * c["up"]
    kept = [heads % ranks == 0 for heads in s.job.model.sizes("scanned_heads")]
    kept += [(groups % ranks == 0) | (ranks % groups == 0) for groups in s.job.model.sizes("scanned_groups")]
    return np.asarray((c["cp"] * c["up"] == 1) | np.all([c["tp"] > 0, *kept], axis=0))


def _kv_heads(s: Setting) -> str:
    return _joined(s.job.model.sizes("kv_heads"))


def _kv_heads_dealt(s: Setting, c: Columns) -> Keep:
    tp = c["tp"]
    dealt = [(heads % tp == 0) | (tp % heads == 0) for heads in s.job.model.sizes("kv_heads")]
    return np.asarray(np.all([tp > 0, *dealt], axis=0))


def _kv_heads_exchanged(s: Setting, c: Columns) -> Keep:
    tp, up = c["tp"], c["up"]
    whole = [np.maximum(heads // tp, 1) % up == 0 for heads in s.job.model.sizes("kv_heads")]
    return np.asarray(np.all([tp > 0, *whole], axis=0))


def _least_stage(s: Setting, c: Columns) -> IntArray:
    # offloaded states need a stage of at least 1, and without replicas the lowest possible stage stands for all
    least = min(s.runtime.offered_stages)
    return np.where(_is_offloaded(c), max(least, 1), least)


def _is_offloaded(c: Columns) -> Keep:
    return np.asarray(c["offload"] == OFFLOAD_MODES.index("optimizer"))


def _describe_layers(s: Setting) -> str:
    layers = s.job.model.num_layers
    if s.padded_layers == layers:
        return f"{layers} layers"
    return f"{s.padded_layers} layers ({layers}, filled with no-op layers to a multiple of {s.runtime.layer_padding})"


MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's mask (torch/nn/attention/flex_attention.py, _DEFAULT_SPARSE_BLOCK_SIZE)."""

CHUNKS_WITHOUT_LAYERS = 2
"""Most chunks of a layout of Megatron-LM that may hold no layer: the first and the last."""

_TWO_CHUNKS = "ring attention deals two chunks to each rank to balance the causal mask"


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


def _absent(dimension: str, what: str, default: int = 1) -> Rule:
    return Rule(
        name=f"no_{dimension}",
        needs=(dimension,),
        keep=lambda _, c: c[dimension] == default,
        reason=lambda s: f"{s.runtime.name} has no {what}, so {dimension} must be {default}",
    )


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        _absent("pp", "pipeline parallelism"),
        _absent("tp", "tensor parallelism"),
        _absent("cp", "ring attention"),
        _absent("up", "Ulysses attention"),
        _absent("vpp", "interleaved schedule"),
        _absent("ep", "expert parallelism"),
        _absent("expert_tp", "tensor parallelism of the experts apart from tp", 0),
        _absent("dp_shard", "sharding over a part of dp", 0),
        _without_fsdp2("pp", "runs no pipeline"),
        _without_fsdp2("ep", "deals no experts out to ranks"),
        # torch_fully_sharded_data_parallel.py: one mesh of all data and context parallel ranks
        _without_fsdp2("dp_shard", "shards over all replicas", 0),
        # training/arguments.py: offloading demands the distributed optimizer, which FSDP2 excludes
        _without_fsdp2("offload", "keeps the optimizer's states on the devices", OFFLOAD_MODES.index("none")),
        Rule(
            name="fsdp2_untied",
            needs=("zero_stage",),
            keep=lambda s, c: np.full(
                len(c["zero_stage"]), not (s.runtime.torch_fsdp2 and s.job.model.tied_embeddings)
            ),
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
        _absent("recompute_layers", "recomputation of some layers of a stage", 0),
        Rule(
            name="devices",
            needs=("pp", "tp", "dp", "cp", "up"),
            keep=lambda s, c: c["pp"] * c["tp"] * c["dp"] * c["cp"] * c["up"] == s.cluster.num_devices,
            reason=lambda s: f"pp*tp*dp*cp*up must be the {s.cluster.num_devices} devices of the cluster",
        ),
        Rule(
            name="tp_divides_host",
            needs=("tp",),
            keep=lambda s, c: s.cluster.devices_per_domain % c["tp"] == 0,
            reason=lambda s: f"tp must divide the {s.cluster.devices_per_domain} devices {_joined_in(s)}",
        ),
        Rule(
            name="heads",
            needs=("tp", "up"),
            keep=lambda s, c: (
                _all_divide(s.job.model.sizes("heads"), c["tp"] * c["up"])
                & _all_divide(s.job.model.sizes("state_heads"), c["tp"])
            ),
            reason=_explain_heads,
        ),
        Rule(
            # megatron-core 0.19.2 ssm/mamba_context_parallel.py; gated_delta_net/common.py: equal parts of each section
            name="scanned_heads",
            needs=("tp", "cp", "up"),
            keep=_scans_whole_heads,
            reason=lambda s: (
                f"tp*cp*up must divide the {_joined(s.job.model.sizes('scanned_heads'))} heads of the recurrent "
                "mixers, which run along whole sequences, and divide their groups or be a multiple of them"
            ),
        ),
        Rule(
            name="kv_heads",
            needs=("tp",),
            keep=_kv_heads_dealt,
            reason=lambda s: f"tp must divide the {_kv_heads(s)} key-value heads or be a multiple of them",
        ),
        Rule(
            name="kv_heads_whole",
            needs=("tp",),
            keep=lambda s, c: _all_divide(s.job.model.sizes("kv_heads"), c["tp"]),
            reason=lambda s: (
                f"tp must divide the {_kv_heads(s)} key-value heads: {s.runtime.name} copies none to several tp ranks"
            ),
        ),
        Rule(
            # megatron-core transformer/attention.py: one projection for all heads, cut into equal parts
            name="projection",
            needs=("tp",),
            keep=lambda s, c: _all_divide(s.job.model.sizes("projection"), c["tp"]),
            reason=lambda s: (
                "tp must divide the width of the projection to heads, keys and values, "
                f"{_joined(s.job.model.sizes('projection'))}"
            ),
        ),
        Rule(
            name="kv_heads_ulysses",
            needs=("tp", "up"),
            keep=_kv_heads_exchanged,
            reason=lambda s: (
                f"up must divide the {_kv_heads(s)} key-value heads' share of one tp rank "
                "(at least 1): the all-to-all exchange deals whole heads"
            ),
        ),
        Rule(
            name="ffn",
            needs=("tp", "expert_tp"),
            keep=lambda s, c: (
                np.all([size % c["tp"] == 0 for size in _ffn_sizes(s)], axis=0)
                & _all_divide(s.job.model.sizes("expert_ffn"), _expert_tensor(c))
            ),
            reason=_explain_ffn,
        ),
        Rule(
            # Megatron-LM training/initialize.py, _warmup_jit_function: SwiGLU of a rank's share of the inner size
            name="ffn_halves",
            needs=("tp",),
            keep=lambda s, c: np.all(
                [np.ones(len(c["tp"]), dtype=bool), *(size // c["tp"] % 2 == 0 for size in _told_ffn_sizes(s))], axis=0
            ),
            reason=lambda s: (
                f"a rank's share of the inner size of gated MLPs ({_joined(_told_ffn_sizes(s))}/tp) must be even: "
                f"{s.runtime.name} warms its kernels up with as many columns, and takes half of them for the gate"
            ),
        ),
        Rule(
            name="sequence",
            needs=("tp", "cp", "up"),
            keep=lambda s, c: s.job.sequence_length % (c["tp"] * _context_chunks(c)) == 0,
            reason=lambda s: (
                f"tp*up*2cp (tp*up without cp) must divide the sequence of {s.job.sequence_length} tokens: "
                f"{_TWO_CHUNKS}"
            ),
        ),
        Rule(
            # megatron-core utils.py, get_batch_on_this_cp_rank: two chunks for each rank of cp*up, also with all-to-all
            # exchange alone; tensor_parallel/mappings.py: the rest is split over tp with sequence parallelism
            name="sequence_ranks",
            needs=("tp", "cp", "up", "sequence_parallel"),
            keep=lambda s, c: (
                (s.job.sequence_length % np.where(c["cp"] * c["up"] > 1, 2 * c["cp"] * c["up"], 1) == 0)
                & (s.job.sequence_length % _split_length(c, c["cp"] * c["up"]) == 0)
            ),
            reason=lambda s: (
                f"2*cp*up (1 without cp and up) must divide the sequence of {s.job.sequence_length} tokens, and with "
                f"sequence parallelism tp*cp*up too: each rank of cp*up takes two chunks to balance the causal mask"
            ),
        ),
        Rule(
            # torchtitan trainer.py, seq_len_divisor
            name="sequence_split",
            needs=("tp", "cp", "sequence_parallel"),
            keep=lambda s, c: s.job.sequence_length % _split_length(c, np.where(c["cp"] > 1, 2 * c["cp"], 1)) == 0,
            reason=lambda s: (
                f"tp*2*cp (tp without cp, 2*cp without sequence parallelism) must divide the sequence of "
                f"{s.job.sequence_length} tokens"
            ),
        ),
        Rule(
            # torch/distributed/tensor/experimental/_context_parallel/_attention.py: masks of whole blocks for each rank
            name="sequence_blocks",
            needs=("cp",),
            keep=lambda s, c: (c["cp"] == 1) | (s.job.sequence_length % (MASK_BLOCK * c["cp"]) == 0),
            reason=lambda s: (
                f"cp > 1 needs whole blocks of FlexAttention's mask: {MASK_BLOCK}*cp must divide the sequence of "
                f"{s.job.sequence_length} tokens"
            ),
        ),
        Rule(
            name="sequence_context",
            needs=("cp", "up"),
            keep=lambda s, c: s.job.sequence_length % _context_chunks(c) == 0,
            reason=lambda s: (
                f"up*2cp (up without cp) must divide the sequence of {s.job.sequence_length} tokens: {_TWO_CHUNKS}"
            ),
        ),
        Rule(
            name="sequence_chunks",
            needs=("cp",),
            keep=lambda s, c: (c["cp"] == 1) | (s.job.sequence_length % (2 * c["cp"]) == 0),
            reason=lambda s: f"2*cp must divide the sequence of {s.job.sequence_length} tokens: {_TWO_CHUNKS}",
        ),
        Rule(
            name="sequence_parts",
            needs=("tp", "cp", "up"),
            keep=lambda s, c: s.job.sequence_length % (c["tp"] * c["cp"] * c["up"]) == 0,
            reason=lambda s: f"tp*cp*up must divide the sequence of {s.job.sequence_length} tokens",
        ),
        Rule(
            name="cp_or_up",
            needs=("cp", "up"),
            keep=lambda _, c: (c["cp"] == 1) | (c["up"] == 1),
            reason=lambda s: f"{s.runtime.name} runs ring attention (cp) or Ulysses (up), not both",
        ),
        Rule(
            name="tp_or_context",
            needs=("tp", "cp", "up"),
            keep=lambda _, c: (c["tp"] == 1) | (c["cp"] * c["up"] == 1),
            reason=lambda s: f"{s.runtime.name} splits by tp or by cp and up, not both: they are modes of one group",
        ),
        Rule(
            name="pp_layers",
            needs=("pp",),
            keep=lambda s, c: c["pp"] <= s.job.model.num_layers,
            reason=lambda s: f"pp must not exceed the {s.job.model.num_layers} layers",
        ),
        Rule(
            # torchtitan models/common/decoder.py: "Weight tying is not supported with Pipeline Parallel"
            name="pp_untied",
            needs=("pp",),
            keep=lambda s, c: (c["pp"] == 1) | (not s.job.model.tied_embeddings),
            reason=lambda s: f"pp must be 1, because {s.job.model.name} ties its output head to the embedding",
        ),
        Rule(
            name="global_batch",
            needs=("dp", "mbs"),
            keep=lambda s, c: s.job.global_batch_size % (c["dp"] * c["mbs"]) == 0,
            reason=lambda s: f"dp*mbs must divide the global batch of {s.job.global_batch_size} sequences",
        ),
        Rule(
            name="one_micro_batch",
            needs=("dp", "mbs"),
            keep=lambda s, c: c["dp"] * c["mbs"] == s.job.global_batch_size,
            reason=lambda s: (
                f"dp*mbs must be the global batch of {s.job.global_batch_size} sequences: {s.runtime.name} adds up no "
                "gradients of several micro-batches"
            ),
        ),
        Rule(
            name="vocabulary",
            needs=("tp",),
            keep=lambda s, c: s.job.model.vocab_size % c["tp"] == 0,
            reason=lambda s: f"tp must divide the vocabulary of {s.job.model.vocab_size}: {s.runtime.name} pads none",
        ),
        Rule(
            name="layers",
            needs=("pp", "vpp"),
            keep=lambda s, c: s.padded_layers % (c["pp"] * c["vpp"]) == 0,
            reason=lambda s: f"pp*vpp must divide the {_describe_layers(s)}",
        ),
        Rule(
            # megatron-core transformer/pipeline_parallel_layer_layout.py: any layout from the embedding to the loss
            name="layers_or_layout",
            needs=("pp", "vpp"),
            keep=lambda s, c: c["pp"] * c["vpp"] <= s.job.model.num_layers + CHUNKS_WITHOUT_LAYERS,
            reason=lambda s: (
                f"pp*vpp must not exceed the {s.job.model.num_layers} layers by more than {CHUNKS_WITHOUT_LAYERS}: of "
                "the chunks only the first, with the embedding, and the last, with the loss, may be without layers"
            ),
        ),
        Rule(
            name="chunks_filled",
            needs=("pp", "vpp"),
            keep=lambda s, c: c["pp"] * c["vpp"] <= s.job.model.num_layers,
            reason=lambda s: (
                f"pp*vpp must not exceed the {s.job.model.num_layers} layers: chunks may be unequal, but none empty"
            ),
        ),
        Rule(
            name="vpp_shortens",
            needs=("pp", "vpp"),
            keep=lambda s, c: shortens_chunks(s.padded_layers, c["pp"], c["vpp"]),
            reason=lambda s: (
                f"with this vpp the longest chunk of the {_describe_layers(s)} is as long as with vpp - 1, which needs "
                "fewer messages; space.vpp may list it nevertheless"
            ),
        ),
        Rule(
            name="vpp_layers",
            needs=("vpp",),
            keep=lambda s, c: s.padded_layers % c["vpp"] == 0,
            reason=lambda s: f"vpp must divide the {_describe_layers(s)}",
        ),
        Rule(
            name="vpp_three_stages",
            needs=("pp", "vpp"),
            keep=lambda _, c: (c["vpp"] == 1) | (c["pp"] > 2),
            reason=lambda _: "vpp > 1 needs pp > 2",
        ),
        Rule(
            name="vpp_two_stages",
            needs=("pp", "vpp"),
            keep=lambda _, c: (c["vpp"] == 1) | (c["pp"] > 1),
            reason=lambda _: "vpp > 1 needs pp > 1",
        ),
        Rule(
            name="vpp_micro_batches",
            needs=("pp", "dp", "mbs", "vpp"),
            keep=lambda s, c: (c["vpp"] == 1) | (_micro_batches(s, c) % c["pp"] == 0),
            reason=lambda _: "vpp > 1 needs the number of micro-batches, global batch / (dp*mbs), divisible by pp",
        ),
        Rule(
            name="vpp_rounds",
            needs=("pp", "dp", "mbs", "vpp"),
            keep=_vpp_rounds,
            reason=lambda _: (
                "vpp > 1 needs rounds of equal length: m // pp (at least 1) must divide the number of micro-batches, "
                "m = global batch / (dp*mbs)"
            ),
        ),
        Rule(
            name="vpp_filled",
            needs=("pp", "dp", "mbs", "vpp"),
            keep=lambda s, c: (c["vpp"] == 1) | (_micro_batches(s, c) >= c["pp"]),
            reason=lambda _: "vpp > 1 needs at least pp micro-batches, global batch / (dp*mbs)",
        ),
        Rule(
            name="pp_filled",
            needs=("pp", "dp", "mbs", "vpp"),
            keep=lambda s, c: (c["vpp"] > 1) | (_micro_batches(s, c) >= c["pp"]),
            reason=lambda _: "vpp = 1 needs at least pp micro-batches, global batch / (dp*mbs)",
        ),
        Rule(
            # nanotron parallel/pipeline_parallel/engine.py, OneForwardOneBackwardPipelineEngine
            name="pp_nearly_filled",
            needs=("pp", "dp", "mbs"),
            keep=lambda s, c: _micro_batches(s, c) >= c["pp"] - 1,
            reason=lambda _: "needs at least pp - 1 micro-batches, global batch / (dp*mbs)",
        ),
        Rule(
            name="pp_micro_batches",
            needs=("pp", "dp", "mbs"),
            keep=lambda s, c: _micro_batches(s, c) % c["pp"] == 0,
            reason=lambda _: "pp must divide the number of micro-batches, global batch / (dp*mbs)",
        ),
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
            keep=lambda _, c: _replicas(c) % c["ep"] == 0,
            reason=lambda _: "ep must divide dp*cp*up, the ranks that share a weight",
        ),
        Rule(
            name="ep_within_stage",
            needs=("tp", "dp", "cp", "up", "ep", "expert_tp"),
            keep=lambda _, c: c["tp"] * _replicas(c) % (_expert_tensor(c) * c["ep"]) == 0,
            reason=lambda _: (
                "ep times the experts' tensor degree (expert_tp, or tp where that is 0) must divide tp*dp*cp*up, the "
                "ranks of a stage"
            ),
        ),
        Rule(
            # torchtitan distributed/parallel_dims.py: efsdp * ep = dp_shard * cp * tp
            name="ep_within_shards",
            needs=("tp", "dp", "cp", "ep", "zero_stage", "dp_shard"),
            keep=lambda s, c: ((c["tp"] * c["cp"] * _own_shards(c)) % c["ep"] == 0) | (not s.job.model.is_moe),
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
                f"without ep) must divide the experts' inner size {_joined(s.job.model.sizes('expert_ffn'))} (its "
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
                | (
                    (c["ep"] % (c["cp"] * c["up"]) == 0)
                    & (c["dp"] % np.maximum(c["ep"] // (c["cp"] * c["up"]), 1) == 0)
                )
            ),
            reason=lambda _: "ep must be up, or cp*up times a divisor of dp: experts are distributed over whole axes",
        ),
        Rule(
            name="token_chunks",
            needs=("tp", "cp", "up"),
            keep=lambda s, c: _token_chunks(s) % (c["tp"] * c["cp"] * c["up"]) == 0,
            reason=lambda s: (
                f"tp*cp*up must divide the {_token_chunks(s)} chunks of tokens that fill the experts' slots"
            ),
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
                ((c["expert_tp"] <= 1) & ((c["ep"] == 1) | (_expert_tensor(c) == 1))) | (not s.job.model.is_moe)
            ),
            reason=lambda s: f"{s.runtime.name} cuts no expert that ep deals out, so expert_tp must be 1",
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
            keep=lambda s, c: (c["zero_stage"] == _least_stage(s, c)) | (_replicas(c) > 1),
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
        Rule(
            name="no_sequence_parallel",
            needs=("sequence_parallel",),
            keep=lambda _, c: c["sequence_parallel"] == 0,
            reason=lambda s: f"{s.runtime.name} has no sequence parallelism",
        ),
        Rule(
            name="sequence_parallel_length",
            needs=("tp", "sequence_parallel"),
            keep=lambda s, c: (c["sequence_parallel"] == 0) | (s.job.sequence_length % c["tp"] == 0),
            reason=lambda s: f"with sequence parallelism tp must divide the sequence of {s.job.sequence_length} tokens",
        ),
        Rule(
            name="sequence_parallel_needs_tp",
            needs=("tp", "sequence_parallel"),
            keep=lambda _, c: (c["sequence_parallel"] == 0) | (c["tp"] > 1),
            reason=lambda _: "without tp there is nothing that sequence parallelism could split",
        ),
        Rule(
            name="experts_need_sequence_parallel",
            needs=("tp", "sequence_parallel"),
            keep=lambda s, c: (c["sequence_parallel"] == 1) | (c["tp"] == 1) | (not s.job.model.is_moe),
            reason=lambda _: "experts with tp > 1 need sequence parallelism (megatron-core transformer_config.py)",
        ),
    )
}

EQUAL_CHUNKS = Rule(
    name="equal_chunks",
    needs=("pp", "vpp"),
    keep=lambda s, c: (c["vpp"] == 1) | (s.padded_layers % (c["pp"] * c["vpp"]) == 0),
    reason=lambda s: (
        f"pp*vpp must divide the {_describe_layers(s)}: the command of the trials has neither {{flags}} nor "
        "{assignment}, by which it could be told unequal chunks"
    ),
)
"""Rule for trials that cannot be told the layers of each chunk, whatever the framework."""

_EVERY_RUNTIME = ("devices", "heads", "pp_layers", "global_batch")
_CHOICES = ("recompute_supported", "offload_supported", "zero_supported")
_FURTHER = (*_CHOICES, "zero_needs_replicas", "sequence_parallel_needs_tp")
# HSDP: Megatron-LM --num-distributed-optimizer-instances, torchtitan data_parallel_replicate_degree, llm-foundry
# sharding_strategy HYBRID_SHARD, MaxText ici_data_parallelism beside ici_fsdp_parallelism, InternEvo zero1.size
_SHARD = ("dp_shard_within_dp", "dp_shard_holds_experts", "dp_shard_distinct")
_LAYERS_AGAIN = ("recompute_layers_alone", "recompute_layers_distinct")
_MEGATRON = (
    *("devices", "heads", "global_batch"),
    *("kv_heads", "projection", "kv_heads_ulysses", "scanned_heads", "ffn", "sequence_ranks", "layers_or_layout"),
    *("vpp_shortens", "vpp_two_stages", "vpp_filled", "experts", "ep_within_stage", "expert_tp_distinct"),
    *(*_FURTHER, *_LAYERS_AGAIN),
    "experts_need_sequence_parallel",
)
_FSDP2 = ("fsdp2_ep", "fsdp2_untied", "fsdp2_fp16")
_OF_MINDSPEED = {"layers_or_layout": "chunks_filled", "vpp_filled": "vpp_micro_batches"}
_MEGATRON_2021 = (
    *_EVERY_RUNTIME,
    *("kv_heads", "ffn", "layers", "vpp_three_stages", "vpp_micro_batches", "no_cp", "no_up", "no_ep"),
    *(*_CHOICES, *_LAYERS_AGAIN),
)
# trials/jax_training and trials/torch_training/planned: costmodels/sharding writes plans by hand for whole key heads
# and equal parts only
_PLANNED = (
    *("devices", "kv_heads_whole", "kv_heads_ulysses", "ffn", "sequence_parts", "vocabulary"),
    *("no_pp", "no_vpp", "experts", "ep_whole_axes", "token_chunks"),
    *_FURTHER,
)
_SETS: dict[str, tuple[str, ...]] = {
    # FlexParallel 4.1: found by search over rules, it reproduces all twelve search-space sizes of Table 2 exactly
    "flexparallel": (
        *("devices", "tp_divides_host", "heads", "sequence_chunks", "global_batch"),
        *("layers", "vpp_three_stages", "vpp_micro_batches", "experts", "ep_within_dp"),
        *_FURTHER,
    ),
    # megatron-core 0.16 transformer_config.py, schedules.py and parallel_state.py (the experts' own tensor degree;
    # several instances of the distributed optimizer, each with all experts); Megatron-LM training/arguments.py;
    # distributed/fsdp/mcore_fsdp_adapter.py (Megatron-FSDP makes its mesh of all ranks, without a dimension of stages)
    "megatron": (
        *(*_MEGATRON, *_SHARD, "offload_needs_sharding", *_FSDP2, "fsdp2_dp_shard", "fsdp2_offload"),
        *("offload_of_optimizer", "zero_of_optimizer", "dp_shard_of_optimizer", "zero_without_pp", "ffn_halves"),
    ),
    # a framework that nobody named: most that have all of these dimensions descend from Megatron-LM (assumed)
    "unknown": (*_MEGATRON, "fsdp2_pp", *_FSDP2),
    # MindSpeed runs Megatron-LM's checks, repeats key-value heads for Ulysses, fills short chunks with no-op layers
    # (features_manager/pipeline_parallel/noop_layers.py), and knows one instance of the distributed optimizer and
    # rounds of pp micro-batches (both assumed)
    "mindspeed": (*(_OF_MINDSPEED.get(rule, rule) for rule in _MEGATRON if rule != "kv_heads_ulysses"),),
    # nanotron 0.4 parallel/context.py, config/parallelism_config.py (dp, pp, tp and experts beside them),
    # models/llama.py (whole key-value heads), parallel/pipeline_parallel/engine.py (one schedule, no interleaving)
    "nanotron": (
        *("devices", "pp_layers", "global_batch", "kv_heads_whole", "ffn"),
        *("no_vpp", "no_cp", "no_up", "no_ep", "pp_nearly_filled", "sequence_parallel_length"),
        *_FURTHER,
    ),
    # Megatron-LM v2 megatron/arguments.py (interleaving from 3 stages on), megatron/model/transformer.py (heads and
    # layers divide), megatron/schedules.py (micro-batches); no expert, context or sequence parallelism yet
    "megatron-2021": (*_MEGATRON_2021, "no_sequence_parallel"),
    # Megatron-LM v3: the same checks, and sequence parallelism (Korthikanti et al. 2022)
    "megatron-2022": (*_MEGATRON_2021, "sequence_parallel_length", "sequence_parallel_needs_tp"),
    # bigscience-workshop/Megatron-DeepSpeed: DeepSpeed's 1F1B engine (DeepSpeed issue 1110); partitions may be uneven
    # (BLOOM's prequel ran 70 layers on 12 stages); DeepSpeed runtime/pipe/engine.py refuses ZeRO 2 and 3
    "megatron-deepspeed": (
        *_EVERY_RUNTIME,
        *("kv_heads", "ffn", "no_vpp", "no_cp", "no_up", "no_ep"),
        *(*_CHOICES, "offload_needs_sharding", "zero_needs_replicas", "no_sequence_parallel"),
    ),
    # gpt-neox megatron/model/transformer.py: mpu.divide of key-value heads ("we do not yet clone KV heads in MQA across
    # TP ranks"), DeepSpeed's MoE with moe_expert_parallel_size; DeepSpeed runtime/pipe/engine.py (one schedule, no ZeRO
    # 2 and 3 with a pipeline); context parallelism is an open pull request (1299)
    "gpt-neox": (
        *("devices", "pp_layers", "global_batch", "kv_heads_whole", "ffn", "no_vpp", "no_cp", "no_up"),
        *("experts", "ep_within_dp", "offload_needs_sharding", "zero_without_pp", "zero_3_without_experts"),
        "sequence_parallel_length",
        *_FURTHER,
    ),
    # PaddleNLP trainer/training_args.py (sep or context parallelism, no sharding 2 and 3 with a pipeline); Paddle
    # fleet/meta_parallel/pipeline_parallel.py (interleaving from 3 stages on) and parallel_layers/pp_layers.py (equal
    # parts); key-value heads as in Megatron and experts over dp are assumed
    "paddle": (
        *_EVERY_RUNTIME,
        *("kv_heads", "kv_heads_ulysses", "ffn", "cp_or_up", "sequence_context"),
        *("layers", "vpp_three_stages", "vpp_filled", "experts", "ep_within_dp"),
        *("zero_without_pp", "sequence_parallel_length"),
        *_FURTHER,
    ),
    # torchtitan 0.3 distributed/parallel_dims.py (mesh, ep), trainer.py (sequence), distributed/fsdp.py (experts),
    # distributed/pipeline_parallel.py (any split), models/common/decoder.py (key-value heads, tied embeddings);
    # torch/distributed/pipelining/schedules.py (micro-batches)
    "torchtitan": (
        *("devices", "global_batch", "kv_heads_whole", "ffn", "no_up", "sequence_split", "sequence_blocks"),
        *("chunks_filled", "vpp_shortens", "vpp_two_stages", "vpp_rounds", "pp_filled", "pp_untied", "experts"),
        *("ep_within_shards", "experts_cut_evenly", "expert_tp_uncut"),
        *_FURTHER,
        *("dp_shard_within_dp", "dp_shard_distinct"),
    ),
    # trials/torch_training: DTensor shards into equal parts, ring attention takes balanced chunks, Ulysses repeats
    # key-value heads, torch/distributed/pipelining/schedules.py (rounds of micro-batches), experts over a whole stage
    "torch-reference": (
        *("devices", "heads", "global_batch", "kv_heads_whole", "ffn", "sequence"),
        *("chunks_filled", "vpp_shortens", "vpp_two_stages", "vpp_rounds", "vpp_filled"),
        *("experts", "ep_within_stage", "expert_tp_distinct"),
        *(*_FURTHER, "recompute_layers_distinct"),
        "experts_need_sequence_parallel",
        *_SHARD,
    ),
    # llm-foundry issue 1743 (FSDP and HSDP alone are supported; its set_torch_tp is an experiment),
    # llmfoundry/models/utils/config_moe_args.py (moe_world_size divides the ranks)
    "fsdp": (
        *("devices", "global_batch", "no_pp", "no_tp", "no_cp", "no_up", "no_vpp", "experts", "ep_within_dp"),
        *_FURTHER,
        *_SHARD,
    ),
    # maxtext configs/types.py (stages * repeats * layers per stage = layers; stages divide micro-batches),
    # kernels/attention/ulysses_attention.py (heads), pull request 1445 (load-balanced context parallelism); jax shards
    # a weight's dimension only into equal parts, which gives the rules on heads and MLP sizes
    "maxtext": (
        *("devices", "global_batch", "pp_layers", "kv_heads_whole", "kv_heads_ulysses", "ffn"),
        *("cp_or_up", "sequence_context", "layers", "vpp_two_stages", "pp_micro_batches", "experts", "ep_within_dp"),
        *(*_CHOICES, "sequence_parallel_needs_tp"),
        *_SHARD,
    ),
    # InternEvo core/context/parallel_context.py (one group for tp or isp, experts), core/parallel/shard.py
    # (partition_uniform), core/scheduler/pipeline_scheduler_1f1b.py (micro-batches), doc/code-docs/source/parallel.rst
    # (modes mtp, msp, fsp, isp), core/parallel/comm/isp.py (repeats key-value heads for its all-to-all)
    "internevo": (
        *("devices", "heads", "global_batch", "kv_heads_whole", "ffn", "tp_or_context", "sequence_context"),
        *("chunks_filled", "vpp_layers", "vpp_two_stages", "vpp_micro_batches"),
        *("experts", "experts_by_dp", "ep_within_dp_cp", "sequence_parallel_length"),
        *_FURTHER,
        *_SHARD,
    ),
    "jax-reference": (*_PLANNED, "global_batch"),
    # the ranks run the operators of one micro-batch
    "torch-planned": (*_PLANNED, "one_micro_batch"),
    # mindformers modules/transformer/transformer.py (TransformerOpParallelConfig: micro_batch_num >= pipeline_stage,
    # ring and Ulysses also together; FeedForward: dp // ep), models/utils.py (LayerSetting: offsets per mini stage),
    # models/llama/llama_transformer.py (key-value heads by model_parallel * Ulysses degree)
    "mindformers": (
        *("devices", "global_batch", "kv_heads_whole", "kv_heads_ulysses", "ffn", "sequence_context"),
        *("chunks_filled", "vpp_shortens", "vpp_two_stages", "vpp_filled", "pp_filled", "experts", "ep_within_dp"),
        "sequence_parallel_length",
        *_FURTHER,
    ),
}
"""Rules of each framework by name, with its sources beside it, and without those on dimensions that it lacks."""


def _with_absent(rules: tuple[str, ...]) -> tuple[str, ...]:
    """Add the rules that keep optional dimensions at their default where a framework has no rules for them."""
    return rules + tuple(f"no_{name}" for name in _OPTIONAL if not any(rule.startswith(name) for rule in rules))


_OPTIONAL = tuple(name for name, dimension in DIMENSIONS.items() if not dimension.choices)
"""Further dimensions that are numbers, where 0 stands for another's value. A runtime itself offers choices."""

RULE_SETS = {name: _with_absent(rules) for name, rules in _SETS.items()}
"""Rules of each framework by name."""
LAYER_PADDING = {"flexparallel": 8}
"""Multiple up to which a rule set fills the layers with no-op layers, whatever the runtime's profile says."""

FORMER_RULES = {
    "megatron": ("pp_layers", "vpp_micro_batches"),
    "mindspeed": ("layers", "pp_layers"),
    "unknown": ("pp_layers", "vpp_micro_batches"),
}
"""Rules that sets had in earlier versions, which studies may still switch off."""

UNEQUAL_CHUNKS = {"chunks_filled": 0, "layers_or_layout": CHUNKS_WITHOUT_LAYERS}
"""Rules that allow chunks of unequal length, with the number of chunks that may be without layers."""

THINNING_RULES = ("vpp_shortens",)
"""Rules that leave out what can be launched and gains little; not in force where a study lists the dimension."""

DUPLICATE_RULES = (
    *("zero_needs_replicas", "sequence_parallel_needs_tp", "expert_tp_distinct", "dp_shard_distinct"),
    "recompute_layers_distinct",
)
"""Rules that only remove duplicates from an opened dimension; they never refuse a value that the job fixes."""
