"""Export of a plan as MindSpore's strategies: the sharding of every operator for `Primitive.shard`.

A strategy gives the number of parts of each dim, for example `((8, 1), (1, 4))`. The numbers identify the axes only if
each dim has a single candidate. Therefore every tensor also has a `Layout(device_matrix, alias_name)`: for each dim an
alias, a tuple of aliases with the major one first if several axes partition it, or "None". MindSpore itself inserts the
redistribution between an output and the next input, and the sum of partial results behind an operator.

This export follows the documentation of `mindspore.Layout` and `Primitive.shard` (2.4). It has never been executed,
because MindSpore runs on none of the machines on which Meshtune is tested. `shape_errors` checks the rules of form that
these pages state.
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
"""Layout entry of a dim that no axis partitions."""

Cut = str | tuple[str, ...]
"""Alias that partitions a dim, several aliases with the major one first, or NOT_CUT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutTensor:
    """A tensor as an operator reads or writes it.

    Attributes:
        shape: Shape of the whole tensor.
        strategy: Number of parts of each dim.
        layout: Aliases of the axes that partition each dim.
    """

    shape: tuple[int, ...]
    strategy: tuple[int, ...]
    layout: tuple[Cut, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the tensor's entry in the exported file."""
        return {
            "strategy": list(self.strategy),
            "layout": [list(each) if isinstance(each, tuple) else each for each in self.layout],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """An operator with its inputs and outputs.

    Attributes:
        op: Name of the operator.
        primitive: Name of its computation in Meshtune.
        inputs: Tensors that it reads.
        outputs: Tensors that it writes, after partial sums are reduced or scattered.
    """

    op: str
    primitive: str
    inputs: tuple[CutTensor, ...]
    outputs: tuple[CutTensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MindSporeStrategies:
    """A plan for MindSpore.

    Attributes:
        device_matrix: Number of devices along each axis, the slowest first.
        alias_name: Names of the axes; a point in a name is replaced by an underscore.
        arguments: Layouts of the tensors that exist at the start of the step.
        operators: All operators except those that provide the arguments.
        broken: Pairs (tensor, operator) between which more data moves than the plan says; see `axis_order`.
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    arguments: dict[str, CutTensor]
    operators: tuple[Strategy, ...]
    broken: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the exported file; docs/sharding-plans.md describes the format."""
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
    """Return the MindSpore strategies of a plan."""
    graph, orders = plan.graph, axis_orders(plan)
    aliases = tuple(name.replace(".", "_") for name in plan.mesh.names)
    # MindSpore's aliases must be identifiers without points.
    assert len(set(aliases)) == len(aliases), f"{plan.mesh.names} must differ in more than points"

    def cut(tensor: int, axes: Sequence[Sequence[int]]) -> CutTensor:
        # MindSpore writes a single alias as a string and several as a tuple.
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
    # A plan without violations has a valid form; anything else is a defect of this export.
    errors = shape_errors(found)
    assert not errors, errors[0]
    return found


def shape_errors(strategies: MindSporeStrategies) -> tuple[str, ...]:
    """Return the errors of form that MindSpore would refuse, one sentence each.

    The number of parts of a dim must divide the dim, and be the product of its aliases' devices. The product of a
    tensor's parts must divide the number of devices. An alias may partition a tensor only once.
    """
    devices = dict(zip(strategies.alias_name, strategies.device_matrix, strict=True))
    count = math.prod(strategies.device_matrix)
    named = [(name, each) for name, each in strategies.arguments.items()]
    named += [(each.op, tensor) for each in strategies.operators for tensor in (*each.inputs, *each.outputs)]
    found = []
    for name, each in named:
        aliases = [(cut,) if isinstance(cut, str) else cut for cut in each.layout]
        # Collect the aliases of all dims, to find one that partitions two of them.
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
