"""Exporters, which write a configuration as the flags or files of a training framework.

To add a target, write one function of type `Exporter` in its own file and register it in `EXPORTERS`.
"""

from tuner.export.exporter import Export, Exporter
from tuner.export.registry import EXPORTERS, exporter_for, exporter_names, find_exporter

__all__ = ["EXPORTERS", "Export", "Exporter", "exporter_for", "exporter_names", "find_exporter"]
