"""Sharding rules of ATen operators that need the elements along some dims together: reductions, sums, sorts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from costmodels.sharding.dims import FactorKind, Rule
from costmodels.sharding.frontends.rule_parts import (
    Call,
    Loops,
    along,
    blocked_rule,
    replace_factors,
    same_rule,
    without,
)
from costmodels.sharding.frontends.torch.calls import dims_of


def _reduce(call: Call) -> Rule:
    return _reduce_dims(call, FactorKind.REDUCTION)


def _reduce_whole(call: Call) -> Rule:
    """Return the rule of reductions whose parts cannot be combined, such as indices without values."""
    return _reduce_dims(call, FactorKind.BLOCKED)


def _reduce_dims(call: Call, kind: FactorKind) -> Rule:
    loops = Loops()
    dims = dims_of(call)
    operand = tuple(
        loops.dim(size, kind if dim in dims else FactorKind.MAP) for dim, size in enumerate(call.operands[0])
    )
    is_kept = call.params.get("keepdim", False)
    result = replace_factors(operand, dict.fromkeys(dims, ())) if is_kept else without(operand, dims)
    return loops.rule([operand], [result] * len(call.results))


def _along(call: Call) -> Rule:
    if not call.results[0]:
        return blocked_rule(call)
    return along(call, *dims_of(call))


RULES: Mapping[str, Callable[[Call], Rule]] = {
    **same_rule("sum mean amax amin any all prod", _reduce),
    **same_rule("argmax argmin max min median", _reduce_whole),
    **same_rule("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data", _along),
    **same_rule("cumsum cumprod _cumsum logcumsumexp topk sort split split_with_sizes slice_scatter", _along),
}
"""Rules of these operators by name."""
