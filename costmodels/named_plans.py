"""Plans by hand: which factor an axis serves, by patterns of the operators' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from costmodels.device_mesh import DeviceMesh
from costmodels.graph import Graph
from costmodels.plan import NONE, Plan

ByName = Sequence[tuple[str, Sequence[str]]]
"""(pattern of operators' names, names of factors); the first pattern that fits an operator counts."""


def served_by_name(graph: Graph, mesh: DeviceMesh, axes: Mapping[str, ByName]) -> Plan:
    """The plan in which every axis serves the factors that `axes` names for it.

    Of the first pattern that fits an operator, an axis serves the first factor that the operator has, can cut into so
    many parts, and that no axis before it serves; an axis of one device serves none.
    """
    served = np.full((len(graph.ops), len(mesh.sizes)), NONE, dtype=np.int64)
    for number, op in enumerate(graph.ops):
        free = {op.rule.factors[factor].name: factor for factor in op.rule.cuttable}
        for axis, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
            if size == 1:
                continue
            factors = next((found for pattern, found in axes[name] if fnmatchcase(op.name, pattern)), ())
            able = [each for each in factors if each in free and op.rule.factors[free[each]].size % size == 0]
            if able:
                served[number, axis] = free.pop(able[0])
    return Plan(graph=graph, mesh=mesh, served=served)
