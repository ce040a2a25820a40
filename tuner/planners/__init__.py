"""Planners: searches for the best plan of one configuration, with a proof of how good it is.

The functions that shard a JAX function or a torch module are exported here. Each is loaded, with its library, on first
use:

    from tuner.planners import plan_jax, plan_torch
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they load JAX and torch, which may be missing
    from tuner.planners.jax_pinned import pin_layouts
    from tuner.planners.jax_plans import JaxPlan, LayoutConstraint, plan_jax
    from tuner.planners.torch_plans import TorchPlan, plan_torch
    from tuner.planners.torch_served import parallelize_as
    from tuner.planners.torch_titan import for_titan, titan_step
    from tuner.planners.torch_transformers import for_trainer

__all__ = [
    "JaxPlan",
    "LayoutConstraint",
    "TorchPlan",
    "for_titan",
    "for_trainer",
    "parallelize_as",
    "pin_layouts",
    "plan_jax",
    "plan_torch",
    "titan_step",
]

_LIBRARIES = {
    "JaxPlan": ("jax", "JAX", "jax_plans"),
    "LayoutConstraint": ("jax", "JAX", "jax_plans"),
    "TorchPlan": ("torch", "torch", "torch_plans"),
    "for_titan": ("torchtitan", "torchtitan", "torch_titan"),
    "for_trainer": ("transformers", "transformers", "torch_transformers"),
    "parallelize_as": ("torch", "torch", "torch_served"),
    "pin_layouts": ("jax", "JAX", "jax_pinned"),
    "plan_jax": ("jax", "JAX", "jax_plans"),
    "plan_torch": ("torch", "torch", "torch_plans"),
    "titan_step": ("torchtitan", "torchtitan", "torch_titan"),
}
"""Module and title of the library that each name needs, and the module that has the name."""


def __getattr__(name: str) -> Any:
    """Load a name from the module of its library.

    Raises:
        AttributeError: there is no such name.
        ImportError: the library is not installed.
    """
    if name not in _LIBRARIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    library, title, module = _LIBRARIES[name]
    if importlib.util.find_spec(library) is None:
        package = library if library in ("torchtitan", "transformers") else f"'meshtune[{library}]'"
        raise ImportError(f"{name} needs {title}, which is not installed here; pip install {package}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
