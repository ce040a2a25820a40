"""A plan as torch's DTensor placements: one per dim of the device mesh, of every tensor that lies or is moved.

The mesh is the plan's, axis by axis, and so are the placements: `Shard(d)` cuts dim d, `Replicate()` is all the same,
and `Partial()` parts of a sum. Where two axes cut one dim, DTensor deals contiguous parts with the mesh's earlier axis
as the major one, and has no other order; `broken` names where that order makes it move more than the plan says
(`axis_order` says why), so that a redistribution there is right, but dearer.

Source: torch.distributed.tensor (2.13), placement types and `distribute_tensor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from costmodels.sharding.exports.relayouts import At, relayouts
from costmodels.sharding.graph import INPUT, STATE
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout
from costmodels.sharding.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Redistribution:
    """Where a layout changes: `tensor.redistribute(placements=after)`.

    Attributes:
        op: The operator that writes partial sums (`def`), or reads the tensor otherwise than it lies (`use`).
        at: Which of both.
        slot: Which of its results, or operands.
        tensor: What changes.
        before: Its placements, as DTensor's constructors.
        after: What they become.
    """

    op: str
    at: At
    slot: int
    tensor: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchPlacements:
    """A plan for DTensor.

    Attributes:
        mesh: Names and sizes of the mesh's dims, for `init_device_mesh`.
        arguments: Placements of what the step begins with: parameters, moments and data.
        redistributions: Where layouts change, in the order of the operators.
        broken: Tensors and operators between which DTensor moves more than the plan says.
    """

    mesh: dict[str, int]
    arguments: dict[str, tuple[str, ...]]
    redistributions: tuple[Redistribution, ...]
    broken: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """As the command writes it; docs/sharding-plans.md tells the form."""
        return {
            "format": "torch",
            "mesh": self.mesh,
            "arguments": {name: list(placements) for name, placements in self.arguments.items()},
            "redistributions": [
                {
                    "op": each.op,
                    "at": each.at,
                    "slot": each.slot,
                    "tensor": each.tensor,
                    "from": list(each.before),
                    "to": list(each.after),
                }
                for each in self.redistributions
            ],
        }


def torch_placements(plan: Plan) -> TorchPlacements:
    """The placements of a plan."""
    graph = plan.graph
    names = [tensor.name for tensor in graph.tensors]
    moved = relayouts(plan)
    return TorchPlacements(
        mesh=dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        arguments={
            op.name: placements_of(plan.layout(op.results[0])) for op in graph.ops if op.primitive in (STATE, INPUT)
        },
        redistributions=tuple(
            Redistribution(
                op=graph.ops[each.op].name,
                at=each.at,
                slot=each.slot,
                tensor=names[each.tensor],
                before=placements_of(each.before),
                after=placements_of(each.after),
            )
            for each in moved
        ),
        broken=tuple(
            (names[each.tensor], graph.ops[each.op].name)
            for each in moved
            if not keeps_leading_axes(each.before, each.after, len(graph.tensors[each.tensor].shape))
        ),
    )


def placements_of(layout: Layout) -> tuple[str, ...]:
    """A layout, axis by axis."""
    known = {REPLICATED: "Replicate()", PARTIAL: "Partial()"}
    return tuple(known[dim] if dim < 0 else f"Shard({dim})" for dim in layout)


def keeps_leading_axes(before: Layout, after: Layout, rank: int) -> bool:
    """Whether the axes that stay on a dim are, on both sides, the first in the mesh's order that cut it."""
    for dim in range(rank):
        one, other = ([axis for axis, cut in enumerate(layout) if cut == dim] for layout in (before, after))
        count = len(set(one) & set(other))
        if one[:count] != other[:count]:
            return False
    return True
