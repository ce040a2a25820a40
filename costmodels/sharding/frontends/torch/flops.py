"""FLOPs of ATen operators."""

from __future__ import annotations

import math

from costmodels.sharding.frontends.rule_parts import Call
from costmodels.sharding.frontends.torch import matrix_rules
from costmodels.sharding.frontends.torch.layer_rules import ATTENTION, ATTENTION_BACKWARD


def flop_of_call(call: Call) -> float:
    """Return the FLOPs of a product, a convolution, attention, a factorization or a transform; 0 for other operators.

    A multiplication and an addition count as two. Attention takes two products of all queries with all keys, and half
    of that if it is causal. Its gradient takes five products for two (Dao 2023, FlashAttention-2, section 4.1).
    """
    name, params, operands = call.primitive, call.params, call.operands
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return float(2 * math.prod(call.results[0]) * operands[-1][-2])
    if name in ("convolution", "convolution_backward"):
        # The backward operator has the output's gradient as operand 0.
        is_forward = name == "convolution"
        image, out = (operands[0], call.results[0]) if is_forward else (operands[1], operands[0])
        weight = operands[1] if is_forward else operands[2]
        return float(2 * math.prod(image if params["transposed"] else out) * math.prod(weight[1:]))
    if name in (ATTENTION, ATTENTION_BACKWARD):
        queries, keys, values = (operands[params[key].slot] for key in ("query", "key", "value"))
        products = 2 * math.prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])
        return float(products) * (0.5 if params["is_causal"] else 1.0) * (2.5 if name == ATTENTION_BACKWARD else 1.0)
    flop = matrix_rules.FLOPS.get(name)
    return 0.0 if flop is None else flop(call)
