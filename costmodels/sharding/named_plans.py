"""Hand-written plans: assign factors to axes by patterns of operator names."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import NONE, Plan

ByName = Sequence[tuple[str, Sequence[str]]]
"""Pairs (pattern of operator names, names of factors); the first pattern that matches an operator counts."""


def plan_by_names(graph: Graph, mesh: DeviceMesh, axes: Mapping[str, ByName], *, shared: Container[str] = ()) -> Plan:
    """Return the plan in which every axis serves the factors that `axes` names for it.

    The first pattern that matches an operator decides. The axis serves the first factor in its list that the operator
    has, that is divisible by the axis, and that no earlier axis serves. An axis of one device serves none.

    Args:
        graph: Graph of the training step.
        mesh: Device mesh with the axes that `axes` names.
        axes: Patterns and factors for each axis, by its name.
        shared: Names of factors that several axes may serve together.
    """
    served = np.full((len(graph.ops), len(mesh.sizes)), NONE, dtype=np.int64)
    for number, op in enumerate(graph.ops):
        free = {op.rule.factors[factor].name: factor for factor in op.rule.cuttable}
        left = {name: op.rule.factors[factor].size for name, factor in free.items()}
        for axis, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
            if size == 1:
                continue
            factors = next((found for pattern, found in axes[name] if fnmatchcase(op.name, pattern)), ())
            # `left` is the part of a factor that remains on one device after the earlier axes.
            able = [each for each in factors if each in free and left[each] % size == 0]
            if able:
                served[number, axis] = free[able[0]]
                left[able[0]] //= size
                if able[0] not in shared:
                    del free[able[0]]
    return Plan(graph=graph, mesh=mesh, served=served)
