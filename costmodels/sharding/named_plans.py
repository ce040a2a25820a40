"""Plans by hand: which factor an axis serves, by patterns of the operators' names."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import NONE, Plan

ByName = Sequence[tuple[str, Sequence[str]]]
"""(pattern of operators' names, names of factors); the first pattern that fits an operator counts."""


def served_by_name(graph: Graph, mesh: DeviceMesh, axes: Mapping[str, ByName], *, shared: Container[str] = ()) -> Plan:
    """The plan in which every axis serves the factors that `axes` names for it.

    Of the first pattern that fits an operator, an axis serves the first factor that the operator has, can cut into so
    many parts, and that no axis before it serves; an axis of one device serves none.

    Args:
        graph: What is planned.
        mesh: With these axes.
        axes: What each serves.
        shared: Factors that several axes may serve together.
    """
    served = np.full((len(graph.ops), len(mesh.sizes)), NONE, dtype=np.int64)
    for number, op in enumerate(graph.ops):
        free = {op.rule.factors[factor].name: factor for factor in op.rule.cuttable}
        left = {name: op.rule.factors[factor].size for name, factor in free.items()}
        for axis, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
            if size == 1:
                continue
            factors = next((found for pattern, found in axes[name] if fnmatchcase(op.name, pattern)), ())
            able = [each for each in factors if each in free and left[each] % size == 0]
            if able:
                served[number, axis] = free[able[0]]
                left[able[0]] //= size
                if able[0] not in shared:
                    del free[able[0]]
    return Plan(graph=graph, mesh=mesh, served=served)
