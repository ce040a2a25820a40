"""Shell completion of option values: each function returns the names that begin with the typed text.

The catalogs are imported only when a shell asks for completions.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def _complete(module: str, names: str) -> Callable[[str], list[str]]:
    """Return the completion of names that a module lists, or returns from a function."""

    def complete(incomplete: str) -> list[str]:
        found = getattr(import_module(module), names)
        return [name for name in (found() if callable(found) else found) if name.startswith(incomplete)]

    return complete


targets = _complete("tuner.export", "exporter_names")
planners = _complete("tuner.planners.planning", "PLANNERS")
plan_forms = _complete("tuner.plans.plan_export", "PLAN_EXPORTERS")
clusters = _complete("hardware.cluster_file", "cluster_names")
models = _complete("costmodels.job.model_catalog", "model_names")
runtimes = _complete("costmodels.job.runtime", "runtime_names")
catalog_kinds = _complete("tuner.catalog.listing", "LISTINGS")
