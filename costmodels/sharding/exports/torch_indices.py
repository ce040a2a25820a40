"""ATen operators that look elements up or write them, on one rank's parts of their tensors.

A part of a tensor answers for the elements that it holds, and takes what falls into it. Each function returns this
rank's parts of the results of a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from costmodels.sharding.exports.torch_calls import LocalCall, in_part
from costmodels.sharding.layouts import PARTIAL


def embedded(call: LocalCall) -> tuple[Tensor, ...]:
    """Look rows up in a part of a table; rows of other parts are zeros."""
    if not call.is_cut(0, 0):
        return call.run()
    table, tokens = call.operands[:2]
    rows, is_own = in_part(tokens, call.held[0][0])
    return (torch.ops.aten.embedding(table, rows).masked_fill(~is_own[..., None], 0),)


def embedded_back(call: LocalCall) -> tuple[Tensor, ...]:
    """Add up the gradients of the rows of a part."""
    slot = call.params["indices"].slot
    (rows,) = call.result_shapes[0][:1]
    local, is_own = in_part(call.operands[slot], call.result_held[0][0])
    # rows of others are added to one more row, which is dropped
    tokens = torch.where(is_own, local, rows)
    padding, is_here = in_part(torch.tensor(call.params["padding_idx"]), call.result_held[0][0])
    is_here &= call.params["padding_idx"] >= 0
    (found,) = call.with_operand(slot, tokens).run(num_weights=rows + 1, padding_idx=int(padding) if is_here else -1)
    return (found[:rows],)


def gathered(call: LocalCall) -> tuple[Tensor, ...]:
    """Read elements along a dim of a part of a tensor; elements of other parts are zeros."""
    dim = call.params["dim"] % max(len(call.shapes[0]), 1)
    if not call.is_cut(0, dim):
        return call.run()
    slot = call.params["index"].slot
    own, is_own = in_part(call.operands[slot], call.held[0][dim])
    (found,) = call.with_operand(slot, own).run()
    return (found.masked_fill(~is_own, 0),)


def indexed(call: LocalCall) -> tuple[Tensor, ...]:
    """Look elements up in a part of a tensor; elements of other parts are zeros."""
    slots = {dim: one.slot for dim, one in enumerate(call.params["indices"]) if one is not None}
    own_ones = []
    for dim, slot in slots.items():
        if call.is_cut(0, dim):
            own, is_own = in_part(call.operands[slot], call.held[0][dim])
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
    return (found.masked_fill(~is_own.reshape((*common, *(1,) * behind)), 0),)


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
            base, size = call.operands[0], sizes[dim]
            own, is_own = in_part(call.operands[slot], call.held[0][dim])
            base = torch.cat([base, base.narrow(dim, 0, 1)], dim=dim)
            call = replace(call, operands=[base, *call.operands[1:]])
            call = call.with_operand(slot, torch.where(is_own, own, size))
    (found,) = call.run()
    for dim in dims:
        found = found.narrow(dim, 0, sizes[dim])
    return (found,)


def scattered(call: LocalCall) -> tuple[Tensor, ...]:
    """Write elements along a dim of a part of a tensor."""
    return _written(call, {call.params["dim"] % len(call.shapes[0]): call.params["index"].slot})


def put(call: LocalCall) -> tuple[Tensor, ...]:
    """Write elements at indices along some dims of a part of a tensor."""
    slots = {dim: one.slot for dim, one in enumerate(call.params["indices"]) if one is not None}
    return _written(call, slots)
