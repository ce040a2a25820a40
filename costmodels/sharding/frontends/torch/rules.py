"""Sharding rules of ATen operators.

Elementwise operators are those that torch tags as pointwise; they share one rule. An operator without a rule gets None,
and the caller blocks all its dims. The other rules stand in a file per theme: `shape_rules`, `reduction_rules`,
`index_rules`, `layer_rules` and `matrix_rules`.

The parameters of a call describe whole tensors. Parameters that depend on shapes (the sizes of a view) must be computed
from local shapes if a factor of the rule is partitioned. An exception is the mean, where every part divides by the
number of all elements, so that the parts add up. If the contraction of an `addmm` is partitioned, only one device adds
the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from costmodels.sharding.dims import Rule
from costmodels.sharding.frontends.rule_parts import Call, elementwise, fits
from costmodels.sharding.frontends.torch import index_rules, layer_rules, matrix_rules, reduction_rules, shape_rules
from costmodels.sharding.frontends.torch.calls import name_of

RULES: Mapping[str, Callable[[Call], Rule]] = {
    **shape_rules.RULES,
    **reduction_rules.RULES,
    **index_rules.RULES,
    **layer_rules.RULES,
    **matrix_rules.RULES,
}
"""Rules of operators that torch does not tag as pointwise."""


def has_rule(op: OpOverload[..., Any]) -> bool:
    """Return whether an operator has a rule."""
    return torch.Tag.pointwise in op.tags or name_of(op) in RULES


def rule_of_call(call: Call, op: OpOverload[..., Any]) -> Rule | None:
    """Return the rule of a call; None if its operator has no rule, or none for this form of it."""
    rule = RULES.get(call.primitive, elementwise if torch.Tag.pointwise in op.tags else None)
    found = None if rule is None else rule(call)
    return found if found is not None and fits(found, call) else None


def unread(call: Call) -> tuple[int, ...]:
    """Return the operands of a call of which only the shape is read."""
    params = call.params
    if call.primitive == "convolution_backward":
        return (1,) if params["output_mask"][0] else (2,)
    if call.primitive in ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"):
        return (1,)
    return (0,) if call.primitive in ("copy", "copy_") else ()
