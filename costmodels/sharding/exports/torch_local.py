"""ATen operators on one rank's parts of their tensors, as the rules of `frontends/torch/rules.py` cut them.

Most operators compute a part of their results from parts of their operands as they stand. Others need to know where
their part lies: those that look rows up or write them, causal attention, and sums to which something is added once.
Parameters that hold sizes of whole tensors become those of the parts. An operator that is in none of these tables can
run whole only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from costmodels.sharding.frontends.torch.rules import Operand, name_of
from costmodels.sharding.layouts import PARTIAL, Layout

Shape = tuple[int, ...]

REDUCED_BY: Mapping[str, str] = {"amax": "max", "amin": "min", "any": "max", "all": "min", "prod": "product"}
"""Reduction that combines the parts of an operator's results, in DTensor's words, where it is no sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCall:
    """A call of an operator on one rank.

    Attributes:
        op: Operator.
        params: Its parameters by name; tensors are `Operand`s.
        operands: Parts of the tensors that it takes.
        layouts: Layout of each of them.
        shapes: Shape of each whole tensor that it takes.
        result_layouts: Layout in which each result is left.
        result_shapes: Shape of this rank's part of each result.
        sizes: Number of ranks along each axis.
        place: Coordinates of the rank in the mesh.
        device: Device of the rank.
    """

    op: OpOverload[..., Any]
    params: Mapping[str, Any]
    operands: Sequence[Tensor]
    layouts: Sequence[Layout]
    shapes: Sequence[Shape]
    result_layouts: Sequence[Layout]
    result_shapes: Sequence[Shape]
    sizes: Sequence[int]
    place: Sequence[int]
    device: torch.device

    def run(self, **changes: Any) -> tuple[Tensor, ...]:
        """Call the operator, with some parameters changed, and return its results that are tensors."""
        params = {**self.params, **changes}
        if "device" in params and "device" not in changes:
            params["device"] = self.device
        given = {key: self._tensors_in(value) for key, value in params.items()}
        arguments = self.op._schema.arguments
        rest = {one.name: given[one.name] for one in arguments if one.kwarg_only}
        made = self.op(*(given[one.name] for one in arguments if not one.kwarg_only), **rest)
        several = made if isinstance(made, (tuple, list)) else [made]
        return tuple(one for one in several if isinstance(one, Tensor))

    def start(self, slot: int, dim: int) -> int:
        """Return the first index along a dim of this rank's part of a tensor that the operator takes."""
        return part_of(self.layouts[slot], dim, self.sizes, self.place) * self.operands[slot].shape[dim]

    def result_start(self, dim: int) -> int:
        """Return the first index along a dim of this rank's part of the first result."""
        return part_of(self.result_layouts[0], dim, self.sizes, self.place) * self.result_shapes[0][dim]

    def is_cut(self, slot: int, dim: int) -> bool:
        """Return whether an axis cuts a dim of a tensor that the operator takes."""
        return dim in self.layouts[slot]

    def adds_once(self) -> bool:
        """Return whether this rank adds the one term, such as a bias, of a sum whose parts lie on several ranks."""
        return all(self.place[axis] == 0 for axis, dim in enumerate(self.result_layouts[0]) if dim == PARTIAL)

    def with_operand(self, slot: int, value: Tensor) -> LocalCall:
        """Return the call with another tensor in one place."""
        operands = list(self.operands)
        operands[slot] = value
        return replace(self, operands=operands)

    def _tensors_in(self, value: Any) -> Any:
        if isinstance(value, Operand):
            return self.operands[value.slot]
        return [self._tensors_in(one) for one in value] if isinstance(value, list) else value


def part_of(layout: Layout, dim: int, sizes: Sequence[int], place: Sequence[int]) -> int:
    """Return the number of the part of a dim that a rank holds; the earlier of several axes is the major one."""
    found = 0
    for axis, cut in enumerate(layout):
        if cut == dim:
            found = found * sizes[axis] + place[axis]
    return found


def local_shape(shape: Shape, layout: Layout, sizes: Sequence[int]) -> Shape:
    """Return the shape of each rank's part of a tensor whose dims divide."""
    return tuple(
        size // math.prod(sizes[axis] for axis, cut in enumerate(layout) if cut == dim)
        for dim, size in enumerate(shape)
    )


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


def _in_part(index: Tensor, start: int, size: int, whole: int) -> tuple[Tensor, Tensor]:
    """Return indices of a whole dim as those of a part, and whether the part has them; the others become 0."""
    local = torch.where(index < 0, index + whole, index) - start
    is_own = (local >= 0) & (local < size)
    return torch.where(is_own, local, 0), is_own


def _embedded(call: LocalCall) -> tuple[Tensor, ...]:
    """Look rows up in a part of a table; rows of other parts are zeros."""
    if not call.is_cut(0, 0):
        return call.run()
    table, tokens = call.operands[:2]
    rows, is_own = _in_part(tokens, call.start(0, 0), table.shape[0], call.shapes[0][0])
    return (torch.where(is_own[..., None], torch.ops.aten.embedding(table, rows), 0),)


def _embedded_back(call: LocalCall) -> tuple[Tensor, ...]:
    """Add up the gradients of the rows of a part."""
    slot = call.params["indices"].slot
    (rows,) = call.result_shapes[0][:1]
    start, padding = call.result_start(0), call.params["padding_idx"]
    local = call.operands[slot] - start
    # rows of others are added to one more row, which is dropped
    tokens = torch.where((local >= 0) & (local < rows), local, rows)
    padding = padding - start if start <= padding < start + rows else -1
    (found,) = call.with_operand(slot, tokens).run(num_weights=rows + 1, padding_idx=padding)
    return (found[:rows],)


def _gathered(call: LocalCall) -> tuple[Tensor, ...]:
    dim = call.params["dim"] % max(len(call.shapes[0]), 1)
    if not call.is_cut(0, dim):
        return call.run()
    slot = call.params["index"].slot
    own, is_own = _in_part(call.operands[slot], call.start(0, dim), call.operands[0].shape[dim], call.shapes[0][dim])
    (found,) = call.with_operand(slot, own).run()
    return (torch.where(is_own, found, 0),)


def _indexed(call: LocalCall) -> tuple[Tensor, ...]:
    """Look elements up in a part of a tensor; elements of other parts are zeros."""
    slots = {dim: one.slot for dim, one in enumerate(call.params["indices"]) if one is not None}
    own_ones = []
    for dim, slot in slots.items():
        if call.is_cut(0, dim):
            size, whole = call.operands[0].shape[dim], call.shapes[0][dim]
            own, is_own = _in_part(call.operands[slot], call.start(0, dim), size, whole)
            call = call.with_operand(slot, own)
            own_ones.append(is_own)
    (found,) = call.run()
    if not own_ones:
        return (found,)
    common = np.broadcast_shapes(*(tuple(call.operands[slot].shape) for slot in slots.values()))
    is_own = torch.stack([one.expand(common) for one in own_ones]).all(dim=0)
    # the indices' common shape stands where the first of adjacent indexed dims stood, or else in front
    lead = min(slots) if max(slots) - min(slots) + 1 == len(slots) else 0
    behind = found.dim() - lead - len(common)
    return (torch.where(is_own.reshape((*common, *(1,) * behind)), found, 0),)


def _written(call: LocalCall, dims: Mapping[int, int]) -> tuple[Tensor, ...]:
    """Write what falls into a part of a tensor.

    Args:
        call: Call whose first operand is written to.
        dims: Slot of the index along each dim that is indexed.
    """
    sizes = list(call.operands[0].shape)
    if PARTIAL in call.result_layouts[0] and not call.adds_once():
        call = call.with_operand(0, torch.zeros_like(call.operands[0]))
    for dim, slot in dims.items():
        if call.is_cut(0, dim):
            # what falls into other parts is written behind the part, and dropped
            base, start, size, whole = call.operands[0], call.start(0, dim), sizes[dim], call.shapes[0][dim]
            own, is_own = _in_part(call.operands[slot], start, size, whole)
            base = torch.cat([base, base.narrow(dim, 0, 1)], dim=dim)
            call = replace(call, operands=[base, *call.operands[1:]])
            call = call.with_operand(slot, torch.where(is_own, own, size))
    (found,) = call.run()
    for dim in dims:
        found = found.narrow(dim, 0, sizes[dim])
    return (found,)


def _scattered(call: LocalCall) -> tuple[Tensor, ...]:
    return _written(call, {call.params["dim"] % len(call.shapes[0]): call.params["index"].slot})


def _put(call: LocalCall) -> tuple[Tensor, ...]:
    slots = {dim: one.slot for dim, one in enumerate(call.params["indices"]) if one is not None}
    return _written(call, slots)


def _attended(call: LocalCall) -> tuple[Tensor, ...]:
    """Attend to all keys with a part of the queries; causal attention then needs a mask."""
    query, key = (call.params[name].slot for name in ("query", "key"))
    if not call.params["is_causal"] or not call.is_cut(query, 2):
        return call.run()
    given, first = call.operands[query], call.start(query, 2)
    rows = torch.arange(first, first + given.shape[2], device=given.device)
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
    "embedding": _embedded,
    "embedding_dense_backward": _embedded_back,
    "gather": _gathered,
    "index": _indexed,
    **dict.fromkeys(("scatter", "scatter_add"), _scattered),
    "index_put": _put,
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
    _fused_rms_norm_backward _scaled_dot_product_flash_attention_for_cpu_backward addmm baddbmm bmm convolution
    convolution_backward embedding embedding_dense_backward gather histc index index_put mean mm
    native_group_norm_backward native_layer_norm_backward scatter_add sum
    """.split()  # noqa: SIM905  # one line is easier to scan than a list
)
"""Operators whose results are sums of those of their parts."""
