"""Models that a framework knows by a name of its own, such as a flavor of torchtitan or a model_name of MaxText."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.model_spec import ModelSpec
from hardware.io.config_file import read_mapping

_VARIANTS = (
    *("hybridep", "deepep", "minimalasyncep", "float8", "mxfp8", "nvfp4", "first85pctlayersnvfp4", "varlenattn"),
    *("base", "thinking2507", "instruct", "it"),
)
"""Ends of names of recipes that train the same model with other kernels or number formats, or other weights of it."""


@functools.cache
def _listed() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = read_mapping(Path(__file__).with_name("named_models.yaml"))["models"]
    return found


def named_models(framework: str) -> dict[str, str]:
    """Return the names of the listed models by those that a framework has."""
    return {row[framework]: name for name, row in _listed().items() if framework in row}


def named_model(framework: str, *names: str) -> ModelSpec | None:
    """Return the model that a framework knows by one of these names; None if it is not listed.

    Names are compared by their letters and digits, without what recipes of the same model append.
    """
    own = {_plain(name): listed for name, listed in named_models(framework).items()}
    for name in map(_plain, names):
        short = next((name.removesuffix(end) for end in _VARIANTS if name.endswith(end)), name)
        listed = own.get(name) or own.get(short)
        if listed:
            return model_from_hugging_face(_listed()[listed]["config"], name=listed, file=f"the name {name}")
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
