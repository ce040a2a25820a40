"""Importers by the name of the option that takes their file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.plugins import load_plugin, plugins, refused
from tuner.imports.deepspeed import import_deepspeed
from tuner.imports.flagscale import import_flagscale
from tuner.imports.gpt_neox import import_gpt_neox
from tuner.imports.hugging_face import import_hugging_face
from tuner.imports.imported import Imported
from tuner.imports.json_import import import_json
from tuner.imports.megatron import import_megatron
from tuner.imports.nanotron import import_nanotron
from tuner.imports.settings.bridge import import_bridge
from tuner.imports.settings.maxtext import import_maxtext
from tuner.imports.settings.nemo import import_nemo
from tuner.imports.settings.swift import import_swift
from tuner.imports.settings.verl import import_verl
from tuner.imports.torchtitan import import_torchtitan

Importer = Callable[[str], Imported]
"""Function that reads the text of one file.

It raises a ConfigError without the file's name if the text is not a valid configuration.
"""


class ImporterOfTwo(Protocol):
    """Function that reads a script together with the file that holds what its command does not state."""

    def __call__(self, text: str, *, file: str = "") -> Imported:
        """Read both; the file's text is empty if there is none."""
        ...


WITH_FILE: dict[str, ImporterOfTwo] = {
    "bridge": import_bridge,
    "maxtext": import_maxtext,
    "nemo": import_nemo,
    "swift": import_swift,
    "torchtitan": import_torchtitan,
}
"""Importers of programs whose command stands over a recipe or a file, which may be given too."""

IMPORTERS: dict[str, Importer] = {
    "megatron": import_megatron,
    "deepspeed": import_deepspeed,
    "nanotron": import_nanotron,
    "gpt-neox": import_gpt_neox,
    "flagscale": import_flagscale,
    "hugging-face": import_hugging_face,
    "json": import_json,
    "verl": import_verl,
    **WITH_FILE,
}


def find_importer(framework: str) -> Importer:
    """Return the importer of a framework, Meshtune's or an installed package's.

    Raises:
        ConfigError: There is none, or that of a package cannot be used.
    """
    if framework in IMPORTERS:
        return IMPORTERS[framework]
    known = plugins("importers")
    if framework not in known:
        nearest = did_you_mean(framework, known) if known else "no installed package has importers"
        raise ConfigError("is no importer of an installed package", key="--from", value=framework, nearest=nearest)
    function = load_plugin("importers", framework)
    if not callable(function):
        raise refused("importers", framework, "is no function")

    def read(text: str) -> Imported:
        imported = function(text)
        if not isinstance(imported, Imported):
            raise refused("importers", framework, "returned no tuner.imports.Imported")
        return imported

    return read
