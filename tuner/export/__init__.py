"""Writes a configuration as the flags or files of a training framework.

A new target is one function of the kind `Exporter` in a file of its own, and one entry in `EXPORTERS`.
"""

from tuner.export.exporter import Export, Exporter
from tuner.export.registry import EXPORTERS, exporter_for, find_exporter

__all__ = ["EXPORTERS", "Export", "Exporter", "exporter_for", "find_exporter"]
