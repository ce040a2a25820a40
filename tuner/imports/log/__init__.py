"""Importer for logs: what a training framework printed about itself when it started, and its steps.

A log states the configuration as the framework resolved it. Each file here finds what one framework prints and writes
it as the file that the framework's importer reads, so that there is one home for what a flag or a key means. Begin with
`log_import.py`.
"""

from tuner.imports.log.log_import import NoConfigurationError, import_log
from tuner.imports.log.steps import LogSteps, Measured, StepsRead

__all__ = ["LogSteps", "Measured", "NoConfigurationError", "StepsRead", "import_log"]
