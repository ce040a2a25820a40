"""Model types with a vision or audio tower beside a language model.

The language model is read, and of the towers those whose work is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from costmodels.job.hugging_face.config import Config
from costmodels.job.hugging_face.towers import vision_tower
from costmodels.job.model_spec import ModelSpec
from costmodels.job.tower import TowerWork
from hardware.io.errors import ConfigError

Read = Callable[[Config], ModelSpec]

_TOWERS = {"vision_config": "vision tower", "audio_config": "audio tower"}


def language_model(config: Config, read: Read, *, text_type: str, tied: bool | None = None) -> ModelSpec:
    """Return the language model of a multimodal one, which says that its towers are left out.

    Args:
        config: Keys of the whole model.
        read: Reader of a model type by its keys.
        text_type: Model type of the language model, where its keys do not state one.
        tied: Default of the whole model for tie_word_embeddings, where it is another than the language model's.
    """
    is_flat = not config.has("text_config") and config.has("hidden_size")  # files of earlier versions
    text = Config(mapping=_without_towers(config)) if is_flat else config.under("text_config")
    mapping = {"model_type": text_type, **text.mapping}
    # the whole model says whether its head is tied (transformers 5)
    if "tie_word_embeddings" in config.mapping:
        mapping["tie_word_embeddings"] = config.value("tie_word_embeddings")
    elif tied is not None:
        mapping["tie_word_embeddings"] = tied
    towers = tuple(word for key, word in _TOWERS.items() if config.has(key))
    config.read.update(config.mapping)  # what is not of the language model belongs to the towers and their tokens
    try:
        found = read(Config(mapping=mapping))
    except ConfigError as error:
        raise error if is_flat else error.under("text_config") from None
    return replace(found, left_out=(*found.left_out, *towers))


def _without_towers(config: Config) -> dict[str, object]:
    return {key: value for key, value in config.mapping.items() if key != "model_type" and key not in _TOWERS}


def with_towers(config: Config, model: ModelSpec, works: Mapping[str, TowerWork]) -> ModelSpec:
    """Return a multimodal model with the towers whose work is known.

    Raises:
        ConfigError: The model has no such tower, or it cannot be read.
    """
    found, left_out = list(model.towers), list(model.left_out)
    for name, work in works.items():
        word = f"{name} tower"
        if word not in left_out:
            rule = "is a tower that the model has not"
            raise ConfigError(rule, key=f"job.towers.{name}", nearest="leave it out")
        found.append(vision_tower(config, work, text_hidden=model.hidden_size))
        left_out.remove(word)
    return replace(model, towers=tuple(found), left_out=tuple(left_out))
