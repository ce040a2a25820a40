"""Reader of every model type, and of the whole file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from costmodels.job.hugging_face import decoders, encoders, experts, recurrent, windowed
from costmodels.job.hugging_face.config import OTHERWISE, Config
from costmodels.job.hugging_face.multimodal import language_model, with_towers
from costmodels.job.model_spec import ModelSpec, plain_model
from costmodels.job.tower import TowerWork
from hardware.io.errors import ConfigError, did_you_mean

Reader = Callable[[Config, str], ModelSpec]
"""Function from the keys of a config.json, and a name, to the model."""


def model_from_hugging_face(
    mapping: Mapping[str, Any], *, name: str, file: str, towers: Mapping[str, TowerWork] | None = None
) -> ModelSpec:
    """Return the model that the mapping of a config.json describes, with the towers whose work is told.

    Raises:
        ConfigError: the model type is unknown, a key is missing, a value cannot work, or a key that may change the
            model is not understood; it names `file` and the key.
    """
    try:
        found = _read(Config(mapping=mapping), name)
        return with_towers(Config(mapping=mapping), found, towers) if towers else found
    except ConfigError as error:
        raise _name_their_key(error, mapping).in_file(file) from None


def _read(config: Config, name: str) -> ModelSpec:
    model_type = config.value("model_type")
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        nearest = f"{did_you_mean(model_type, READERS)}; {OTHERWISE}"
        raise ConfigError("unknown model type", key="model_type", value=model_type, nearest=nearest)
    found = reader(config, name)
    config.check_rest()
    return found


def _plain(
    sizes: Callable[[Config], decoders.Sizes], masks: Callable[[Config, ModelSpec], ModelSpec] | None = None
) -> Reader:
    """Return the reader of a plain decoder, with masks where the model type has windows."""

    def read(config: Config, name: str) -> ModelSpec:
        spec = plain_model(name=name, source=f"config.json of {name}", **sizes(config))
        return spec if masks is None else masks(config, spec)

    return read


def _multimodal(text_type: str, *, tied: bool | None = None) -> Reader:
    return lambda config, name: language_model(config, lambda text: _read(text, name), text_type=text_type, tied=tied)


def _mistral_window(config: Config, spec: ModelSpec) -> ModelSpec:
    return windowed.with_window(config, spec, default=4096)


def _gemma2_windows(config: Config, spec: ModelSpec) -> ModelSpec:
    return windowed.with_pattern(config, spec, default=2)


def _gemma3_windows(config: Config, spec: ModelSpec) -> ModelSpec:
    return windowed.with_pattern(config, spec, default=6)


READERS: dict[str, Reader] = {
    "bamba": recurrent.bamba,
    "bert": encoders.bert,
    "deepseek_v2": _plain(decoders.deepseek),
    "deepseek_v3": _plain(decoders.deepseek_v3),
    "deepseek_v32": experts.deepseek_sparse,
    "dots1": experts.dots1,
    "ernie4_5_moe": experts.ernie4_5_moe,
    "exaone4": windowed.exaone4,
    "falcon_h1": recurrent.falcon_h1,
    "gemma": _plain(decoders.gemma),
    "gemma2": _plain(decoders.gemma2, _gemma2_windows),
    "gemma3": _multimodal("gemma3_text"),
    "gemma3_text": _plain(decoders.gemma3_text, _gemma3_windows),
    "gemma4": _multimodal("gemma4_text"),
    "gemma4_text": windowed.gemma4,
    "glm4_moe": experts.glm4_moe,
    "glm4v_moe": _multimodal("glm4_moe"),
    "glm4v_moe_text": experts.glm4_moe,
    "glm_moe_dsa": experts.deepseek_sparse,
    "gpt2": _plain(decoders.gpt2),
    "gpt_neox": _plain(decoders.gpt_neox),
    "gpt_oss": experts.gpt_oss,
    "granitemoehybrid": recurrent.granite_hybrid,
    "hunyuan_v1_moe": experts.hunyuan_moe,
    "internvl": _multimodal("qwen2", tied=True),
    "jamba": recurrent.jamba,
    "kimi_k25": _multimodal("deepseek_v3", tied=True),
    "kimi_k2": _plain(decoders.deepseek_v3),
    "kimi_linear": recurrent.kimi_linear,
    "lfm2": recurrent.lfm2,
    "lfm2_moe": recurrent.lfm2,
    "llama": _plain(decoders.llama),
    "llava": _multimodal("llama"),
    "llama4": _multimodal("llama4_text"),
    "llama4_text": experts.llama4_text,
    "longcat_flash": experts.longcat_flash,
    "mamba2": recurrent.mamba2,
    "minimax": recurrent.minimax,
    "minimax_m2": experts.minimax_m2,
    "ministral": windowed.ministral,
    "ministral3": windowed.ministral,
    "mistral": _plain(decoders.mistral, _mistral_window),
    "mistral3": _multimodal("mistral"),
    "mistral4": experts.mistral4,
    "mixtral": _plain(decoders.mixtral, windowed.with_window),
    "modernbert": encoders.modernbert,
    "nemotron_h": recurrent.nemotron_h,
    "olmo2": windowed.olmo,
    "olmo3": windowed.olmo,
    "phi3": _plain(decoders.phi3, windowed.with_window),
    "qwen2": _plain(decoders.qwen2, windowed.with_upper_windows),
    "qwen2_5_vl": _multimodal("qwen2_5_vl_text", tied=False),
    "qwen2_5_vl_text": _plain(decoders.qwen2, windowed.with_upper_windows),
    "qwen2_moe": _plain(decoders.qwen2_moe, windowed.with_upper_windows),
    "qwen3": _plain(decoders.qwen3, windowed.with_upper_windows),
    "qwen3_5": _multimodal("qwen3_5_text"),
    "qwen3_5_moe": _multimodal("qwen3_5_moe_text"),
    "qwen3_5_moe_text": recurrent.qwen3_next,
    "qwen3_5_text": recurrent.qwen3_next,
    "qwen3_moe": _plain(decoders.qwen3_moe, windowed.with_upper_windows),
    "qwen3_next": recurrent.qwen3_next,
    "qwen3_vl": _multimodal("qwen3_vl_text", tied=False),
    "qwen3_vl_moe": _multimodal("qwen3_vl_moe_text"),
    "qwen3_vl_moe_text": experts.qwen3_vl_moe_text,
    "qwen3_vl_text": _plain(decoders.qwen3_vl_text),
    "roberta": encoders.bert,
    "seed_oss": windowed.seed_oss,
    "smollm3": windowed.smollm3,
    "t5": encoders.t5,
    "vit": encoders.vit,
}
"""Reader of each `model_type`."""

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
        for key in _THEIR_KEYS.get((error.key or "").removeprefix("text_config."), ()):
            if key in keys:
                return ConfigError(error.rule, key=prefix + key, value=error.value, nearest=error.nearest)
    return error
