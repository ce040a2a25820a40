"""A plan as MindSpore's strategies: of every operator how its inputs and outputs are cut, for `Primitive.shard`.

A strategy tells of each dim into how many parts it is cut, `((8, 1), (1, 4))`. That says which axes do so only where
each dim has one candidate, so that every tensor has a `Layout(device_matrix, alias_name)` beside it: of each dim the
alias, a tuple of aliases where several axes cut it, the major one first, or "None". MindSpore inserts the
redistribution between an output and the next input by itself, and the sum of partial results behind their operator.

Written after the documentation of `mindspore.Layout` and `Primitive.shard` (2.4), and never executed: MindSpore runs on
none of the machines that Meshtune is tested on. `shape_errors` holds what these pages demand of the form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.sharding.exports.axis_order import axis_orders
from costmodels.sharding.graph import INPUT, STATE
from costmodels.sharding.plan import Plan

NOT_CUT = "None"
"""How a layout names a dim that no axis cuts."""

Cut = str | tuple[str, ...]
"""Of a dim the alias that cuts it, several of them the major one first, or NOT_CUT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutTensor:
    """A tensor as an operator reads or writes it.

    Attributes:
        shape: Whole.
        strategy: Into how many parts each dim is cut.
        layout: By what.
    """

    shape: tuple[int, ...]
    strategy: tuple[int, ...]
    layout: tuple[Cut, ...]

    def to_json(self) -> dict[str, Any]:
        """As the command writes it."""
        return {
            "strategy": list(self.strategy),
            "layout": [list(each) if isinstance(each, tuple) else each for each in self.layout],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """An operator with its inputs and outputs.

    Attributes:
        op: Its name.
        primitive: What it computes, in Meshtune's words.
        inputs: What it reads.
        outputs: What it writes, once partial sums are added up or scattered.
    """

    op: str
    primitive: str
    inputs: tuple[CutTensor, ...]
    outputs: tuple[CutTensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MindSporeStrategies:
    """A plan for MindSpore.

    Attributes:
        device_matrix: Devices along each axis, the slowest first.
        alias_name: What the axes are called; a point in a name became an underscore.
        arguments: How the tensors lie that the step begins with.
        operators: Every operator that isn't one of these.
        broken: Tensors and operators between which parts move beyond what the plan says; see `axis_order`.
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    arguments: dict[str, CutTensor]
    operators: tuple[Strategy, ...]
    broken: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """As the command writes it; docs/sharding-plans.md tells the form."""
        return {
            "format": "mindspore",
            "device_matrix": list(self.device_matrix),
            "alias_name": list(self.alias_name),
            "arguments": {name: each.to_json() for name, each in self.arguments.items()},
            "operators": [
                {
                    "op": each.op,
                    "primitive": each.primitive,
                    "in": [tensor.to_json() for tensor in each.inputs],
                    "out": [tensor.to_json() for tensor in each.outputs],
                }
                for each in self.operators
            ],
        }


def mindspore_strategies(plan: Plan) -> MindSporeStrategies:
    """The strategies of a plan."""
    graph, orders = plan.graph, axis_orders(plan)
    aliases = tuple(name.replace(".", "_") for name in plan.mesh.names)
    assert len(set(aliases)) == len(aliases), f"{plan.mesh.names} stay apart without their points"

    def cut(tensor: int, axes: Sequence[Sequence[int]]) -> CutTensor:
        names = [tuple(aliases[axis] for axis in each) for each in axes]
        return CutTensor(
            shape=graph.tensors[tensor].shape,
            strategy=tuple(math.prod(plan.mesh.sizes[axis] for axis in each) for each in axes),
            layout=tuple(NOT_CUT if not each else each[0] if len(each) == 1 else each for each in names),
        )

    found = MindSporeStrategies(
        device_matrix=plan.mesh.sizes,
        alias_name=aliases,
        arguments={
            op.name: cut(op.results[0], orders.lying(op.results[0]))
            for op in graph.ops
            if op.primitive in (STATE, INPUT)
        },
        operators=tuple(
            Strategy(
                op=op.name,
                primitive=op.primitive,
                inputs=tuple(cut(tensor, orders.read(number, slot)) for slot, tensor in enumerate(op.operands)),
                outputs=tuple(cut(tensor, orders.lying(tensor)) for tensor in op.results),
            )
            for number, op in enumerate(graph.ops)
            if not op.is_source
        ),
        broken=tuple((graph.tensors[tensor].name, graph.ops[op].name) for tensor, op in orders.broken),
    )
    errors = shape_errors(found)
    assert not errors, errors[0]
    return found


def shape_errors(strategies: MindSporeStrategies) -> tuple[str, ...]:
    """What of the form MindSpore would refuse, a sentence each.

    The ways of a dim divide it and are the product of its aliases' devices; the product of a tensor's ways divides the
    number of devices; no alias cuts a tensor twice.
    """
    devices = dict(zip(strategies.alias_name, strategies.device_matrix, strict=True))
    count = math.prod(strategies.device_matrix)
    named = [(name, each) for name, each in strategies.arguments.items()]
    named += [(each.op, tensor) for each in strategies.operators for tensor in (*each.inputs, *each.outputs)]
    found = []
    for name, each in named:
        aliases = [(cut,) if isinstance(cut, str) else cut for cut in each.layout]
        used = [alias for one in aliases for alias in one if alias != NOT_CUT]
        ways = tuple(math.prod(devices[alias] for alias in one if alias != NOT_CUT) for one in aliases)
        if ways != each.strategy or len(ways) != len(each.shape):
            found.append(f"{name}: layout {each.layout} is not the strategy {each.strategy}")
        elif any(size % way for size, way in zip(each.shape, ways, strict=True)):
            found.append(f"{name}: {each.shape} can't be cut by {each.strategy}")
        elif count % math.prod(ways):
            found.append(f"{name}: {math.prod(ways)} parts do not divide {count} devices")
        elif len(set(used)) < len(used):
            found.append(f"{name}: an axis of {each.layout} cuts two dims")
    return tuple(found)
