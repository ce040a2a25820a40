"""Sizes of a model, read from the flags of a Megatron-LM pretrain script.

Sources: Megatron-LM megatron/training/arguments.py (names, defaults and derived values: inner size of the MLP, size of
a head, width of experts; --quick-geglu gates) and megatron-core 0.16.1 models/gpt/gpt_layer_specs.py (moe_layer_freq),
transformer/transformer_config.py (MLATransformerConfig's sizes); MindSpeed-LLM
mindspeed_llm/training/arguments.py for --padded-vocab-size, --noop-layers, --n-shared-experts, --first-k-dense-replace,
--multi-head-latent-attention and its sizes, --geglu and --gelu-tanh ("Tanh Geglu"); bigscience's Megatron-DeepSpeed
megatron/arguments.py for --glu-activation; deepspeedai/Megatron-DeepSpeed megatron/arguments.py (--num-key-value-heads,
--num-experts as a list, --topk, --expert-interval, --mlp-type) and model/transformer.py (layers with experts);
FlagScale flagscale/train/arguments.py for --multiple-of and --hidden-dim-multiplier; bigcode's Megatron-LM for
--attention-head-type; Pai-Megatron-Patch megatron_patch/arguments.py for --intermediate-size, --n-head-kv, --moe-topk,
--num-shared-experts and --shared-moe-ffn-hidden-size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from hardware.io.errors import ConfigError
from tuner.imports.flags import Flags
from tuner.imports.megatron_hidden import Hidden
from tuner.imports.vocabulary import propose, why_unknown

_SIZES = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_heads": "--num-attention-heads",
    "vocab_size": "--vocab-size",
}
GATED = ("--swiglu", "--geglu", "--quick-geglu", "--gelu-tanh", "--glu-activation", "--gated-linear-unit")
"""Flags of activations that multiply by a gate, so that an MLP has three matrices."""
_ONE_MORE = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers with one entry more than --vocab-size, for the end of a document (megatron/training/tokenizer).

From megatron-core 0.18 on they have none more: within the padding, unless --vocab-size is a multiple of it.
"""
_ROTARY = (
    *("--use-rotary-position-embeddings", "--no-position-embedding", "--rope-style"),
    *("--use-llama2-rotary-position-embeddings", "--use-mistral-rotary-position-embeddings"),
)
"""Flags of models without a table of positions."""
DIVISIBLE_BY = 128
"""Default value of --make-vocab-size-divisible-by."""


def model_of(flags: Flags) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the known fields of a ModelSpec, and the missing fields with the flag that would state each.

    Raises:
        ConfigError: a size is not an integer, or layers have unlike numbers of experts.
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
    if "vocab_size" in missing and not flags.is_unknown("--vocab-size"):
        missing["vocab_size"] = why_unknown(flags)
    if "num_layers" in known:
        known["num_layers"] -= len(noop_layers(flags))
    if "hidden_size" in known and "num_heads" in known:
        known |= _attention(flags, known["hidden_size"], known["num_heads"]) | _mlp(flags, known["hidden_size"])
        known |= _experts(flags, known.get("num_layers", 0), known["ffn_size"])
    return known | _tables(flags), missing


def hidden_sizes(flags: Flags, read: Collection[str], hidden: Iterable[Hidden]) -> dict[str, str]:
    """Return the sizes of a model that may be others than those read, with the reason for each.

    Args:
        flags: Flags of the command.
        read: Names of the flags that the model was read from.
        hidden: Words of the command that may hold further flags.
    """
    sized = {name for name in read if not name.startswith(("--tokenizer", "--patch-tokenizer", "--vocab-file"))}
    found = {one.what: str(one) for one in flags.unread if one.what in sized and flags.is_unknown(one.what)}
    for one in hidden:
        found |= {name: f"{name} {one.place_of([name])}" for name in sized & (one.flags or set())}
    keys = {flag: key for key, flag in _SIZES.items()}
    return {keys.get(flag, flag): why for flag, why in sorted(found.items())}


def _vocab_size(flags: Flags) -> int | None:
    """Return the number of rows of the embedding table.

    If the flags only name a known tokenizer, its size is proposed.

    Megatron-LM pads them to a multiple of --make-vocab-size-divisible-by times tp. The factor tp is ignored, because it
    differs among the configurations of a study.
    """
    padded = flags.count("--padded-vocab-size", "--pad-vocab-size-to")
    size = flags.count("--vocab-size")
    if size is None and (proposed := propose(flags)) is not None:
        size = proposed[0].rows
    if padded is not None or size is None:
        return padded
    if flags.text_if_known("--tokenizer-type") in _ONE_MORE:
        size += 1
    multiple = flags.count("--make-vocab-size-divisible-by") or DIVISIBLE_BY
    return -(-size // multiple) * multiple


def noop_layers(flags: Flags) -> frozenset[int]:
    """Return the numbers of MindSpeed's no-op layers, which --num-layers includes."""
    text = flags.text("--noop-layers") or ""
    return frozenset(int(number) for number in text.split(",") if re.fullmatch(r"[0-9]{1,6}", number))


def _tables(flags: Flags) -> dict[str, Any]:
    """Return the fields about embedding, positions, norms, biases and multi-token prediction layers."""
    rotary = flags.has(*_ROTARY)
    kind = flags.text("--position-embedding-type") or ("rope" if rotary else "learned_absolute")
    table = ("--max-position-embeddings", "--max-absolute-position-embeddings")
    positions = flags.count(*table) if kind in ("learned_absolute", "absolute") else 0
    is_rms = flags.has("--apply-layernorm-rms", "--use-rmsnorm", "--use-rms-norm", "--rmsnorm", "--RMSNorm")
    kinds = {"LayerNorm": "layer", "RMSNorm": "rms", "L2Norm": "rms", "layernorm": "layer", "rmsnorm": "rms"}
    norm = flags.one_of("--normalization", kinds, "rms" if is_rms else "layer")
    bias = not flags.has("--disable-bias-linear")
    return {
        "tied_embeddings": not flags.has("--untie-embeddings-and-output-weights"),
        "learned_positions": positions or 0,
        "norm": norm,
        "qkv_bias": bias or flags.has("--add-qkv-bias"),
        "attention_output_bias": bias or flags.has("--add-dense-bias"),
        "mlp_bias": bias,
        "num_mtp_layers": flags.count("--mtp-num-layers", "--num-nextn-predict-layers", minimum=0) or 0,
    }


def _attention(flags: Flags, hidden_size: int, num_heads: int) -> dict[str, Any]:
    if flags.has("--multi-latent-attention", "--multi-head-latent-attention"):
        return _latent(flags, num_heads)
    kv_heads = flags.count("--num-query-groups") if flags.has("--group-query-attention") else None
    if flags.text("--attention-head-type") == "multiquery":
        kv_heads = 1
    return {
        "num_kv_heads": kv_heads or flags.count("--num-key-value-heads", "--n-head-kv") or num_heads,
        "head_dim": flags.count("--kv-channels") or max(1, hidden_size // num_heads),
        "qk_norm": flags.has("--qk-layernorm"),
    }


def _latent(flags: Flags, num_heads: int) -> dict[str, Any]:
    """Return the fields about multi-head latent attention.

    Its norms are applied at the low-rank projections, so that qk_norm stays unset.
    """
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
    """Return the fields about the MLP.

    The default inner size is 4h; with --swiglu it is two thirds of 4h, rounded down to a multiple of 64. FlagScale
    rounds up to --multiple-of instead.
    """
    default = 4 * hidden_size
    if flags.has("--swiglu"):
        default = int(4 * hidden_size * 2 / 3)
        multiple = flags.count("--multiple-of")
        text = flags.text("--hidden-dim-multiplier") if multiple else None
        if text is not None and re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", text):
            default = int(default * float(text))
        default = -(-default // multiple) * multiple if multiple else default // 64 * 64
    return {
        "ffn_size": flags.count("--ffn-hidden-size", "--intermediate-size") or default,
        "gated_ffn": flags.has(*GATED),
    }


def num_experts(flags: Flags) -> int:
    """Return the number of routed experts of a layer; one expert is a dense model.

    Raises:
        ConfigError: layers have unlike numbers of experts.
    """
    counts = flags.counts("--num-experts")
    if len(set(counts)) > 1:
        raise ConfigError(
            "gives layers unlike numbers of experts, which Meshtune does not model",
            key=flags.place("--num-experts"),
            value=" ".join(map(str, counts)),
        )
    experts = flags.count("--num-experts") or 0
    return experts if experts > 1 else 0


def has_experts(flags: Flags) -> bool:
    """Return whether the model has experts.

    A list of flags without the model's sizes has experts if it contains a flag for their parallelism. A number of
    experts that cannot be read may be any.
    """
    is_unknown = flags.has("--num-experts") and not flags.counts("--num-experts")
    of_experts = flags.has("--expert-model-parallel-size", "--expert-tensor-parallel-size")
    return is_unknown or num_experts(flags) > 0 or (of_experts and not flags.has("--num-layers", "--num-experts"))


def _experts(flags: Flags, num_layers: int, ffn_size: int) -> dict[str, Any]:
    experts = num_experts(flags)
    if not experts:
        return {}
    width = flags.count("--moe-ffn-hidden-size", "--moe-intermediate-size") or ffn_size
    shared = flags.count("--moe-shared-expert-intermediate-size", "--shared-moe-ffn-hidden-size", minimum=0) or 0
    number = flags.count("--n-shared-experts", "--num-shared-experts", minimum=0)
    if number is None:
        number = max(1, shared // width) if shared else 0
    is_deepspeed = flags.has("--moe-expert-parallel-size", "--expert-interval", "--topk")
    if is_deepspeed and flags.text("--mlp-type") == "residual":
        number = 1  # PR-MoE: each layer with experts has a dense MLP beside them
    return {
        "num_experts": experts,
        "top_k": flags.count("--moe-router-topk", "--moe-topk", "--topk") or (1 if is_deepspeed else 2),
        "expert_ffn_size": width,
        "num_shared_experts": number,
        "shared_expert_ffn_size": shared or number * width,
        "shared_expert_gate": flags.has("--moe-shared-expert-gate", "--shared-expert-gate") and number > 0,
        "router_bias": flags.has("--moe-router-enable-expert-bias"),
        **({"moe_layer_period": _interval(flags, num_layers)} if is_deepspeed else _moe_layers(flags, num_layers)),
    }


def _interval(flags: Flags, num_layers: int) -> int:
    """Return the period of layers with experts in Megatron-DeepSpeed, where it is 2 by default."""
    period = flags.count("--expert-interval") or 2
    return period if period <= max(num_layers, 1) else 1


def _moe_layers(flags: Flags, num_layers: int) -> dict[str, Any]:
    """Return the fields about which layers have experts.

    --moe-layer-freq is a period such as 2, or a list such as `([0]*3+[1]*58)`. In MindSpeed-LLM -1 is no dense layer.
    """
    text = flags.text("--first-k-dense-replace")
    dense = 0 if text == "-1" else flags.count("--first-k-dense-replace", minimum=0) or 0
    text = (flags.text("--moe-layer-freq") or "1").replace(" ", "")
    text = "1" if text == "-1" else text
    if re.fullmatch(r"[0-9]{1,6}", text):
        period = max(int(text), 1)
        # Megatron-LM begins with layer 0, a ModelSpec with layer period - 1; the counts agree if the period divides.
        if period > 1 and num_layers % period:
            flags.doubt("--moe-layer-freq", f"{text} does not divide {num_layers} layers, and would be read as 1")
            period = 1
        return {"num_dense_layers": dense, "moe_layer_period": period}
    pattern = expand_pattern(text) if len(text) <= 1000 else ""
    leading = len(pattern) - len(pattern.lstrip("0"))
    if not pattern or "0" in pattern[leading:]:
        flags.doubt("--moe-layer-freq", f"{text} is not modelled: Meshtune would assume that every layer has experts")
        return {"num_dense_layers": dense}
    return {"num_dense_layers": leading}


def expand_pattern(text: str) -> str:
    """Expand a list such as `([0]*3+[1]*58)` to 000111...; return an empty text if it is not such a list."""
    if not re.fullmatch(r"\(?\[[01,]+\](\*[0-9]{1,4})?(\+\[[01,]+\](\*[0-9]{1,4})?)*\)?", text):
        return ""
    parts = re.findall(r"\[([01,]+)\](?:\*([0-9]+))?", text)
    return "".join(digits.replace(",", "") * int(times or 1) for digits, times in parts)
