"""Export of a plan as JAX's PartitionSpecs: for arguments, outputs and every layout change.

With the specs of the arguments alone, JAX's partitioner chooses all other layouts anew, and moves more data than the
plan. Therefore the export also lists every place where partial sums are reduced (`def`) and where an operator reads a
tensor in another layout (`use`). `jax_apply.apply_plan` adds all of these constraints to a function.

A spec holds the axes that partition each dim, major to minor, in the order that `axis_order` chooses.
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
"""Axes that partition each dim, major to minor, in the form that a PartitionSpec takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """A layout change of a tensor at one operator.

    Attributes:
        op: Name of the operator that writes partial sums, or that reads the tensor in another layout.
        at: Side of the change: `def` or `use`.
        slot: Index of the tensor among the operator's results (`def`) or operands (`use`).
        tensor: Name of the tensor.
        spec: Spec of the tensor after the change.
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
        mesh: Axes of the mesh and their sizes, the slowest first.
        arguments: Spec of each leaf of the function's arguments, by its path.
        outputs: Spec of each leaf of the function's outputs, by its path.
        constraints: Layout changes, in the order of the operators.
        broken: Pairs (tensor, operator) between which JAX moves more data than the plan says; see `axis_order`.
    """

    mesh: dict[str, int]
    arguments: dict[str, Spec]
    outputs: dict[str, Spec]
    constraints: tuple[Constraint, ...]
    broken: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the exported file; docs/sharding-plans.md describes the format."""
        return {
            "format": "jax",
            "mesh": self.mesh,
            "arguments": {name: _list_axes(spec) for name, spec in self.arguments.items()},
            "outputs": {name: _list_axes(spec) for name, spec in self.outputs.items()},
            "constraints": [
                {"op": each.op, "at": each.at, "slot": each.slot, "tensor": each.tensor, "spec": _list_axes(each.spec)}
                for each in self.constraints
            ],
        }


def _list_axes(spec: Spec) -> list[list[str]]:
    return [list(axes) for axes in spec]


def jax_specs(plan: Plan, outputs: Sequence[tuple[str, str | None]] | None = None) -> JaxSpecs:
    """Return the PartitionSpecs of a plan.

    Args:
        plan: Plan of a JAX function or of any other graph.
        outputs: Path and tensor name of each output of the function, with the name None if it depends on no argument
            (see `jax_apply.outputs_of`). None for a graph without a function; its updated states are listed instead.
    """
    graph, orders = plan.graph, axis_orders(plan)
    numbers = {tensor.name: number for number, tensor in enumerate(graph.tensors)}
    # A graph without a function "returns" the updated states.
    if outputs is None:
        outputs = [
            (op.name, graph.tensors[op.operands[0]].name) for op in graph.ops if op.primitive == STATE and op.operands
        ]
    names = [tensor.name for tensor in graph.tensors]
    return JaxSpecs(
        mesh=dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        arguments={
            op.name: name_axes(plan, orders.lying(op.results[0])) for op in graph.ops if op.primitive in (STATE, INPUT)
        },
        outputs={
            path: ()
            if tensor is None or tensor not in numbers
            else name_axes(plan, find_result_axes(orders, numbers[tensor]))
            for path, tensor in outputs
        },
        constraints=tuple(
            Constraint(
                op=graph.ops[each.op].name,
                at=each.at,
                slot=each.slot,
                tensor=names[each.tensor],
                spec=name_axes(
                    plan, orders.lying(each.tensor) if each.at == "def" else orders.read(each.op, each.slot)
                ),
            )
            for each in relayouts(plan)
        ),
        broken=tuple((names[tensor], graph.ops[op].name) for tensor, op in orders.broken),
    )


def name_axes(plan: Plan, axes: Sequence[Sequence[int]]) -> Spec:
    """Return the axes of each dim by their names."""
    return tuple(tuple(plan.mesh.names[axis] for axis in each) for each in axes)


def find_result_axes(orders: AxisOrders, tensor: int) -> tuple[tuple[int, ...], ...]:
    """Return the axes of a tensor that the function returns.

    A tensor that replaces a state has the state's layout. Any other tensor has its own.
    """
    graph = orders.plan.graph
    keeps = next((use for use in graph.uses[tensor] if graph.ops[use.op].primitive == STATE), None)
    return orders.lying(tensor) if keeps is None else orders.lying(graph.ops[keeps.op].results[0])
