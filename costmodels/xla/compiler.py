"""XLA's compiler for GPUs, which needs none: where it is installed, and the options of its programs.

It takes only the standard library, as the room of a rehearsal does (`tuner/rehearsal/jax_room`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
"""Modules that have the compiler (packages jax-cuda12-pjrt with jax-cuda12-plugin, and those of CUDA 13)."""
OPTIONS: Mapping[str, bool] = {"xla_gpu_enable_triton_gemm": False}
"""Products are left to the library, as XLA's own would be timed on a device."""


def has_gpu_compiler() -> bool:
    """Return whether XLA's compiler for GPUs is installed in this environment."""
    for name in PLUGINS:
        try:
            if find_spec(name) is not None:
                return True
        except ImportError:  # of its parent package
            continue
    return False
