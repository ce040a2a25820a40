"""Shell completion of option values: each function returns the names that begin with the typed text.

The catalogs are imported only when a shell asks for completions.
"""

from __future__ import annotations

from collections.abc import Iterable


def targets(incomplete: str) -> list[str]:
    """Complete the targets of `export --to`."""
    from tuner.export import EXPORTERS

    return _filter_by_prefix(incomplete, EXPORTERS)


def planners(incomplete: str) -> list[str]:
    """Complete the names of `plan --planner`."""
    from tuner.planners.planning import PLANNERS

    return _filter_by_prefix(incomplete, PLANNERS)


def plan_forms(incomplete: str) -> list[str]:
    """Complete the targets of `plan --export`."""
    from tuner.plans.plan_export import PLAN_EXPORTERS

    return _filter_by_prefix(incomplete, PLAN_EXPORTERS)


def clusters(incomplete: str) -> list[str]:
    """Complete the names of the catalog's clusters."""
    from hardware.cluster import cluster_names

    return _filter_by_prefix(incomplete, cluster_names())


def models(incomplete: str) -> list[str]:
    """Complete the names of the catalog's models."""
    from costmodels.job.model_catalog import model_names

    return _filter_by_prefix(incomplete, model_names())


def runtimes(incomplete: str) -> list[str]:
    """Complete the names of the catalog's runtimes."""
    from costmodels.job.runtime import runtime_names

    return _filter_by_prefix(incomplete, runtime_names())


def _filter_by_prefix(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
