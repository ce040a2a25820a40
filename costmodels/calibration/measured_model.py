"""Model architecture of a measured run, read from its columns, its model's name and its remarks.

Measured files have no columns for head size, latent attention, gating, norms or positions. Where the remarks do not
name them, they follow from the model family. GPT, BLOOM, OPT, MPT and related models have layer norms and two MLP
matrices, and most of them have learned positions. All other models are built like LLaMA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from costmodels.job.model_spec import ModelSpec, plain_model

ASSUMED_GPT_VOCABULARY = 51200
"""GPT-2's 50,257 tokens padded to a multiple of 1,024 (Narayanan et al. 2021, section 5.1: V = 51,200).
Assumed for GPT rows that name no vocabulary, and recorded in the model's `assumed`."""

ASSUMED_VOCABULARIES = {"llama2": 32000, "llama-2": 32000, "llama3": 128256, "llama-3": 128256, "qwen": 151936}
"""Public vocabulary sizes of families whose rows leave the column empty."""

DEFAULT_LATENT_RANK = 512
"""Rank of latent queries, and of keys and values, where a Megatron-Core run has latent attention and names none."""

_LAYER_NORM_FAMILIES = ("gpt", "bloom", "opt", "mpt", "pangualpha", "megatron", "mt-nlg", "t5", "bert")
_LEARNED_POSITIONS = ("gpt", "opt", "mpt", "pangualpha", "mt-nlg", "megatron")
_ROTARY_GPT = ("gpt-neox", "gptneox", "gpt-j", "gptj")
_MODERN_GPT = ("gpt-oss", "gptoss", "gpt oss")


def model_of(
    name: str, source: str, sizes: Mapping[str, int | None], notes: str, sequence_length: int, *, is_tied: bool
) -> ModelSpec | None:
    """Return the model of a measured row, or None if a size is missing that no rule supplies.

    Args:
        name: Model name in the row.
        source: Publisher of the row.
        sizes: Values of the columns layers, hidden, heads, kv_heads, ffn, vocab, experts, topk and moe_ffn.
        notes: Remarks of the row.
        sequence_length: Number of rows of a learned position table.
        is_tied: Whether head and embedding share one table, as far as the source states.

    Raises:
        ConfigError: the sizes contradict each other.
    """
    family = name.lower()
    is_gpt_like = family.startswith(_LAYER_NORM_FAMILIES) and not family.startswith(_MODERN_GPT)
    gated = _find_property(notes, yes=r"swiglu|geglu|\bgated", no=r"non-gated|squared-relu")
    norm = "rms" if re.search(r"rms-?norm", notes, re.IGNORECASE) else "layer" if is_gpt_like else "rms"
    # learned positions need a table with one row per position; rotary ones need no parameters
    rotary = re.search(r"position-embedding-type=rope|\brotary\b", notes) or family.startswith(_ROTARY_GPT)
    has_positions = is_gpt_like and family.startswith(_LEARNED_POSITIONS) and not rotary
    has_positions = has_positions or "learned" in notes
    vocabulary, assumed = _vocabulary_size(family, sizes["vocab"], is_gpt_like=is_gpt_like)
    vocabulary = _find_number(r"GPT-2 vocabulary \((\d+)", notes) or vocabulary
    layers, hidden, heads = sizes["layers"], sizes["hidden"], sizes["heads"]
    experts, top_k, expert_ffn = (sizes[column] or 0 for column in ("experts", "topk", "moe_ffn"))
    ffn = sizes["ffn"] or expert_ffn
    kv_heads = sizes["kv_heads"]
    # without one of these sizes no parameter count can be right
    if not (layers and hidden and heads and kv_heads and ffn and vocabulary):
        return None
    fields: dict[str, Any] = {
        "head_dim": _find_number(r"(?:head_dim|kv-channels)[ =](\d+)", notes) or -(-hidden // heads),
        "num_kv_heads": kv_heads,
        "ffn_size": ffn,
    }
    fields |= _latent_attention(notes, heads)
    if experts > 1:
        fields |= _experts(notes, experts, top_k, expert_ffn or ffn)
    return plain_model(
        name=name,
        source=source,
        assumed=("gated_ffn", "norm", "learned_positions", *assumed),
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocabulary,
        tied_embeddings=is_tied,
        learned_positions=sequence_length if has_positions else 0,
        norm="layer" if norm == "layer" else "rms",
        num_heads=heads,
        num_mtp_layers=_find_number(r"(?:mtp-num-layers=|num-nextn-predict-layers=|MTP depth )(\d+)", notes) or 0,
        gated_ffn=not is_gpt_like if gated is None else gated,
        **fields,
    )


def _vocabulary_size(family: str, stated: int | None, *, is_gpt_like: bool) -> tuple[int | None, tuple[str, ...]]:
    """Return the vocabulary size, and the fields that were assumed for it."""
    if stated:
        return stated, ()
    if is_gpt_like:
        return ASSUMED_GPT_VOCABULARY, ("vocab_size",)
    known = [size for prefix, size in ASSUMED_VOCABULARIES.items() if prefix in family]
    return (known[0] if known else None), ("vocab_size",)


def _latent_attention(notes: str, heads: int) -> dict[str, int]:
    """Return sizes of multi-head latent attention if the remarks name it: `MLA q_lora1536 kv_lora512 rope64 nope128`.

    Sizes that they leave out are Megatron-Core's defaults (transformer_config.py, MLATransformerConfig), which are
    DeepSeek's.
    """
    rank = _find_number(r"kv[_-]lora(?:[_-]rank)?[ =]?(\d+)", notes)
    is_bare = not rank and "multi-latent-attention=True" in notes
    if not rank and not is_bare:
        return {}
    query_rank = _find_number(r"\bq[_-]lora(?:[_-]rank)?[ =]?(\d+)", notes)
    nope = _find_number(r"(?:\bnope ?|\bqk(?=\d+\+))(\d+)", notes) or 128
    rope = _find_number(r"(?:\brope ?|\bqk\d+\+)(\d+)", notes) or 64
    return {
        "q_lora_rank": query_rank or (DEFAULT_LATENT_RANK if is_bare else 0),
        "kv_lora_rank": rank or DEFAULT_LATENT_RANK,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": _find_number(r"\bv(\d+)\b", notes) or 128,
        "head_dim": nope + rope,
        "num_kv_heads": heads,
    }


def _experts(notes: str, experts: int, top_k: int, expert_ffn: int) -> dict[str, int]:
    """Return the expert sizes, with the shared experts and dense first layers that the remarks name."""
    stated_width = _find_number(r"shared[ _]expert[ _]ffn[ =](\d+)|moe-shared-expert-intermediate-size=(\d+)", notes)
    shared = _find_number(r"(\d+) shared experts?|shared experts (\d+)|n-shared-experts=(\d+)", notes)
    # a stated width means one shared expert unless the remarks give their number
    if shared is None:
        shared = int(bool(stated_width) or "shared expert" in notes)
    first = re.search(r"first (?:\d+ )?layers? dense", notes)
    dense = _find_number(
        r"first (\d+) layers? dense|\b(\d+) dense layers?|first-k-dense-replace=(\d+)|moe-layer-freq=\(\[0\]\*(\d+)",
        notes,
    )
    return {
        "num_experts": experts,
        "top_k": max(top_k, 1),
        "expert_ffn_size": expert_ffn,
        "num_shared_experts": shared,
        "shared_expert_ffn_size": stated_width or shared * expert_ffn,
        "num_dense_layers": dense or int(bool(first)),
    }


def _find_property(notes: str, *, yes: str, no: str) -> bool | None:
    """Return whether the remarks state a property; None if they are silent. A denial may contain the asserting word."""
    if re.search(no, notes, re.IGNORECASE):
        return False
    return True if re.search(yes, notes, re.IGNORECASE) else None


def _find_number(pattern: str, notes: str) -> int | None:
    """Return the number in the first matched group of `pattern`; None if there is none or it is no plausible size."""
    found = re.search(pattern, notes)
    digits = next(filter(None, found.groups())) if found else ""
    return int(digits) if 0 < len(digits) < 10 else None
