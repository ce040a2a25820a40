"""Build a model of transformers on the meta device: shapes without values, so that any size takes moments.

Nothing is loaded: no weights, no code of a repository (`auto_map` is refused), no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hardware.io.errors import ConfigError, did_you_mean

AUTO_CLASSES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
)
"""Names of the class to train for each model type, tried in this order where `architectures` names none."""

IGNORED = ("auto_map", "quantization_config", "torch_dtype", "dtype", "transformers_version", "architectures")


def config_of(mapping: Mapping[str, Any]) -> transformers.PretrainedConfig:
    """Return transformers' configuration of a config.json.

    Raises:
        ConfigError: it needs code of a repository, transformers knows neither its type nor its architecture, or refuses
            a value.
    """
    model_type = mapping.get("model_type")
    config_class = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else _class_of_architecture(mapping)
    if config_class is None:
        if "auto_map" in mapping:
            raise ConfigError(
                "names code of a repository, which is not run; a model type that transformers has itself is traced",
                key="auto_map",
                value=mapping["auto_map"],
            )
        rule = f"is unknown to transformers {transformers.__version__}, as are the architectures of the file"
        raise ConfigError(rule, key="model_type", value=model_type, nearest=did_you_mean(model_type, CONFIG_MAPPING))
    values = {key: value for key, value in mapping.items() if key not in IGNORED and key != "model_type"}
    try:
        # files of transformers 5 write infinity as {"__float__": "Infinity"}
        return config_class.from_dict(config_class._decode_special_floats(values))
    except Exception as error:  # noqa: BLE001 - classes of 800 model types refuse values each in its own way
        raise ConfigError(f"is refused by transformers' {config_class.__name__}: {first_line(error)}") from None


def _class_of_architecture(mapping: Mapping[str, Any]) -> type[transformers.PretrainedConfig] | None:
    """Return the configuration class of the first architecture that transformers has, as Kimi-K2's DeepSeek-V3."""
    known = {name for names in AUTO_CLASSES for name in _flat(names.values())}
    for name in mapping.get("architectures") or ():
        if name in known:
            found: type[transformers.PretrainedConfig] = getattr(transformers, name).config_class
            return found
    return None


def _flat(names: Any) -> Iterator[str]:
    for name in names:
        yield from (name,) if isinstance(name, str) else name


def class_of(config: transformers.PretrainedConfig, architectures: Any) -> type[transformers.PreTrainedModel]:
    """Return the class that trains such a model: that of its architectures, or the first of `AUTO_CLASSES`."""
    known = {name for names in AUTO_CLASSES for name in _flat(names.values())}
    named = [name for name in architectures or () if name in known]
    automatic = [name for names in AUTO_CLASSES for name in _flat([names.get(config.model_type, ())])]
    for name in [*named, *automatic]:
        found = _model_class(name)
        if found is not None and isinstance(config, found.config_class or ()):
            return found
    for name in automatic:  # classes of another type with the same sizes, as Llama's for EXAONE
        found = _model_class(name)
        if found is not None:
            return found
    rule = f"has no model class to train in transformers {transformers.__version__}"
    raise ConfigError(rule, key="model_type", value=config.model_type)


def _model_class(name: str) -> type[transformers.PreTrainedModel] | None:
    found: type[transformers.PreTrainedModel] | None = getattr(transformers, name, None)
    return found


def built(mapping: Mapping[str, Any], *, name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model of a config.json on the meta device, in bf16, with attention and experts by the given name.

    Some classes need a `head_dim` or `num_key_value_heads` that published files leave out; it is filled in then, and a
    sentence says so.

    Raises:
        ConfigError: as `config_of`, or the model cannot be built of these values.
    """
    with _offline():
        config = config_of(mapping)
        model_class = class_of(config, mapping.get("architectures"))
        config, notes = _own_part(config, model_class)
        model, trouble = _tried(model_class, config, name)
        if model is not None:
            return model, notes
        for note in _filled_in(config.get_text_config()):
            notes = (*notes, note)
            model, _ = _tried(model_class, config, name)
            if model is not None:
                return model, notes
    raise ConfigError(f"cannot be built by transformers' {model_class.__name__}: {trouble}") from None


def _own_part(config: Any, model_class: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the part of a composite configuration that the class takes, as MusicGen's decoder, and a note on it."""
    if not isinstance(config, model_class.config_class or ()):
        for key in config.sub_configs:
            if isinstance(part := getattr(config, key, None), model_class.config_class or ()):
                return part, (f"{key} alone is traced, by transformers' {model_class.__name__}",)
    return config, ()


def _filled_in(text: Any) -> Iterator[str]:
    """Fill in one null after the other, each with what most classes take for it, and yield a sentence about it."""
    hidden, heads = (getattr(text, key, None) for key in ("hidden_size", "num_attention_heads"))
    own = vars(text)  # a size that differs between layers cannot be asked for
    if own.get("head_dim", 0) is None and hidden and heads:
        text.head_dim = hidden // heads
        yield f"head_dim is missing and taken as hidden_size / num_attention_heads, {text.head_dim}"
    if own.get("num_key_value_heads", 0) is None and heads:
        text.num_key_value_heads = heads
        yield f"num_key_value_heads is missing and taken as num_attention_heads, {heads}"


def _tried(model_class: Any, config: Any, name: str) -> tuple[nn.Module | None, str]:
    """Return the model, or what its class says; classes with tables of their own know only some attentions."""
    chosen = {"experts_implementation": name} if model_class._can_set_experts_implementation() else {}
    trouble = ""
    for attention in (name, "sdpa", "eager"):
        try:
            with torch.device("meta"):
                model: nn.Module = model_class._from_config(
                    config, attn_implementation=attention, dtype=torch.bfloat16, **chosen
                )
            return model.eval(), ""
        except Exception as error:  # noqa: BLE001 - a constructor fails in its own way on sizes that do not fit
            if not trouble or name in trouble:
                trouble = first_line(error)
    return None, trouble


@contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers from looking for kernels or backbones on the network."""
    with patch.object(constants, "HF_HUB_OFFLINE", new=True):
        yield


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text, or two where the first ends in a colon."""
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(text[: 2 if text and text[0].endswith(":") else 1])
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__
