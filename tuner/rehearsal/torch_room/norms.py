"""Norms as a device makes them: RMSNorm is one kernel there, and keeps its input and a number a row.

On the CPU, PyTorch composes it of operators that keep copies in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp.decompositions import _fused_rms_norm

_LIBRARIES: list[Any] = []
"""What was registered, which lasts as long as this refers to it."""
_SINCE = (2, 9)
"""Version of PyTorch from which CUDA has the kernel (aten/src/ATen/native/native_functions.yaml)."""


def stand_in_for_norms() -> None:
    """Let `rms_norm` be the operator that it is on a device; a norm whose weight has another type stays composed."""
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if version < _SINCE:
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call] # torch's class has no types
    library.impl("_fused_rms_norm", _fused_rms_norm, "CPU")
    _LIBRARIES.append(library)
