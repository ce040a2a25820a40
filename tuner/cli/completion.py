"""Names that a shell completes behind an option: each function gives those that begin as what is typed.

They are loaded when a shell asks, never for a command.
"""

from __future__ import annotations

from collections.abc import Iterable


def targets(incomplete: str) -> list[str]:
    """What `export --to` takes."""
    from tuner.export import EXPORTERS

    return _beginning(incomplete, EXPORTERS)


def planners(incomplete: str) -> list[str]:
    """What `plan --planner` takes."""
    from tuner.planners.planning import PLANNERS

    return _beginning(incomplete, PLANNERS)


def plan_forms(incomplete: str) -> list[str]:
    """What `plan --export` takes."""
    from tuner.plans.plan_export import PLAN_EXPORTERS

    return _beginning(incomplete, PLAN_EXPORTERS)


def clusters(incomplete: str) -> list[str]:
    """The catalog's clusters."""
    from hardware.cluster import cluster_names

    return _beginning(incomplete, cluster_names())


def models(incomplete: str) -> list[str]:
    """The catalog's models."""
    from costmodels.job.model_catalog import model_names

    return _beginning(incomplete, model_names())


def runtimes(incomplete: str) -> list[str]:
    """The catalog's runtimes."""
    from costmodels.job.runtime import runtime_names

    return _beginning(incomplete, runtime_names())


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
