"""The rules that a configuration must obey: each a named, vectorised predicate with its own reason text.

A rule looks at columns of degrees [n] and at the Setting, and says which rows it keeps. RULE_SETS says which rules a
framework has; a runtime profile names its set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.job import TrainingJob
from costmodels.parallel import RECOMPUTE_MODES, IntArray
from costmodels.runtime import RuntimeProfile
from hardware.cluster import Cluster

Keep = NDArray[np.bool_]
Columns = Mapping[str, IntArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the rules refer to: one job on one cluster under one runtime."""

    job: TrainingJob
    cluster: Cluster
    runtime: RuntimeProfile

    @property
    def padded_layers(self) -> int:
        """Layers with the no-op layers that the runtime adds."""
        multiple = self.runtime.layer_padding
        return -(-self.job.model.num_layers // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One condition that a configuration must meet.

    Attributes:
        name: How studies switch it off and reports count it.
        needs: The dimensions it looks at.
        keep: Which rows of the columns [n] meet it.
        reason: Why it exists, with the numbers of the setting; told when a configuration breaks it.
    """

    name: str
    needs: tuple[str, ...]
    keep: Callable[[Setting, Columns], Keep]
    reason: Callable[[Setting], str]


def _replicas(c: Columns) -> IntArray:
    return np.asarray(c["dp"] * c["cp"] * c["up"])


def _vpp_batches(s: Setting, c: Columns) -> Keep:
    micro_batches = s.job.global_batch_size // np.maximum(c["dp"] * c["mbs"], 1)
    return np.asarray((c["vpp"] == 1) | (micro_batches % c["pp"] == 0))


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="devices",
            needs=("pp", "tp", "dp", "cp", "up"),
            keep=lambda s, c: c["pp"] * c["tp"] * c["dp"] * c["cp"] * c["up"] == s.cluster.num_devices,
            reason=lambda s: f"pp*tp*dp*cp*up must be the {s.cluster.num_devices} devices of the cluster",
        ),
        Rule(
            name="tp_within_host",
            needs=("tp",),
            keep=lambda s, c: s.cluster.devices_per_host % c["tp"] == 0,
            reason=lambda s: f"tp must divide the {s.cluster.devices_per_host} devices of a host",
        ),
        Rule(
            name="heads",
            needs=("tp", "up"),
            keep=lambda s, c: s.job.model.num_heads % (c["tp"] * c["up"]) == 0,
            reason=lambda s: f"tp*up must divide the {s.job.model.num_heads} attention heads",
        ),
        Rule(
            name="kv_heads",
            needs=("tp",),
            keep=lambda s, c: (s.job.model.num_kv_heads % c["tp"] == 0) | (c["tp"] % s.job.model.num_kv_heads == 0),
            reason=lambda s: f"tp must divide the {s.job.model.num_kv_heads} key-value heads or be a multiple of them",
        ),
        Rule(
            name="kv_heads_ulysses",
            needs=("tp", "up"),
            keep=lambda s, c: np.maximum(s.job.model.num_kv_heads // c["tp"], 1) % c["up"] == 0,
            reason=lambda s: (
                f"up must divide the {s.job.model.num_kv_heads} key-value heads' share of one tp rank "
                "(at least 1): the all-to-all exchange deals whole heads"
            ),
        ),
        Rule(
            name="ffn",
            needs=("tp",),
            keep=lambda s, c: np.all([size % c["tp"] == 0 for size in _ffn_sizes(s)], axis=0),
            reason=lambda s: f"tp must divide the MLP's inner sizes {_ffn_sizes(s)}",
        ),
        Rule(
            name="sequence",
            needs=("tp", "cp", "up"),
            keep=lambda s, c: s.job.sequence_length % (c["tp"] * c["up"] * np.where(c["cp"] > 1, 2 * c["cp"], 1)) == 0,
            reason=lambda s: (
                f"tp*up*2cp (tp*up without cp) must divide the sequence of {s.job.sequence_length} tokens: "
                "ring attention deals two chunks to each rank to balance the causal mask"
            ),
        ),
        Rule(
            name="sequence_chunks",
            needs=("cp",),
            keep=lambda s, c: (c["cp"] == 1) | (s.job.sequence_length % (2 * c["cp"]) == 0),
            reason=lambda s: (
                f"2*cp must divide the sequence of {s.job.sequence_length} tokens: "
                "ring attention deals two chunks to each rank to balance the causal mask"
            ),
        ),
        Rule(
            name="pp_layers",
            needs=("pp",),
            keep=lambda s, c: c["pp"] <= s.job.model.num_layers,
            reason=lambda s: f"pp must not exceed the {s.job.model.num_layers} layers",
        ),
        Rule(
            name="global_batch",
            needs=("dp", "mbs"),
            keep=lambda s, c: s.job.global_batch_size % (c["dp"] * c["mbs"]) == 0,
            reason=lambda s: f"dp*mbs must divide the global batch of {s.job.global_batch_size} sequences",
        ),
        Rule(
            name="layers",
            needs=("pp", "vpp"),
            keep=lambda s, c: s.padded_layers % (c["pp"] * c["vpp"]) == 0,
            reason=lambda s: f"pp*vpp must divide the {_layers_in_words(s)}",
        ),
        Rule(
            name="layers_or_layout",
            needs=("pp", "vpp"),
            keep=lambda s, c: (c["vpp"] == 1) | (s.padded_layers % (c["pp"] * c["vpp"]) == 0),
            reason=lambda s: (
                f"pp*vpp must divide the {_layers_in_words(s)}; with vpp = 1 stages may be uneven "
                "(--pipeline-model-parallel-layout)"
            ),
        ),
        Rule(
            name="no_vpp",
            needs=("vpp",),
            keep=lambda _, c: c["vpp"] == 1,
            reason=lambda s: f"{s.runtime.name} has no interleaved schedule, so vpp must be 1",
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
            keep=_vpp_batches,
            reason=lambda _: "vpp > 1 needs the number of micro-batches, global batch / (dp*mbs), divisible by pp",
        ),
        Rule(
            name="experts",
            needs=("ep",),
            keep=lambda s, c: max(s.job.model.num_experts, 1) % c["ep"] == 0,
            reason=lambda s: f"ep must divide the {s.job.model.num_experts} experts (1 for a dense model)",
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
            name="recompute_supported",
            needs=("recompute",),
            keep=lambda s, c: np.isin(c["recompute"], [RECOMPUTE_MODES.index(m) for m in s.runtime.recompute_modes]),
            reason=lambda s: f"{s.runtime.name} offers recompute {', '.join(s.runtime.recompute_modes)}",
        ),
        Rule(
            name="zero_supported",
            needs=("zero_stage",),
            keep=lambda s, c: np.isin(c["zero_stage"], s.runtime.zero_stages),
            reason=lambda s: f"{s.runtime.name} offers ZeRO stages {', '.join(map(str, s.runtime.zero_stages))}",
        ),
        Rule(
            name="zero_needs_replicas",
            needs=("dp", "cp", "up", "zero_stage"),
            keep=lambda _, c: (c["zero_stage"] == 0) | (_replicas(c) > 1),
            reason=lambda _: "without replicas (dp*cp*up = 1) every ZeRO stage is stage 0",
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

_EVERY_RUNTIME = ("devices", "heads", "pp_layers", "global_batch")
_FURTHER = ("recompute_supported", "zero_supported", "zero_needs_replicas", "sequence_parallel_needs_tp")
_MEGATRON = (
    *_EVERY_RUNTIME,
    "kv_heads",
    "kv_heads_ulysses",
    "ffn",
    "sequence",
    "layers_or_layout",
    "vpp_two_stages",
    "vpp_micro_batches",
    "experts",
    "ep_within_dp_cp",
    *_FURTHER,
    "experts_need_sequence_parallel",
)
RULE_SETS: dict[str, tuple[str, ...]] = {
    # FlexParallel 4.1: found by search over rules, it reproduces all twelve search-space sizes of Table 2 exactly
    "flexparallel": (
        "devices",
        "tp_within_host",
        "heads",
        "sequence_chunks",
        "global_batch",
        "layers",
        "vpp_three_stages",
        "vpp_micro_batches",
        "experts",
        "ep_within_dp",
        *_FURTHER,
    ),
    # megatron-core 0.16 transformer_config.py and schedules.py; Megatron-LM training/arguments.py
    "megatron": _MEGATRON,
    # MindSpeed runs Megatron-LM's checks, repeats key-value heads for Ulysses, and splits layers evenly
    "mindspeed": tuple(
        "layers" if rule == "layers_or_layout" else rule for rule in _MEGATRON if rule != "kv_heads_ulysses"
    ),
    # nanotron parallel/context.py, config/parallelism_config.py: contiguous blocks, no interleaving
    "nanotron": (*_EVERY_RUNTIME, "kv_heads", "ffn", "sequence", "no_vpp", "experts", "ep_within_dp", *_FURTHER),
}
LAYER_PADDING = {"flexparallel": 8}
"""Rule sets that fill the layers with no-op layers up to a multiple, whatever the runtime's profile says."""

DUPLICATE_RULES = ("zero_needs_replicas", "sequence_parallel_needs_tp")
"""Rules that only remove duplicates from an opened dimension; a value fixed by the job is never refused by them."""


def _ffn_sizes(s: Setting) -> list[int]:
    model = s.job.model
    sizes = {model.ffn_size if model.num_moe_layers < model.num_layers else 0}
    sizes |= {model.expert_ffn_size, model.shared_expert_ffn_size}
    return sorted(sizes - {0})


def _layers_in_words(s: Setting) -> str:
    layers = s.job.model.num_layers
    if s.padded_layers == layers:
        return f"{layers} layers"
    return f"{s.padded_layers} layers ({layers}, filled with no-op layers to a multiple of {s.runtime.layer_padding})"
