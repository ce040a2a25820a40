"""Export of a planned JAX function as StableHLO with Shardy annotations, for tools that read neither Python nor JAX.

The text contains the mesh, a sharding of each argument and result, and a constraint wherever the plan pins a layout. It
is the text that `jax.jit` would hand to its compiler, before partitioning. No device is needed, because the mesh is
abstract.

Source: JAX's ahead-of-time lowering (`Traced.lower`), and Shardy's `sdy` dialect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from costmodels.sharding.exports.jax_apply import apply_plan, on_mesh, specs_of
from costmodels.sharding.exports.jax_layouts import abstract_mesh
from costmodels.sharding.frontends.jax.program import Program
from costmodels.sharding.plan import Plan
from hardware.io.errors import ConfigError

SWITCH = "jax_use_shardy_partitioner"


def annotate_stablehlo(
    function: Callable[..., Any],
    program: Program,
    plan: Plan,
    *,
    platform: str | None = None,
    is_propagated: bool = False,
) -> str:
    """Return the StableHLO text of a planned function.

    Args:
        function: Function that was planned.
        program: Trace of the function.
        plan: Sharding plan of the function.
        platform: Platform to lower for (`cpu`, `cuda`, `tpu`); None for JAX's default backend.
        is_propagated: Whether only arguments and results have the plan's layouts.

    Raises:
        ConfigError: JAX is configured to use GSPMD instead of Shardy.
    """
    if not getattr(jax.config, SWITCH, True):  # JAX may drop the switch along with GSPMD
        raise ConfigError(
            "is off, so that JAX would write GSPMD annotations",
            key=SWITCH,
            nearest=f"jax.config.update({SWITCH!r}, True)",
        )
    mesh = abstract_mesh(plan)
    inputs, outputs = specs_of(program, plan)
    leaves = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in program.jaxpr.in_avals]
    arguments = jax.tree_util.tree_unflatten(program.in_tree, leaves)
    jitted = jax.jit(
        function if is_propagated else apply_plan(function, plan),
        in_shardings=on_mesh(mesh, inputs),
        out_shardings=on_mesh(mesh, outputs),
        donate_argnums=program.donated,
        keep_unused=True,  # the text then has all of the function's arguments
    )
    lowered = jitted.trace(*arguments).lower(lowering_platforms=(platform or jax.default_backend(),))
    text: str = lowered.as_text()
    return text
