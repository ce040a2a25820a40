"""Rules on tensor and Ulysses parallelism: heads, inner sizes and the vocabulary are dealt out whole."""

from __future__ import annotations

import numpy as np

from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.experts import Experts
from costmodels.job.setting import Setting
from tuner.space.rules.rule import Columns, Keep, Rule, all_divide, expert_tensor, joined


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
        size = joined(s.job.model.sizes("expert_ffn"))
        told.append(f"expert_tp (tp where that is 0) must divide the experts' inner size {size}")
    return ", and ".join(told)


def _explain_heads(s: Setting) -> str:
    told = []
    if heads := s.job.model.sizes("heads"):
        told.append(f"tp*up must divide the {joined(heads)} attention heads")
    if states := s.job.model.sizes("state_heads"):
        told.append(f"tp must divide the {joined(states)} heads of the recurrent mixers")
    return ", and ".join(told) or "tp*up must divide the attention heads"


def _scans_whole_heads(s: Setting, c: Columns) -> Keep:
    # a rank of cp*up has whole heads of a state, and whole groups of them, or one group of which others have a copy
    ranks = c["tp"] * c["cp"] * c["up"]
    kept = [heads % ranks == 0 for heads in s.job.model.sizes("scanned_heads")]
    kept += [(groups % ranks == 0) | (ranks % groups == 0) for groups in s.job.model.sizes("scanned_groups")]
    return np.asarray((c["cp"] * c["up"] == 1) | np.all([c["tp"] > 0, *kept], axis=0))


def _kv_heads(s: Setting) -> str:
    return joined(s.job.model.sizes("kv_heads"))


def _kv_heads_dealt(s: Setting, c: Columns) -> Keep:
    tp = c["tp"]
    dealt = [(heads % tp == 0) | (tp % heads == 0) for heads in s.job.model.sizes("kv_heads")]
    return np.asarray(np.all([tp > 0, *dealt], axis=0))


def _kv_heads_exchanged(s: Setting, c: Columns) -> Keep:
    tp, up = c["tp"], c["up"]
    whole = [np.maximum(heads // tp, 1) % up == 0 for heads in s.job.model.sizes("kv_heads")]
    return np.asarray(np.all([tp > 0, *whole], axis=0))


TENSOR_RULES = (
    Rule(
        name="heads",
        needs=("tp", "up"),
        keep=lambda s, c: (
            all_divide(s.job.model.sizes("heads"), c["tp"] * c["up"])
            & all_divide(s.job.model.sizes("state_heads"), c["tp"])
        ),
        reason=_explain_heads,
    ),
    Rule(
        # megatron-core 0.19.2 ssm/mamba_context_parallel.py; gated_delta_net/common.py: equal parts of each section
        name="scanned_heads",
        needs=("tp", "cp", "up"),
        keep=_scans_whole_heads,
        reason=lambda s: (
            f"tp*cp*up must divide the {joined(s.job.model.sizes('scanned_heads'))} heads of the recurrent "
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
        keep=lambda s, c: all_divide(s.job.model.sizes("kv_heads"), c["tp"]),
        reason=lambda s: (
            f"tp must divide the {_kv_heads(s)} key-value heads: {s.runtime.name} copies none to several tp ranks"
        ),
    ),
    Rule(
        # megatron-core transformer/attention.py: one projection for all heads, cut into equal parts
        name="projection",
        needs=("tp",),
        keep=lambda s, c: all_divide(s.job.model.sizes("projection"), c["tp"]),
        reason=lambda s: (
            "tp must divide the width of the projection to heads, keys and values, "
            f"{joined(s.job.model.sizes('projection'))}"
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
            & all_divide(s.job.model.sizes("expert_ffn"), expert_tensor(c))
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
            f"a rank's share of the inner size of gated MLPs ({joined(_told_ffn_sizes(s))}/tp) must be even: "
            f"{s.runtime.name} warms its kernels up with as many columns, and takes half of them for the gate"
        ),
    ),
    Rule(
        name="vocabulary",
        needs=("tp",),
        keep=lambda s, c: s.job.model.vocab_size % c["tp"] == 0,
        reason=lambda s: f"tp must divide the vocabulary of {s.job.model.vocab_size}: {s.runtime.name} pads none",
    ),
)
