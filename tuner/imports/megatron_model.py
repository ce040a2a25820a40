"""The sizes of a model from the flags of a Megatron-LM pretrain script.

Sources: Megatron-LM megatron/training/arguments.py (names, defaults and what is derived: the MLP's inner size, the size
of a head, experts as wide as the MLP) and megatron-core 0.16.1 models/gpt/gpt_layer_specs.py (moe_layer_freq),
transformer/transformer_config.py (MLATransformerConfig's sizes); MindSpeed-LLM's scripts for --padded-vocab-size,
--noop-layers, --n-shared-experts, --first-k-dense-replace, --multi-head-latent-attention and its sizes.
"""

from __future__ import annotations

import re
from typing import Any

from tuner.imports.flags import Flags

_SIZES = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_heads": "--num-attention-heads",
    "vocab_size": "--vocab-size",
}
DIVISIBLE_BY = 128
"""--make-vocab-size-divisible-by where nobody says."""


def model_of(flags: Flags) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of a ModelSpec, and those that the flags leave open with the flag that would tell each.

    Raises:
        ConfigError: a size is no whole number.
    """
    sizes = {
        "num_layers": flags.count("--num-layers"),
        "hidden_size": flags.count("--hidden-size"),
        "num_heads": flags.count("--num-attention-heads"),
        "vocab_size": _vocab_size(flags),
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    if not {"num_layers", "hidden_size", "num_heads"} & set(known):
        return {}, {}
    missing = {name: _SIZES[name] for name in sizes if name not in known}
    if "num_layers" in known:
        known["num_layers"] -= len(_noop_layers(flags))
    if "hidden_size" in known and "num_heads" in known:
        known |= _attention(flags, known["hidden_size"], known["num_heads"]) | _mlp(flags, known["hidden_size"])
        known |= _experts(flags, known.get("num_layers", 0), known["ffn_size"])
    return known | _tables(flags), missing


def _vocab_size(flags: Flags) -> int | None:
    """Rows of the table; Megatron-LM pads them to a multiple of --make-vocab-size-divisible-by times tp.

    The part with tp is left out, which differs from candidate to candidate.
    """
    padded = flags.count("--padded-vocab-size")
    size = flags.count("--vocab-size")
    if padded is not None or size is None:
        return padded
    multiple = flags.count("--make-vocab-size-divisible-by") or DIVISIBLE_BY
    return -(-size // multiple) * multiple


def _noop_layers(flags: Flags) -> set[str]:
    text = flags.text("--noop-layers")
    return set(filter(None, text.split(","))) if text else set()


def _tables(flags: Flags) -> dict[str, Any]:
    """Embedding, positions, norms, biases, and what stands behind the last layer."""
    rotary = flags.has("--use-rotary-position-embeddings", "--no-position-embedding")
    kind = flags.text("--position-embedding-type") or ("rope" if rotary else "learned_absolute")
    positions = flags.count("--max-position-embeddings") if kind == "learned_absolute" else 0
    norm = flags.one_of("--normalization", {"LayerNorm": "layer", "RMSNorm": "rms", "L2Norm": "rms"}, "layer")
    bias = not flags.has("--disable-bias-linear")
    return {
        "tied_embeddings": not flags.has("--untie-embeddings-and-output-weights"),
        "learned_positions": positions or 0,
        "norm": norm,
        "qkv_bias": bias or flags.has("--add-qkv-bias"),
        "attention_output_bias": bias or flags.has("--add-dense-bias"),
        "mlp_bias": bias,
        "num_mtp_layers": flags.count("--mtp-num-layers", minimum=0) or 0,
    }


def _attention(flags: Flags, hidden_size: int, num_heads: int) -> dict[str, Any]:
    if flags.has("--multi-latent-attention", "--multi-head-latent-attention"):
        return _latent(flags, num_heads)
    grouped = flags.has("--group-query-attention")
    return {
        "num_kv_heads": (flags.count("--num-query-groups") if grouped else None) or num_heads,
        "head_dim": flags.count("--kv-channels") or max(1, hidden_size // num_heads),
        "qk_norm": flags.has("--qk-layernorm"),
    }


def _latent(flags: Flags, num_heads: int) -> dict[str, Any]:
    """Latent attention, whose norms stand at the ranks."""
    nope = flags.count("--qk-head-dim", "--qk-nope-head-dim") or 128
    rope = flags.count("--qk-pos-emb-head-dim", "--qk-rope-head-dim") or 64
    return {
        "num_kv_heads": num_heads,
        "head_dim": nope + rope,
        "q_lora_rank": flags.count("--q-lora-rank", minimum=0) or 0,
        "kv_lora_rank": flags.count("--kv-lora-rank") or 32,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": flags.count("--v-head-dim") or 128,
    }


def _mlp(flags: Flags, hidden_size: int) -> dict[str, Any]:
    """Without --ffn-hidden-size it is 4h, and with a gate two thirds of that in multiples of 64."""
    gated = flags.has("--swiglu", "--geglu")
    usual = int(4 * hidden_size * 2 / 3 / 64) * 64 if flags.has("--swiglu") else 4 * hidden_size
    return {"ffn_size": flags.count("--ffn-hidden-size") or usual, "gated_ffn": gated}


def _experts(flags: Flags, num_layers: int, ffn_size: int) -> dict[str, Any]:
    experts = flags.count("--num-experts")
    if not experts:
        return {}
    width = flags.count("--moe-ffn-hidden-size", "--moe-intermediate-size") or ffn_size
    shared = flags.count("--moe-shared-expert-intermediate-size", minimum=0) or 0
    number = flags.count("--n-shared-experts", minimum=0)
    if number is None:
        number = max(1, shared // width) if shared else 0
    return {
        "num_experts": experts,
        "top_k": flags.count("--moe-router-topk") or 2,
        "expert_ffn_size": width,
        "num_shared_experts": number,
        "shared_expert_ffn_size": shared or number * width,
        "shared_expert_gate": flags.has("--moe-shared-expert-gate") and number > 0,
        "router_bias": flags.has("--moe-router-enable-expert-bias"),
        **_moe_layers(flags, num_layers),
    }


def _moe_layers(flags: Flags, num_layers: int) -> dict[str, Any]:
    """Which layers have experts: `--moe-layer-freq 2`, or a list such as `([0]*3+[1]*58)`."""
    dense = flags.count("--first-k-dense-replace", minimum=0) or 0
    text = (flags.text("--moe-layer-freq") or "1").replace(" ", "")
    if re.fullmatch(r"[0-9]{1,6}", text):
        period = max(int(text), 1)
        if period > 1 and num_layers % period:  # Megatron begins with layer 0, a ModelSpec with layer period - 1
            flags.leave("--moe-layer-freq", f"{text} does not divide {num_layers} layers; taken as 1")
            period = 1
        return {"num_dense_layers": dense, "moe_layer_period": period}
    pattern = _pattern(text) if len(text) <= 1000 else ""
    leading = len(pattern) - len(pattern.lstrip("0"))
    if not pattern or "0" in pattern[leading:]:
        flags.leave("--moe-layer-freq", f"{text} is not modelled; every layer is taken to have experts")
        return {"num_dense_layers": dense}
    return {"num_dense_layers": leading}


def _pattern(text: str) -> str:
    """`([0]*3+[1]*58)` as 000111...; empty where it is none."""
    if not re.fullmatch(r"\(?\[[01,]+\](\*[0-9]{1,4})?(\+\[[01,]+\](\*[0-9]{1,4})?)*\)?", text):
        return ""
    parts = re.findall(r"\[([01,]+)\](?:\*([0-9]+))?", text)
    return "".join(digits.replace(",", "") * int(times or 1) for digits, times in parts)
