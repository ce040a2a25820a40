"""Read the sizes of a model from a Hugging Face config.json.

A size is never guessed: a missing key is an error, unless transformers' configuration class of that model type gives
it a default that published files rely on. Such a default stands as `default=` where the key is read (transformers
4.57). The vision tower of a multimodal model is not read. Keys that change no size are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from costmodels.job.decoder import check_count
from costmodels.job.model_spec import ModelSpec, plain_model
from hardware.io.errors import ConfigError, did_you_mean

_REQUIRED: Final = object()

Sizes = dict[str, Any]
"""Values of a ModelSpec's fields by name."""


def model_from_hugging_face(mapping: Mapping[str, Any], *, name: str, file: str) -> ModelSpec:
    """Return the model that the mapping of a config.json describes.

    Raises:
        ConfigError: the model type is unknown, a key is missing, or a value cannot work; it names `file` and the key.
    """
    try:
        return plain_model(name=name, source=f"config.json of {name}", **_read(_Config(mapping=mapping)))
    except ConfigError as error:
        raise _name_their_key(error, mapping).in_file(file) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    """Mapping of a config.json, read key by key with checks; null counts as missing, as in transformers."""

    mapping: Mapping[str, Any]

    def value(self, key: str, default: object = _REQUIRED) -> object:
        found = self.mapping.get(key)
        if found is not None:
            return found
        if default is _REQUIRED:
            raise ConfigError("must not be null" if key in self.mapping else "is required and missing", key=key)
        return default

    def count(self, key: str, default: object = _REQUIRED, *, minimum: int = 1) -> int:
        return check_count(self.value(key, default), key=key, minimum=minimum)

    def flag(self, key: str, default: object = _REQUIRED) -> bool:
        value = self.value(key, default)
        if isinstance(value, bool):
            return value
        raise ConfigError("must be true or false", key=key, value=value)


def _read(config: _Config) -> Sizes:
    model_type = config.value("model_type")
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        nearest = did_you_mean(model_type, READERS)
        raise ConfigError("unknown model type", key="model_type", value=model_type, nearest=nearest)
    return reader(config)


# Parts that several model types share. `tied` is the type's default of tie_word_embeddings.


def _decoder(config: _Config, *, tied: bool) -> Sizes:
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


def _grouped_heads(config: _Config, *, kv_heads_may_miss: bool = False, head_dim: int | None = None) -> Sizes:
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
        head_dim = _even_head_dim(config.count("hidden_size"), num_heads)
    return {
        "num_heads": num_heads,
        "num_kv_heads": config.count("num_key_value_heads", default=num_heads),
        "head_dim": config.count("head_dim", default=head_dim),
    }


def _even_head_dim(hidden_size: int, num_heads: int, *, hidden_key: str = "hidden_size") -> int:
    if hidden_size % num_heads:
        rule = f"must be divisible by the {num_heads} attention heads where head_dim is not given"
        nearest = f"nearest: {max(1, round(hidden_size / num_heads)) * num_heads}"
        raise ConfigError(rule, key=hidden_key, value=hidden_size, nearest=nearest)
    return hidden_size // num_heads


def _attention_biases(config: _Config) -> Sizes:
    """Read the one flag that puts biases on all four projections; every class that has it defaults to False."""
    bias = config.flag("attention_bias", default=False)
    return {"qkv_bias": bias, "attention_output_bias": bias}


# Dense models


def _llama(config: _Config) -> Sizes:
    return {
        **_decoder(config, tied=False),
        **_grouped_heads(config, kv_heads_may_miss=True),
        **_attention_biases(config),
        "mlp_bias": config.flag("mlp_bias", default=False),
    }


def _mistral(config: _Config) -> Sizes:
    return {**_decoder(config, tied=False), **_grouped_heads(config)}


def _phi3(config: _Config) -> Sizes:
    return {**_decoder(config, tied=False), **_grouped_heads(config, kv_heads_may_miss=True)}


def _qwen2(config: _Config) -> Sizes:
    return {**_decoder(config, tied=False), **_grouped_heads(config), "qkv_bias": True}


def _qwen3(config: _Config) -> Sizes:
    heads = _grouped_heads(config, head_dim=128)
    return {**_decoder(config, tied=False), **heads, **_attention_biases(config), "qk_norm": True}


def _gemma(config: _Config) -> Sizes:
    return {**_decoder(config, tied=True), **_grouped_heads(config, head_dim=256), **_attention_biases(config)}


def _gemma2(config: _Config) -> Sizes:
    return {**_gemma(config), "norms_per_layer": 4}


def _gemma3_text(config: _Config) -> Sizes:
    """Read a Gemma 3 text model; published files leave out every key that has the class's default."""
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
    filled = _Config(mapping={**defaults, **config.mapping})
    return {**_gemma2(filled), "qk_norm": True}


def _gemma3(config: _Config) -> Sizes:
    text = config.value("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("must be a mapping", key="text_config", value=text)
    try:
        return _gemma3_text(_Config(mapping=text))
    except ConfigError as error:
        raise error.under("text_config") from None


def _gpt2(config: _Config) -> Sizes:
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
        "head_dim": _even_head_dim(hidden_size, num_heads, hidden_key="n_embd"),
        "qkv_bias": True,
        "attention_output_bias": True,
        "ffn_size": config.count("n_inner", default=4 * hidden_size),
        "gated_ffn": False,
        "mlp_bias": True,
    }


def _gpt_neox(config: _Config) -> Sizes:
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
        "head_dim": _even_head_dim(hidden_size, num_heads),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "ffn_size": config.count("intermediate_size"),
        "gated_ffn": False,
        "mlp_bias": True,
    }


# Mixtures of experts


def _mixtral(config: _Config) -> Sizes:
    sizes = {**_decoder(config, tied=False), **_grouped_heads(config)}
    return {
        **sizes,
        "num_experts": config.count("num_local_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_ffn_size": sizes["ffn_size"],
    }


def _qwen_experts(config: _Config) -> Sizes:
    return {
        "num_experts": config.count("num_experts"),
        "top_k": config.count("num_experts_per_tok"),
        "expert_ffn_size": config.count("moe_intermediate_size"),
        "num_dense_layers": _leading_dense_layers(config),
        "moe_layer_period": config.count("decoder_sparse_step", default=1),
    }


def _leading_dense_layers(config: _Config) -> int:
    """Return the length of mlp_only_layers, which must name the first layers."""
    layers = config.value("mlp_only_layers", default=[])
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        rule = "must be a list of the first layers, 0, 1, 2, ... without a gap"
        raise ConfigError(rule, key="mlp_only_layers", value=layers)
    return len(layers)


def _qwen2_moe(config: _Config) -> Sizes:
    return {
        **_decoder(config, tied=False),
        **_grouped_heads(config),
        "qkv_bias": config.flag("qkv_bias", default=True),
        **_qwen_experts(config),
        "num_shared_experts": 1,
        "shared_expert_ffn_size": config.count("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }


def _qwen3_moe(config: _Config) -> Sizes:
    heads = _grouped_heads(config)  # unlike Qwen3Config, this class has no head_dim of its own
    biases = _attention_biases(config)
    return {**_decoder(config, tied=False), **heads, **biases, "qk_norm": True, **_qwen_experts(config)}


def _deepseek(config: _Config) -> Sizes:
    """Read a DeepSeek-V2 model: latent attention, dense layers first, then routed and shared experts."""
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    num_heads = config.count("num_attention_heads")
    expert_ffn_size = config.count("moe_intermediate_size")
    num_shared_experts = config.count("n_shared_experts", minimum=0)
    if config.count("moe_layer_freq", default=1) != 1:
        rule = "must be 1, as in every published model; transformers reads no other"
        raise ConfigError(rule, key="moe_layer_freq", value=config.value("moe_layer_freq"))
    return {
        **_decoder(config, tied=False),
        **_attention_biases(config),
        "num_heads": num_heads,
        "num_kv_heads": config.count("num_key_value_heads", default=num_heads),
        "head_dim": nope + rope,
        "q_lora_rank": _nullable_count(config, "q_lora_rank"),
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


def _nullable_count(config: _Config, key: str) -> int:
    """Read a count that must be present, and that null turns off."""
    if key not in config.mapping:
        raise ConfigError("is required and missing (null turns it off)", key=key)
    return config.count(key, default=0, minimum=0)


def _deepseek_v3(config: _Config) -> Sizes:
    """Read a DeepSeek-V3 model: V2 with a correction bias in the router and multi-token prediction modules."""
    mtp = config.count("num_nextn_predict_layers", default=0, minimum=0)
    return {**_deepseek(config), "router_bias": True, "num_mtp_layers": mtp}


READERS: dict[str, Callable[[_Config], Sizes]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""Function that reads the sizes of each `model_type`."""


_THEIR_KEYS: dict[str, tuple[str, ...]] = {
    "num_kv_heads": ("num_key_value_heads",),
    "top_k": ("num_experts_per_tok",),
    "num_dense_layers": ("first_k_dense_replace", "mlp_only_layers"),
    "moe_layer_period": ("decoder_sparse_step",),
}
"""Keys that set the fields which ModelSpec checks against each other."""


def _name_their_key(error: ConfigError, mapping: Mapping[str, Any]) -> ConfigError:
    """Replace the field that an error names by the key of config.json that set it."""
    text = mapping.get("text_config")
    for prefix, keys in (("", mapping), ("text_config.", text if isinstance(text, Mapping) else {})):
        for key in _THEIR_KEYS.get(error.key or "", ()):
            if key in keys:
                return ConfigError(error.rule, key=prefix + key, value=error.value, nearest=error.nearest)
    return error
