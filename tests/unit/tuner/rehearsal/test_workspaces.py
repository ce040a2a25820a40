"""Workspaces of cuBLAS beside a rehearsal's tensors: one for the forward pass and one for autograd."""

from __future__ import annotations

import pytest

from tuner.rehearsal.workspaces import workspace_bytes

PRODUCT = ("aten.add.Tensor", "aten.mm.default")


@pytest.mark.parametrize(
    ("capability", "variables", "operators", "expected"),
    [
        ((9, 0), {}, PRODUCT, 2 * 32 * 2**20),
        ((10, 0), {}, PRODUCT, 2 * 32 * 2**20),
        ((8, 0), {}, PRODUCT, 2 * (2 * 4096 + 8 * 16) * 2**10),
        ((8, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, PRODUCT, 2 * 32 * 2**20),
        ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, PRODUCT, 2 * (2 * 4096 + 8 * 16) * 2**10),
        ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": None}, ("te.gemm", "aten.mul.Tensor"), 0),
    ],
)
def test_workspaces_are_those_of_pytorch(capability, variables, operators, expected):
    """PyTorch's sizes by device and variable, and none where Transformer Engine alone multiplies."""
    assert workspace_bytes(capability, variables, operators) == expected
