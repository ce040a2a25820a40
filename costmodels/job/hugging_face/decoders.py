"""Model types that are plain decoders: one kind of attention without a window, and MLPs of which some are experts."""

from __future__ import annotations

from typing import Any

from costmodels.job.hugging_face.config import Config
from hardware.io.errors import ConfigError

Sizes = dict[str, Any]
"""Values of a Decoder's fields by name."""


# Parts that several model types share. `tied` is the type's default of tie_word_embeddings.


def decoder(config: Config, *, tied: bool) -> Sizes:
    """Read a decoder like Llama's: RMS norms, a gated MLP, rotary positions."""
    return {
        "num_layers": config.count("num_hidden_layers"),
        "hidden_size": config.count("hidden_size"),
        "vocab_size": config.count("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=tied),
        "norm": "rms",
        "ffn_size": config.count("intermediate_size"),
        "gated_ffn": True,
    }


def grouped_heads(config: Config, *, kv_heads_may_miss: bool = False, head_dim: int | None = None) -> Sizes:
    """Read query, key and value heads.

    A null num_key_value_heads means one per query head in every configuration class. A missing key means the same only
    in some classes; in the others it means the number of the smallest model, which is more likely an accident, so the
    key is required there.

    Args:
        config: Keys of the config.json.
        kv_heads_may_miss: Whether the class takes one key head per query head where the key is missing.
        head_dim: Default of the model type; None stands for hidden_size / num_attention_heads.
    """
    num_heads = config.count("num_attention_heads")
    if not kv_heads_may_miss and "num_key_value_heads" not in config.mapping:
        raise ConfigError("is required and missing", key="num_key_value_heads")
    if config.mapping.get("head_dim") is None and head_dim is None:
        head_dim = even_head_dim(config.count("hidden_size"), num_heads)
    return {
        "num_heads": num_heads,
        "num_kv_heads": config.count("num_key_value_heads", default=num_heads),
        "head_dim": config.count("head_dim", default=head_dim),
    }


def even_head_dim(hidden_size: int, num_heads: int, *, hidden_key: str = "hidden_size") -> int:
    """Return hidden_size / heads, which must be whole."""
    if hidden_size % num_heads:
        rule = f"must be divisible by the {num_heads} attention heads where head_dim is not given"
        nearest = f"nearest: {max(1, round(hidden_size / num_heads)) * num_heads}"
        raise ConfigError(rule, key=hidden_key, value=hidden_size, nearest=nearest)
    return hidden_size // num_heads


def attention_biases(config: Config) -> Sizes:
    """Read the one flag that puts biases on all four projections; every class that has it defaults to False."""
    bias = config.flag("attention_bias", default=False)
    return {"qkv_bias": bias, "attention_output_bias": bias}


# Dense models


def llama(config: Config) -> Sizes:
    """Read Llama, and what has its keys."""
    return {
        **decoder(config, tied=False),
        **grouped_heads(config, kv_heads_may_miss=True),
        **attention_biases(config),
        "mlp_bias": config.flag("mlp_bias", default=False),
    }


def mistral(config: Config) -> Sizes:
    """Read Mistral."""
    return {**decoder(config, tied=False), **grouped_heads(config)}


def phi3(config: Config) -> Sizes:
    """Read Phi 3 or 4."""
    return {**decoder(config, tied=False), **grouped_heads(config, kv_heads_may_miss=True)}


def qwen2(config: Config) -> Sizes:
    """Read Qwen 2 or 2.5: biases of queries, keys and values."""
    return {**decoder(config, tied=False), **grouped_heads(config), "qkv_bias": True}


def qwen3(config: Config) -> Sizes:
    """Read Qwen 3: norms of queries and keys."""
    heads = grouped_heads(config, head_dim=128)
    return {**decoder(config, tied=False), **heads, **attention_biases(config), "qk_norm": True}


def qwen3_vl_text(config: Config) -> Sizes:
    """Read the language model of Qwen3-VL, whose class ties its head by default."""
    return {**qwen3(config), "tied_embeddings": config.flag("tie_word_embeddings", default=True)}


def gemma(config: Config) -> Sizes:
    """Read Gemma."""
    return {**decoder(config, tied=True), **grouped_heads(config, head_dim=256), **attention_biases(config)}


def gemma2(config: Config) -> Sizes:
    """Read Gemma 2: norms before and after attention and MLP."""
    return {**gemma(config), "norms_per_layer": 4}


def gemma3_text(config: Config) -> Sizes:
    """Read a Gemma 3 text model; published files leave out every key that has the class's default."""
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
    filled = Config(mapping={**defaults, **config.mapping}, read=config.read)
    return {**gemma2(filled), "qk_norm": True}


def gpt2(config: Config) -> Sizes:
    """Read GPT-2."""
    hidden_size = config.count("n_embd")
    num_heads = config.count("n_head")
    return {
        "num_layers": config.count("n_layer"),
        "hidden_size": hidden_size,
        "vocab_size": config.count("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=True),
        "learned_positions": config.count("n_positions"),
        "norm": "layer",
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": even_head_dim(hidden_size, num_heads, hidden_key="n_embd"),
        "qkv_bias": True,
        "attention_output_bias": True,
        "ffn_size": config.count("n_inner", default=4 * hidden_size),
        "gated_ffn": False,
        "mlp_bias": True,
    }


def gpt_neox(config: Config) -> Sizes:
    """Read a GPT-NeoX model; attention and MLP in parallel or in series have the same sizes."""
    hidden_size = config.count("hidden_size")
    num_heads = config.count("num_attention_heads")
    bias = config.flag("attention_bias", default=True)
    return {
        "num_layers": config.count("num_hidden_layers"),
        "hidden_size": hidden_size,
        "vocab_size": config.count("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
        "norm": "layer",
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": even_head_dim(hidden_size, num_heads),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "ffn_size": config.count("intermediate_size"),
        "gated_ffn": False,
        "mlp_bias": True,
    }


# Mixtures of experts


def mixtral(config: Config) -> Sizes:
    """Read Mixtral."""
    sizes = {**decoder(config, tied=False), **grouped_heads(config)}
    return {
        **sizes,
        "num_experts": config.count("num_local_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_ffn_size": sizes["ffn_size"],
    }


def qwen_experts(config: Config) -> Sizes:
    """Read the experts of Qwen."""
    return {
        "num_experts": config.first_count("num_experts", "num_local_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_ffn_size": config.count("moe_intermediate_size"),
        "num_dense_layers": leading_dense_layers(config),
        "moe_layer_period": config.count("decoder_sparse_step", default=1),
    }


def leading_dense_layers(config: Config) -> int:
    """Return the length of mlp_only_layers, which must name the first layers."""
    layers = config.value("mlp_only_layers", default=[])
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        rule = "must be a list of the first layers, 0, 1, 2, ... without a gap"
        raise ConfigError(rule, key="mlp_only_layers", value=layers)
    return len(layers)


def qwen2_moe(config: Config) -> Sizes:
    """Read Qwen 2 with experts, of which a gated one is shared."""
    return {
        **decoder(config, tied=False),
        **grouped_heads(config),
        "qkv_bias": config.flag("qkv_bias", default=True),
        **qwen_experts(config),
        "num_shared_experts": 1,
        "shared_expert_ffn_size": config.count("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }


def qwen3_moe(config: Config) -> Sizes:
    """Read Qwen 3 with experts."""
    heads = grouped_heads(config)  # unlike Qwen3Config, this class has no head_dim of its own
    biases = attention_biases(config)
    return {**decoder(config, tied=False), **heads, **biases, "qk_norm": True, **qwen_experts(config)}


def deepseek(config: Config) -> Sizes:
    """Read a DeepSeek-V2 model: latent attention, dense layers first, then routed and shared experts."""
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    config.read.add("head_dim")  # the class overwrites it
    num_heads = config.count("num_attention_heads")
    expert_ffn_size = config.count("moe_intermediate_size")
    num_shared_experts = config.count("n_shared_experts", minimum=0)
    if config.count("moe_layer_freq", default=1) != 1:
        rule = "must be 1, as in every published model; transformers reads no other"
        raise ConfigError(rule, key="moe_layer_freq", value=config.value("moe_layer_freq"))
    return {
        **decoder(config, tied=False),
        **attention_biases(config),
        "num_heads": num_heads,
        "num_kv_heads": config.count("num_key_value_heads", default=num_heads),
        "head_dim": nope + rope,
        "q_lora_rank": nullable_count(config, "q_lora_rank"),
        "kv_lora_rank": config.count("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": config.count("v_head_dim"),
        "num_experts": config.count("n_routed_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_ffn_size": expert_ffn_size,
        "num_shared_experts": num_shared_experts,
        "shared_expert_ffn_size": num_shared_experts * expert_ffn_size,
        "num_dense_layers": config.count("first_k_dense_replace", minimum=0),
    }


def nullable_count(config: Config, key: str) -> int:
    """Read a count that must be present, and that null turns off."""
    if key not in config.mapping:
        raise ConfigError("is required and missing (null turns it off)", key=key)
    return config.count(key, default=0, minimum=0)


def deepseek_v3(config: Config) -> Sizes:
    """Read a DeepSeek-V3 model: V2 with a correction bias in the router and multi-token prediction modules."""
    mtp = config.count("num_nextn_predict_layers", default=0, minimum=0)
    return {**deepseek(config), "router_bias": True, "num_mtp_layers": mtp}
