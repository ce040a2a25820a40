"""Export of a plan as torch's DTensor placements: one per mesh dim, for every argument and every layout change.

The device mesh has the plan's axes, in their order, and so do the placements. `Shard(d)` partitions dim d,
`Replicate()` holds the same data everywhere, and `Partial()` holds parts of a sum. If two axes partition one dim,
DTensor deals contiguous parts with the earlier mesh axis as the major one; it has no other order. `broken` lists the
places where this order sends other bytes than the plan says (`axis_order` gives the reasons). A change there is
correct, but more expensive; DTensor's own `redistribute` is so more often.

Source: torch.distributed.tensor (2.13), placement types and `distribute_tensor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from costmodels.sharding.exports.layout_changes import sends_as_planned
from costmodels.sharding.exports.relayouts import At, relayouts
from costmodels.sharding.graph import INPUT, STATE
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout
from costmodels.sharding.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Redistribution:
    """A layout change, `tensor.redistribute(placements=after)`.

    Attributes:
        op: Name of the operator that writes partial sums (`def`), or that reads the tensor in another layout (`use`).
        at: Side of the change: `def` or `use`.
        slot: Index of the tensor among the operator's results (`def`) or operands (`use`).
        tensor: Name of the tensor.
        before: Placements before the change, as DTensor's constructors.
        after: Placements after the change, as DTensor's constructors.
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
        arguments: Placements of the step's arguments: parameters, moments and data.
        redistributions: Layout changes, in the order of the operators.
        broken: Pairs (tensor, operator) between which contiguous parts move other data than the plan says.
    """

    mesh: dict[str, int]
    arguments: dict[str, tuple[str, ...]]
    redistributions: tuple[Redistribution, ...]
    broken: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the exported file; docs/sharding-plans.md describes the format."""
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
    """Return the DTensor placements of a plan."""
    graph = plan.graph
    names = [tensor.name for tensor in graph.tensors]
    # DTensor needs a redistribution exactly where the plan changes a layout.
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
            if not sends_as_planned(each.before, each.after, graph.tensors[each.tensor].shape, plan.mesh.sizes)
        ),
    )


def placements_of(layout: Layout) -> tuple[str, ...]:
    """Return a layout as DTensor's constructors, one per axis."""
    known = {REPLICATED: "Replicate()", PARTIAL: "Partial()"}
    return tuple(known[dim] if dim < 0 else f"Shard({dim})" for dim in layout)
