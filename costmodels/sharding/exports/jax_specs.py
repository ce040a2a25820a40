"""A plan as JAX's PartitionSpecs: of arguments and outputs, and of every place where the layout changes.

Given the specs of its arguments alone, JAX's partitioner decides anew how all else lies, and moves more than the plan
does. So each place stands here where partial sums must go somewhere (`def`) and where an operator reads a tensor
otherwise than it lies (`use`). `jax_apply.apply_plan` puts all of them into a function.

A spec has of each dim the axes that cut it, major to minor, in the order that `axis_order` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.sharding.exports.axis_order import AxisOrders, axis_orders
from costmodels.sharding.exports.relayouts import At, relayouts
from costmodels.sharding.graph import INPUT, STATE
from costmodels.sharding.plan import Plan

Spec = tuple[tuple[str, ...], ...]
"""Of each dim the axes that cut it, major to minor; as a PartitionSpec takes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """Where a layout changes.

    Attributes:
        op: The operator that writes partial sums, or reads the tensor otherwise than it lies.
        at: Which of both.
        slot: Which of its results, or operands.
        tensor: What changes.
        spec: What it becomes.
    """

    op: str
    at: At
    slot: int
    tensor: str
    spec: Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class JaxSpecs:
    """A plan for JAX.

    Attributes:
        mesh: The mesh's axes and their sizes, the slowest first.
        arguments: Of each leaf of the function's arguments, by its path.
        outputs: Of each leaf that it returns.
        constraints: Where layouts change, in the order of the operators.
        broken: Tensors and operators between which JAX moves more than the plan says; see `axis_order`.
    """

    mesh: dict[str, int]
    arguments: dict[str, Spec]
    outputs: dict[str, Spec]
    constraints: tuple[Constraint, ...]
    broken: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """As the command writes it; docs/sharding-plans.md tells the form."""
        return {
            "format": "jax",
            "mesh": self.mesh,
            "arguments": {name: _lists(spec) for name, spec in self.arguments.items()},
            "outputs": {name: _lists(spec) for name, spec in self.outputs.items()},
            "constraints": [
                {"op": each.op, "at": each.at, "slot": each.slot, "tensor": each.tensor, "spec": _lists(each.spec)}
                for each in self.constraints
            ],
        }


def _lists(spec: Spec) -> list[list[str]]:
    return [list(axes) for axes in spec]


def jax_specs(plan: Plan, outputs: Sequence[tuple[str, str | None]] | None = None) -> JaxSpecs:
    """The specs of a plan.

    Args:
        plan: Which; of a JAX function or any other graph.
        outputs: The paths of what the function returns, and the tensors that these are, None for what depends on no
            argument (`jax_apply.outputs_of` knows both); None for a graph of no function, of which the states are
            told that it keeps.
    """
    graph, orders = plan.graph, axis_orders(plan)
    numbers = {tensor.name: number for number, tensor in enumerate(graph.tensors)}
    if outputs is None:
        outputs = [
            (op.name, graph.tensors[op.operands[0]].name) for op in graph.ops if op.primitive == STATE and op.operands
        ]
    names = [tensor.name for tensor in graph.tensors]
    return JaxSpecs(
        mesh=dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        arguments={
            op.name: named(plan, orders.lying(op.results[0])) for op in graph.ops if op.primitive in (STATE, INPUT)
        },
        outputs={
            path: () if tensor is None or tensor not in numbers else named(plan, returned(orders, numbers[tensor]))
            for path, tensor in outputs
        },
        constraints=tuple(
            Constraint(
                op=graph.ops[each.op].name,
                at=each.at,
                slot=each.slot,
                tensor=names[each.tensor],
                spec=named(plan, orders.lying(each.tensor) if each.at == "def" else orders.read(each.op, each.slot)),
            )
            for each in relayouts(plan)
        ),
        broken=tuple((names[tensor], graph.ops[op].name) for tensor, op in orders.broken),
    )


def named(plan: Plan, axes: Sequence[Sequence[int]]) -> Spec:
    """Axes of dims by their names."""
    return tuple(tuple(plan.mesh.names[axis] for axis in each) for each in axes)


def returned(orders: AxisOrders, tensor: int) -> tuple[tuple[int, ...], ...]:
    """How a tensor lies that the function returns: as the state does whose place it takes, else as it lies itself."""
    graph = orders.plan.graph
    keeps = next((use for use in graph.uses[tensor] if graph.ops[use.op].primitive == STATE), None)
    return orders.lying(tensor) if keeps is None else orders.lying(graph.ops[keeps.op].results[0])
