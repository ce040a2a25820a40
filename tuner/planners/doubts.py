"""Warnings about graphs that planners understand only in part, for the Python interfaces."""

from __future__ import annotations

import warnings

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from hardware.io.errors import ConfigError

MOST_LENGTHS = 12
"""Most lengths of dims that a warning lists."""

MOST_SAMPLED = 4
"""Most values of the sample that a warning lists."""


def check_known(graph: Graph, *, strict: bool) -> None:
    """Check that each operator of a graph has a sharding rule; with `strict` it must.

    Raises:
        ConfigError: Some operator has none, and `strict` is set.

    Warns:
        UserWarning: Some operator has none: every device runs it whole, with the FLOPs of the framework's own count.
    """
    if not graph.unknown:
        return
    names = ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in graph.unknown)
    if strict:
        raise ConfigError(
            "has operators without a sharding rule, which every device would run whole",
            key=graph.name,
            value=names,
            nearest="strict=False plans the others",
        )
    warnings.warn(
        f"{graph.name}: no sharding rule is known for {names}: every device runs it whole, with the FLOPs "
        "that the framework counts, if it does",
        stacklevel=3,
    )


def warn_of_useless(graph: Graph, mesh: DeviceMesh) -> None:
    """Warn of the axes of a mesh whose sizes divide no dim that can be cut."""
    sizes = {op.rule.factors[factor].size for op in graph.ops for factor in op.rule.cuttable}
    useless = [
        f"{name}={size}"
        for name, size in zip(mesh.names, mesh.sizes, strict=True)
        if not any(length % size == 0 for length in sizes)
    ]
    if useless:
        warnings.warn(
            f"{', '.join(useless)} of the mesh divides no dim of {graph.name} that can be cut: its devices repeat each "
            f"other's work. Lengths that can be cut: {', '.join(map(str, sorted(sizes)[:MOST_LENGTHS]))}",
            stacklevel=3,
        )


def sampled_in_words(graph: Graph) -> str:
    """Return on which values of the sample a plan depends, in words; empty if on none."""
    if not graph.sampled:
        return ""
    more = len(graph.sampled) - MOST_SAMPLED
    told = "; ".join(graph.sampled[:MOST_SAMPLED]) + (f"; and {more} more" if more > 0 else "")
    return f"the step is that of inputs from which the code reads the same: {told}"


def warn_of_sampled(graph: Graph) -> None:
    """Warn of values of the sample on which a plan depends; `parallelize` reads them in each call."""
    if words := sampled_in_words(graph):
        warnings.warn(f"{graph.name}: {words}", stacklevel=3)
