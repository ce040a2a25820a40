"""Sharding rules of ATen operators that move, join or pick elements by their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from costmodels.sharding.dims import FactorKind, Place, Rule
from costmodels.sharding.frontends.rule_parts import (
    Call,
    Loops,
    elementwise,
    rearrange_rule,
    replace_factors,
    reshape_rule,
    same_rule,
    slice_rule,
    without,
)
from costmodels.sharding.frontends.torch.calls import dims_of


def _view(call: Call) -> Rule:
    return reshape_rule(call.operands[0], call.results[0])


def _permute(call: Call) -> Rule:
    """Return the rule of a permutation of dims, of which `t` and `transpose` are special cases."""
    rank = len(call.operands[0])
    if call.primitive == "permute":
        order = list(dims_of(call, "dims"))
    else:
        # `t` swaps the only two dims, `transpose` swaps two named ones.
        order = list(range(rank))
        if rank:
            first, second = (0, rank - 1) if call.primitive == "t" else (*dims_of(call, "dim0"), *dims_of(call, "dim1"))
            order[first], order[second] = order[second], order[first]
    loops = Loops()
    operand = loops.dims(call.operands[0])
    return loops.rule([operand], [tuple(operand[dim] for dim in order)])


def _squeeze(call: Call) -> Rule:
    loops = Loops()
    operand = loops.dims(call.operands[0])
    gone = [dim for dim in dims_of(call) if call.operands[0][dim] == 1]
    return loops.rule([operand], [without(operand, gone)])


def _unsqueeze(call: Call) -> Rule:
    loops = Loops()
    result = loops.dims(call.results[0])
    return loops.rule([without(result, dims_of(call, rank=len(result)))], [result])


def _cat(call: Call) -> Rule:
    """Return the rule of a concatenation; torch still allows empty operands of another rank."""
    loops = Loops()
    (dim,) = dims_of(call, rank=len(call.results[0]))
    place = loops.dims(call.results[0], blocked=(dim,))
    operands: list[Place] = [
        replace_factors(place, {dim: loops.dim(shape[dim], FactorKind.BLOCKED)}) if len(shape) == len(place) else ((),)
        for shape in call.operands
    ]
    return loops.rule(operands, [place])


def _stack(call: Call) -> Rule:
    loops = Loops()
    (dim,) = dims_of(call, rank=len(call.results[0]))
    place = loops.dims(call.results[0], blocked=(dim,))
    return loops.rule([without(place, (dim,))] * len(call.operands), [place])


def _select(call: Call) -> Rule:
    """Return the rule of an operator that selects one index along a dim, or each index."""
    loops = Loops()
    dims = dims_of(call)
    place = loops.dims(call.operands[0], blocked=dims)
    return loops.rule([place], [without(place, dims)] * len(call.results))


def _select_scatter(call: Call) -> Rule:
    loops = Loops()
    dims = dims_of(call)
    place = loops.dims(call.operands[0], blocked=dims)
    return loops.rule([place, without(place, dims)], [place])


def _diagonal(call: Call) -> Rule:
    """Return the rule of a view of diagonals, or of a copy with other diagonals; a diagonal is the last dim."""
    loops = Loops()
    rank = len(call.operands[0])
    dims = [call.params[key] % rank for key in ("dim1", "dim2")]
    whole = loops.dims(call.operands[0], blocked=dims)
    is_view = call.primitive == "diagonal"
    length = (call.results[0] if is_view else call.operands[1])[-1]
    diagonal = (*without(whole, dims), loops.dim(length, FactorKind.BLOCKED))
    return loops.rule([whole], [diagonal]) if is_view else loops.rule([whole, diagonal], [whole])


def _flip(call: Call) -> Rule:
    return rearrange_rule(call, dims_of(call, "dims"))


def _pad(call: Call) -> Rule:
    """Return the rule of a padding, whose parameter begins with the last dim."""
    pads = call.params["pad"]
    pairs = [pads[one : one + 2] for one in range(0, len(pads), 2)]
    rank = len(call.operands[0])
    return rearrange_rule(call, [rank - 1 - one for one, pair in enumerate(pairs) if any(pair)])


VIEWS = frozenset(("_unsafe_view", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"))
"""Operators whose result has the operand's elements in new positions; `expand` repeats them."""

RULES: Mapping[str, Callable[[Call], Rule]] = {
    **same_rule("_conj _neg_view _to_copy copy copy_ expand resolve_conj resolve_neg", elementwise),
    **same_rule("view _unsafe_view reshape", _view),
    **same_rule("permute transpose t", _permute),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "cat": _cat,
    "stack": _stack,
    **same_rule("select unbind", _select),
    "select_scatter": _select_scatter,
    "slice": slice_rule,
    "constant_pad_nd": _pad,
    "flip": _flip,
    **same_rule("diagonal diagonal_scatter", _diagonal),
}
"""Rules of these operators by name."""
