"""Importers, which read the current configuration from the files of a training framework.

The files are only read: nothing is run or downloaded. To add a format, write one function of type `Importer` in its own
file and register it in `IMPORTERS`.
"""

from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.present import Present, present_of
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
