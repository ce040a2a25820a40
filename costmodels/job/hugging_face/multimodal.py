"""Model types with a vision or audio tower beside a language model, which alone is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from costmodels.job.hugging_face.config import Config
from costmodels.job.model_spec import ModelSpec
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
    text = config.under("text_config")
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
        raise error.under("text_config") from None
    return replace(found, left_out=(*found.left_out, *towers))
