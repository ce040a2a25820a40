"""What one layer of a planned training step takes and keeps, so that a few planned layers speak for many.

Layers that are equal are sharded equally: the figures are those of a layer between others, and of what stands before
the first layer and behind the last one. Operators belong to a layer by their names, `layers.N.`, and a collective to
the layer of the operator that needs it. What runs once a step, however many micro-batches there are, is told apart: the
updates, gradients that are added up for them, and parameters that are gathered behind them.

Memory of L layers is L times what each holds, and once what an operator needs beside that: the peak of the planned
layers less what they hold. Gradients of one micro-batch take the place of activations that are done with; those of
several are kept until the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from costmodels.sharding.graph import CONSTANT, STATE, Graph, TensorKind
from costmodels.sharding.layouts import local_share, moves
from costmodels.sharding.plan import Plan, PlanCost, PlannedCollective


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a part of the model takes, on one device.

    Attributes:
        forward_s: Of one micro-batch.
        backward_s: Of one micro-batch.
        once_s: Once a step, compute.
        synced_s: Once a step, collectives.
        state_bytes: What lives from step to step.
        gradient_bytes: Gradients of parameters as they are summed up, for one micro-batch.
        partial_gradient_bytes: The same before that, as several micro-batches keep them.
        kept_bytes: Activations of one micro-batch that the backward pass reads.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    once_s: float = 0.0
    synced_s: float = 0.0
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    partial_gradient_bytes: float = 0.0
    kept_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFigures:
    """A planned step by its layers.

    Attributes:
        layer: One layer.
        first: What stands before the first.
        last: What stands behind the last.
        entry_bytes: What a layer reads of the one before: all that is kept of one that is recomputed.
        working_bytes: What an operator needs for itself at the peak.
    """

    layer: Share
    first: Share
    last: Share
    entry_bytes: float
    working_bytes: float


def layer_figures(plan: Plan, cost: PlanCost, *, num_layers: int) -> LayerFigures:
    """The figures of a plan of at least three layers, of which the last but one stands for all.

    Args:
        plan: Of a training step of the transformer frontend.
        cost: What it costs.
        num_layers: How many it has.
    """
    assert num_layers >= 3, f"a layer between others needs three of them, but got {num_layers}"
    graph = plan.graph
    parts = [_part(op.name, num_layers - 2) for op in graph.ops]
    found: dict[str, dict[str, float]] = {
        part: {field.name: 0.0 for field in fields(Share)} for part in ("layer", "first", "last", "other")
    }
    _add_times(plan, cost, parts, found)
    _add_memory(plan, parts, found)
    held = sum(each["state_bytes"] + each["kept_bytes"] for each in found.values())
    shares = {part: Share(**values) for part, values in found.items() if part != "other"}
    return LayerFigures(
        layer=shares["layer"],
        first=shares["first"],
        last=shares["last"],
        entry_bytes=_entry_bytes(plan, num_layers - 2),
        working_bytes=max(cost.peak_memory_bytes - held, 0.0),
    )


def _part(name: str, layer: int) -> str:
    """Where an operator or a tensor belongs."""
    if name.startswith(f"layers.{layer}."):
        return "layer"
    if name.startswith("layers."):
        return "other"
    return "last" if name.startswith("head.") else "first"


def runs_once(graph: Graph, number: int) -> bool:
    """Whether an operator belongs to the update: it takes moments, or keeps what that makes."""
    op = graph.ops[number]
    return op.primitive == STATE or any(graph.tensors[each].kind is TensorKind.OPTIMIZER for each in op.operands)


def is_synced(graph: Graph, collective: PlannedCollective) -> bool:
    """Whether a collective runs once a step: of gradients of parameters, or around the update."""
    return graph.tensors[collective.tensor].kind is TensorKind.GRADIENT or runs_once(graph, collective.op)


def _add_times(plan: Plan, cost: PlanCost, parts: list[str], found: dict[str, dict[str, float]]) -> None:
    graph, turn = plan.graph, plan.graph.first_backward
    assert turn is not None, f"{graph.name!r} says where its backward pass begins"
    spent: Iterable[tuple[int, float, str]] = (
        *(
            (number, seconds, "once_s" if runs_once(graph, number) else "")
            for number, seconds in enumerate(cost.compute_s)
        ),
        *(
            (each.op, each.seconds * each.times, "synced_s" if is_synced(graph, each) else "")
            for each in cost.collectives
        ),
    )
    for number, seconds, once in spent:
        found[parts[number]][once or ("forward_s" if number < turn else "backward_s")] += float(seconds)


def _add_memory(plan: Plan, parts: list[str], found: dict[str, dict[str, float]]) -> None:
    graph, sizes, turn = plan.graph, plan.mesh.sizes, plan.graph.first_backward
    assert turn is not None, f"{graph.name!r} says where its backward pass begins"
    for tensor, array in enumerate(graph.tensors):
        maker, slot = graph.maker[tensor]
        own = found[parts[maker]]
        held_bytes = array.num_bytes * local_share(plan.layout(tensor), sizes)
        if graph.ops[maker].begins:
            own["state_bytes"] += held_bytes
        elif array.kind is TensorKind.GRADIENT:
            own["gradient_bytes"] += held_bytes
            own["partial_gradient_bytes"] += array.num_bytes * local_share(plan.written(maker, slot), sizes)
        elif maker < turn and graph.ops[maker].primitive != CONSTANT:
            if any(
                use.op >= turn and plan.wanted(use.op, use.operand) == plan.layout(tensor) for use in graph.uses[tensor]
            ):
                own["kept_bytes"] += held_bytes
            for copy in plan.copies(tensor):
                if copy.readers[-1] >= turn:
                    is_slice = not moves(plan.layout(tensor), copy.layout, array.num_bytes, sizes)
                    layout = plan.layout(tensor) if is_slice else copy.layout
                    own["kept_bytes"] += array.num_bytes * local_share(layout, sizes)


def _entry_bytes(plan: Plan, layer: int) -> float:
    """Of the tensor that the layer before leaves: what its norm reads."""
    graph = plan.graph
    op = next(op for op in graph.ops if op.name == f"layers.{layer}.attention.residual")
    entry = op.operands[0]
    return graph.tensors[entry].num_bytes * local_share(plan.layout(entry), plan.mesh.sizes)
