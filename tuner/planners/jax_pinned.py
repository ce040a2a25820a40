"""Application of a plan that was found before: a function with its layouts pinned, from a table of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from costmodels.sharding.exports.jax_apply import apply_plan
from costmodels.sharding.exports.served import plan_of_table
from costmodels.sharding.frontends.jax.graph import graph_of_jax


def pin_layouts(
    function: Callable[..., Any],
    *arguments: Any,
    mesh: Mapping[str, int],
    served: Sequence[Sequence[int]],
    donated: Sequence[str | int] = (),
) -> Callable[..., Any]:
    """Return a function that computes the same with every layout of a plan pinned, to be passed to `jax.jit`.

    `meshtune export --to jax` writes programs that call it.

    Args:
        function: Function that was planned.
        arguments: Its arguments, or their shapes, as it was planned with.
        mesh: Axes of the plan's mesh and their sizes, the slowest first.
        served: For each axis, the number of the factor that it serves at each operator, or -1.
        donated: Names or numbers of the arguments whose memory the outputs take over.

    Raises:
        ConfigError: The table belongs to another function, or to other shapes.
    """
    graph = graph_of_jax(function, *arguments, donated=donated)
    return apply_plan(function, plan_of_table(graph, mesh, served))
