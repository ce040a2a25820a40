"""Frameworks that placements are exported to: the placements that each can launch, and its keys."""

from __future__ import annotations

from hardware.io.errors import ConfigError, did_you_mean
from tuner.place.exports.openrlhf import export_to_openrlhf, launchable_by_openrlhf
from tuner.place.exports.roles import Export, placed_roles, roles_of
from tuner.place.exports.verl import export_to_verl, launchable_by_verl
from tuner.place.search.problem import PlacementProblem
from tuner.place.search.state import State
from tuner.place.workload import Workload

EXPORTERS = {"verl": (launchable_by_verl, export_to_verl), "openrlhf": (launchable_by_openrlhf, export_to_openrlhf)}


def launchable_by(workload: Workload, framework: str, *, option: str = "--export") -> Workload:
    """Return a workload that only has the placements that a framework can launch.

    Args:
        workload: Modules and their cluster.
        framework: Name of the framework.
        option: Option or argument that names the framework, for messages.

    Raises:
        ConfigError: There is no such framework, or the workload is no RL post-training.
    """
    if framework not in EXPORTERS:
        nearest = did_you_mean(framework, EXPORTERS)
        raise ConfigError("is no framework of placements", key=option, value=framework, nearest=nearest)
    if not roles_of(workload):
        raise ConfigError(
            "needs a module that trains and sends its weights to one that generates",
            key=option,
            value=framework,
            nearest="leave it out to search every placement",
        )
    return EXPORTERS[framework][0](workload)


def export_placement(problem: PlacementProblem, state: State, framework: str) -> Export:
    """Return a placement as the keys of a framework."""
    return EXPORTERS[framework][1](problem, placed_roles(problem, state))
