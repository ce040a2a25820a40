"""Reads the configuration in use from what a training framework is started with; nothing is run or fetched.

A new format is one function of the kind `Importer` in a file of its own, and one entry in `IMPORTERS`.
"""

from tuner.imports.imported import Imported, LaunchCommand, Unread
from tuner.imports.present import Present, present_of
from tuner.imports.registry import IMPORTERS, Importer

__all__ = ["IMPORTERS", "Imported", "Importer", "LaunchCommand", "Present", "Unread", "present_of"]
