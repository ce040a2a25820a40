"""Workspaces of cuBLAS, which PyTorch allocates beside a program's tensors and a rehearsal does not see.

PyTorch has one for each handle and stream, and a handle for each thread that calls cuBLAS: that of the forward pass and
that of autograd (aten/src/ATen/cuda/CublasHandlePool.cpp). By default it has 32 MiB on Hopper and `:4096:2:16:8` on
older devices (github.com/pytorch/pytorch/pull/89027), and 32 MiB on Blackwell in releases of 2026 (pull/175344); older
releases have less there. That there are two is inferred: tensors alone were 64 MiB below most peaks on H100.
Transformer Engine's workspaces are tensors that its Python code makes, so that a rehearsal counts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

ERROR_BYTES = 12 << 20
"""Error of the workspaces: peaks of small cases of Megatron-LM's CI on H100 are no further from both."""
_THREADS = 2
_LARGE_BYTES, _SMALL_BYTES = 32 << 20, (4096 * 2 + 16 * 8) << 10
"""Size by default, on devices of compute capability 9.0 and above, and on others (see above)."""
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.mv.", "aten.addmv.", "aten._grouped_mm.")
"""Operators that call cuBLAS."""


def workspace_bytes(capability: tuple[int, int], variables: Mapping[str, str | None], operators: Iterable[str]) -> int:
    """Return the bytes of a process's workspaces.

    Args:
        capability: Compute capability of the device.
        variables: Environment variables, of which `CUBLAS_WORKSPACE_CONFIG` gives pairs of a size [KiB] and a number.
        operators: Names of the operators that ran; without a product there is no workspace.
    """
    if not any(name.startswith(_PRODUCTS) for name in operators):
        return 0
    pairs = re.findall(r":(\d+):(\d+)", variables.get("CUBLAS_WORKSPACE_CONFIG") or "")
    given = sum(int(size) * int(count) for size, count in pairs) << 10
    return _THREADS * (given or (_LARGE_BYTES if capability >= (9, 0) else _SMALL_BYTES))
