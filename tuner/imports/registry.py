"""Importers by the name of the option that takes their file."""

from __future__ import annotations

from collections.abc import Callable

from tuner.imports.deepspeed import import_deepspeed
from tuner.imports.flagscale import import_flagscale
from tuner.imports.gpt_neox import import_gpt_neox
from tuner.imports.hugging_face import import_hugging_face
from tuner.imports.imported import Imported
from tuner.imports.json_import import import_json
from tuner.imports.megatron import import_megatron
from tuner.imports.nanotron import import_nanotron
from tuner.imports.torchtitan import import_torchtitan

Importer = Callable[[str], Imported]
"""Function that reads the text of one file.

It raises a ConfigError without the file's name if the text is not a valid configuration.
"""

IMPORTERS: dict[str, Importer] = {
    "megatron": import_megatron,
    "torchtitan": import_torchtitan,
    "deepspeed": import_deepspeed,
    "nanotron": import_nanotron,
    "gpt-neox": import_gpt_neox,
    "flagscale": import_flagscale,
    "hugging-face": import_hugging_face,
    "json": import_json,
}
