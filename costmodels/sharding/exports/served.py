"""Plan that was found before, from its table of numbers and the graph of the same program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh, mesh_from
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import Plan, violations
from hardware.io.errors import ConfigError


def plan_of_table(graph: Graph, mesh: DeviceMesh | Mapping[str, int], served: Sequence[Sequence[int]]) -> Plan:
    """Return the plan of a graph that a table describes.

    Args:
        graph: Graph of the program.
        mesh: Mesh, or its axes with their sizes, the slowest first.
        served: For each axis, the number of the factor that it serves at each operator, or -1.

    Raises:
        ConfigError: The table belongs to another program, or to other shapes.
    """
    # layouts depend on the sizes of the axes alone, and not on the devices
    own_mesh = mesh_from(mesh, "dgx-a100")
    table = np.array(served, dtype=np.int64).T
    expected = (len(graph.ops), len(own_mesh.sizes))
    if table.shape != expected:
        raise _stale(f"has {table.shape} operators and axes, not {expected}", graph.name)
    plan = Plan(graph=graph, mesh=own_mesh, served=table)
    wrong = violations(plan)
    if wrong:
        raise _stale(f"does not fit: {wrong[0]}", graph.name)
    return plan


def _stale(rule: str, name: str) -> ConfigError:
    nearest = "the program has changed since it was planned: plan it again"
    return ConfigError(rule, key="served", value=name, nearest=nearest)
