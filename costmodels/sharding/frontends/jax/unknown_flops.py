"""FLOPs of operators that have no sharding rule, as their kernel states them or as XLA counts them."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import JaxprEqn


def flop_by_xla(equation: JaxprEqn) -> float:
    """Return the FLOPs that XLA counts in the lowered operator, without compiling it.

    A kernel of Pallas may state its own (`cost_estimate`). It is 0 where nobody knows: for calls of a foreign library,
    and for operators that the default platform cannot run.
    """
    stated = getattr(equation.params.get("cost_estimate"), "flops", None)
    if stated is not None:
        return float(stated)
    avals = [atom.aval for atom in equation.invars]
    if not all(isinstance(aval, jax.core.ShapedArray) for aval in avals):
        return 0.0  # a token or a reference, which no call from outside can pass

    def call(*operands: Any) -> Any:
        found = equation.primitive.get_bind_params(equation.params)
        functions, params = found if isinstance(found, tuple) else ((), found)
        return equation.primitive.bind(*functions, *operands, **params)

    try:
        analysis = jax.jit(call).lower(*avals).cost_analysis()
    # An operator that cannot be lowered alone fails in many ways: a platform without a kernel raises
    # NotImplementedError, the name of a mesh's axis NameError, and parameters that refer to the surrounding loop or
    # mesh any of the others.
    except (AttributeError, NameError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return 0.0
    return max(float((analysis or {}).get("flops", 0.0)), 0.0)
