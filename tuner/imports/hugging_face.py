"""Importer for config.json files of Hugging Face, which describe a model but no parallel configuration."""

from __future__ import annotations

from costmodels.job.described_model import describe_model
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.runtime import UNKNOWN
from hardware.io.errors import ConfigError
from tuner.imports.imported import Imported
from tuner.imports.keys import json_mapping


def import_hugging_face(text: str) -> Imported:
    """Read the model of a config.json.

    Raises:
        ConfigError: the type of the model is unknown, or a size is missing or wrong.
    """
    try:
        model = model_from_hugging_face(json_mapping(text), name="model", file="")
    except ConfigError as error:
        raise ConfigError(error.rule, key=error.key, value=error.value, nearest=error.nearest) from None
    sizes = {name: value for name, value in describe_model(model).items() if name not in ("name", "source", "assumed")}
    return Imported(framework="hugging-face", runtime=UNKNOWN, model=sizes)
