"""FLOPs of operators that have no sharding rule, as torch's own counter has them."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry


def flop_by_torch(op: OpOverload[..., Any], node: Node) -> float:
    """Return the FLOPs that torch's counter has for a call; 0 for operators that it does not know."""
    count = flop_registry.get(op._overloadpacket)
    if count is None:
        return 0.0
    args: Any = map_arg(node.args, lambda one: one.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda one: one.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))
