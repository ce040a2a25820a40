"""Importers, which read the current configuration from the files of a training framework.

The files are only read: nothing is run or downloaded. To add a format, write one function of type `Importer` in its own
file and register it in `IMPORTERS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.present import Present, present_of

if TYPE_CHECKING:  # loaded when first used, with all importers
    from tuner.imports.registry import IMPORTERS, WITH_FILE, Importer, find_importer

__all__ = [
    "IMPORTERS",
    "WITH_FILE",
    "Imported",
    "Importer",
    "LaunchCommand",
    "Present",
    "Unread",
    "find_importer",
    "present_of",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tuner.imports import registry  # noqa: PLC0415 # most commands read no file of a framework

    return getattr(registry, name)
