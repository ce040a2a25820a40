"""torch's product of groups (`_grouped_mm`) on one rank's parts of its tensors.

Groups are consecutive rows of the left matrix, columns of the right one, or contracted elements. They end at offsets,
which every rank has whole. A part of the rows holds parts of some groups, and the offsets become those of its rows. A
part of the groups multiplies the rows of its groups alone, which are brought to the front; the products of the other
rows are zeros, so that the parts add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from costmodels.sharding.exports.torch_calls import LocalCall, Runs, held_indices

ALIGNMENT_BYTES = 16
"""A matrix begins at a multiple of it, and so does each of its rows or columns (torch, GroupedMMUtils.h)."""


def grouped(call: LocalCall) -> tuple[Tensor, ...]:
    """Return this rank's part of the product of a call of `_grouped_mm`."""
    left, right, *offsets = call.operands
    if not offsets:
        return (_product(call, left, right, None),)
    if left.dim() == right.dim():
        ends = _ends(offsets[0], call.held[0][1])
        return (_contracted(call, left, right, ends, call.result_held[0][0]),)
    if left.dim() == 2:
        return (_by_rows(call, left, right, _ends(offsets[0], call.held[0][0]), call.held[1][0]),)
    ends = _ends(offsets[0], call.held[1][1])
    return (_by_rows(call, right.mT, left.mT, ends, call.held[0][0]).mT,)


def _by_rows(call: LocalCall, rows: Tensor, matrices: Tensor, ends: Tensor, groups: Runs) -> Tensor:
    """Multiply each row with the matrix of its group; rows of other ranks' groups become zeros.

    Args:
        call: Call of the operator.
        rows: Rows [r, k].
        matrices: Matrices [g, k, n] of the groups that this rank has.
        ends: End of each of all groups among these rows.
        groups: Groups that this rank has.
    """
    if len(matrices) == len(ends):
        return _product(call, rows, matrices, ends)
    is_own, order, own_ends = _own_first(ends, groups, len(rows))
    found = _product(call, rows[order], matrices, own_ends)
    return torch.where(is_own[:, None], found[torch.argsort(order)], 0)


def _contracted(call: LocalCall, left: Tensor, right: Tensor, ends: Tensor, groups: Runs) -> Tensor:
    """Multiply the columns [m, r] of each group with its rows [r, n], for the groups that this rank has."""
    if len(ends) == call.result_shapes[0][0]:
        return _product(call, left, right, ends)
    _, order, own_ends = _own_first(ends, groups, len(right))
    return _product(call, left[:, order], right[order], own_ends)


def _ends(ends: Tensor, rows: Runs) -> Tensor:
    """Return where groups end among the rows that a rank has."""
    if all(run.is_whole for run in rows):
        return ends
    return torch.searchsorted(held_indices(rows, ends.device), ends.long()).to(ends.dtype)


def _own_first(ends: Tensor, groups: Runs, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the rows of some groups to the front.

    Returns:
        Whether each row is one of them [r], the rows in their new order [r], and the new ends of these groups.
    """
    own = held_indices(groups, ends.device)
    # groups may be empty, and rows may stand behind the last one
    group_of = torch.searchsorted(ends, torch.arange(count, dtype=ends.dtype, device=ends.device), right=True)
    is_own = torch.isin(group_of, own)
    lengths = ends.diff(prepend=torch.zeros_like(ends[:1]))
    return is_own, torch.argsort((~is_own).to(torch.uint8), stable=True), lengths[own].cumsum(0, dtype=ends.dtype)


def _product(call: LocalCall, left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
    found: Tensor = call.op(_aligned(left), _aligned(right), ends, None, call.params["out_dtype"])
    return found


def _aligned(matrices: Tensor) -> Tensor:
    """Return matrices in a form that the operator takes; a part of aligned rows may begin anywhere."""
    if _is_aligned(matrices):
        return matrices
    *lead, length = matrices.shape
    unit = ALIGNMENT_BYTES // matrices.element_size()
    padded = matrices.new_empty((*lead, -(-length // unit) * unit))[..., :length]
    return padded.copy_(matrices)


def _is_aligned(matrices: Tensor) -> bool:
    rows, columns = matrices.shape[-2:]
    row_stride, column_stride = matrices.stride()[-2:]
    if row_stride == 1 and column_stride >= max(1, rows):
        long_stride = column_stride
    elif column_stride == 1 and row_stride >= max(1, columns):
        long_stride = row_stride
    else:
        return False
    return all(one % ALIGNMENT_BYTES == 0 for one in (long_stride * matrices.element_size(), matrices.data_ptr()))
