"""ATen operators on one rank's parts of their tensors, as the rules of `frontends/torch` cut them.

Most operators compute a part of their results from parts of their operands as they stand. Others need to know where
their part lies: those that look rows up or write them, causal attention, and sums to which something is added once.
Parameters that hold sizes of whole tensors become those of the parts. An operator that is in none of these tables can
run whole only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from costmodels.sharding.exports.torch_calls import LocalCall, held_indices
from costmodels.sharding.exports.torch_groups import grouped
from costmodels.sharding.exports.torch_indices import embedded, embedded_back, gathered, indexed, put, scattered
from costmodels.sharding.frontends.torch.calls import Operand, name_of
from costmodels.sharding.layouts import PARTIAL

REDUCED_BY: Mapping[str, str] = {"amax": "max", "amin": "min", "any": "max", "all": "min", "prod": "product"}
"""Reduction that combines the parts of an operator's results, in DTensor's words, where it is no sum."""


def can_run(op: OpOverload[..., Any], params: Mapping[str, Any]) -> bool:
    """Return whether an operator can compute parts of its results from parts of its operands."""
    is_known = torch.Tag.pointwise in op.tags or name_of(op) in AS_IT_STANDS or name_of(op) in LOCAL
    return is_known and not is_random(op, params)


def is_random(op: OpOverload[..., Any], params: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws random numbers; attention without dropout draws none."""
    return torch.Tag.nondeterministic_seeded in op.tags and params.get("dropout_p") != 0


def can_add_up(op: OpOverload[..., Any]) -> bool:
    """Return whether the results of an operator can be combined from those of its parts."""
    return name_of(op) in SUMS or name_of(op) in REDUCED_BY


def run_local(call: LocalCall) -> tuple[Tensor, ...]:
    """Return this rank's parts of the results of an operator."""
    made = LOCAL.get(name_of(call.op), LocalCall.run)(call)
    shapes = tuple(tuple(one.shape) for one in made)
    assert shapes == tuple(call.result_shapes), f"{call.op} yields {shapes} where the plan has {call.result_shapes}"
    return made


def _shaped(call: LocalCall) -> tuple[Tensor, ...]:
    """Reshape a part; the parameter holds the shape of the whole."""
    return (call.operands[0].reshape(call.result_shapes[0]),)


def _expanded(call: LocalCall) -> tuple[Tensor, ...]:
    return (call.operands[0].expand(call.result_shapes[0]),)


def _sliced(call: LocalCall) -> tuple[Tensor, ...]:
    """Slice a part; a dim that keeps its size is not sliced."""
    dim = call.params["dim"] % len(call.shapes[0])
    return call.run(start=0, end=sys.maxsize) if call.is_cut(0, dim) else call.run()


def _mean(call: LocalCall) -> tuple[Tensor, ...]:
    """Divide by the number of all elements, so that parts add up."""
    ways = math.prod(size for size, dim in zip(call.sizes, call.result_layouts[0], strict=True) if dim == PARTIAL)
    (found,) = call.run()
    return (found / ways if ways > 1 else found,)


def _product_and_sum(call: LocalCall) -> tuple[Tensor, ...]:
    """Add a bias on one of the ranks whose products are added up."""
    return call.run() if call.adds_once() else call.run(beta=0)


def _convolved(call: LocalCall) -> tuple[Tensor, ...]:
    bias = call.params.get("bias")
    if isinstance(bias, Operand) and not call.adds_once():
        return call.run(groups=_groups(call), bias=None)
    return call.run(groups=_groups(call))


def _groups(call: LocalCall) -> int:
    """Return the number of groups of a convolution on this rank's channels."""
    groups: int = call.params["groups"]
    name = "input" if name_of(call.op) == "convolution" else "grad_output"
    slot = call.params[name].slot
    # with several groups, only whole groups can be cut along the channels
    return groups * call.operands[slot].shape[1] // call.shapes[slot][1] if groups > 1 else 1


def _normed_groups(call: LocalCall) -> tuple[Tensor, ...]:
    slot = call.params["input"].slot
    (batch, channels), whole = call.operands[slot].shape[:2], call.shapes[slot][1]
    return call.run(N=batch, C=channels, group=call.params["group"] * channels // whole)


def _scaled_back(call: LocalCall) -> tuple[Tensor, ...]:
    return call.run(input_size=call.result_shapes[0])


def _attended(call: LocalCall) -> tuple[Tensor, ...]:
    """Attend to all keys with a part of the queries; causal attention then needs a mask."""
    query, key = (call.params[name].slot for name in ("query", "key"))
    if not call.params["is_causal"] or not call.is_cut(query, 2):
        return call.run()
    given = call.operands[query]
    rows = held_indices(call.held[query][2], given.device)
    is_hidden = torch.arange(call.operands[key].shape[2], device=given.device) > rows[:, None]
    mask = torch.zeros(is_hidden.shape, dtype=given.dtype, device=given.device).masked_fill_(is_hidden, -math.inf)
    return call.run(is_causal=False, attn_mask=mask)


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

LOCAL: Mapping[str, Callable[[LocalCall], tuple[Tensor, ...]]] = {
    # a part may have one element along a dim that `squeeze` shall keep
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "squeeze"), _shaped),
    "expand": _expanded,
    "slice": _sliced,
    "mean": _mean,
    **dict.fromkeys(("addmm", "baddbmm"), _product_and_sum),
    **dict.fromkeys(("convolution", "convolution_backward"), _convolved),
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _normed_groups),
    **dict.fromkeys(
        ("upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_bilinear2d_backward"), _scaled_back
    ),
    "embedding": embedded,
    "embedding_dense_backward": embedded_back,
    "gather": gathered,
    "index": indexed,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scattered),
    "index_put": put,
    "_grouped_mm": grouped,
    **dict.fromkeys((_ATTENTION, f"{_ATTENTION}_backward"), _attended),
}
"""Operators that need to know which part of their tensors they compute."""

AS_IT_STANDS = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _cumsum _fused_rms_norm _fused_rms_norm_backward _log_softmax
    _log_softmax_backward_data _softmax _softmax_backward_data _to_copy all amax amin any argmax argmin avg_pool1d
    avg_pool2d avg_pool2d_backward bmm cat clone constant_pad_nd copy cumprod cumsum flip logcumsumexp max
    max_pool2d_with_indices max_pool2d_with_indices_backward median min mm native_layer_norm
    native_layer_norm_backward permute prod select select_scatter slice_scatter sort split split_with_sizes stack sum t
    topk transpose unbind unsqueeze upsample_bilinear2d upsample_nearest1d upsample_nearest2d
    _cdist_backward _cdist_forward bucketize searchsorted
    _conj _neg_view diagonal diagonal_scatter histc resolve_conj resolve_neg view_as_complex view_as_real
    _fft_c2c _fft_c2r _fft_r2c
    _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky cholesky_inverse
    cholesky_solve geqrf linalg_cholesky_ex linalg_eig linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
    linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr
    linalg_solve_triangular lu_unpack ormqr triangular_solve
    """.split()  # noqa: SIM905  # one line is easier to scan than a list
)
"""Operators that compute parts as they stand, beside those that torch tags as pointwise."""

SUMS = frozenset(
    """
    _cdist_backward _fused_rms_norm_backward _grouped_mm _scaled_dot_product_flash_attention_for_cpu_backward addmm
    baddbmm bmm convolution convolution_backward embedding embedding_dense_backward gather histc index index_put mean mm
    native_group_norm_backward native_layer_norm_backward scatter_add sum
    """.split()  # noqa: SIM905  # one line is easier to scan than a list
)
"""Operators whose results are sums of those of their parts."""
