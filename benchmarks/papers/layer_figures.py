"""Cost and memory of one layer of a planned training step, from which the figures of many layers are extrapolated.

Equal layers are sharded equally. The figures are those of one layer between two others, of everything before the first
layer, and of everything behind the last layer. The operator's name (`layers.N.`) says to which layer it belongs, and a
collective belongs to the layer of the operator that needs it. Work that runs once a step, however many micro-batches
there are, is kept apart: the updates, the summation of gradients for them, and the gathering of parameters after them.

L layers take L times the memory of one layer, plus the working memory of one operator: the peak of the planned layers
less the memory that they keep. Gradients of a single micro-batch replace activations that are no longer needed.
Gradients of several micro-batches are kept until the last one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from costmodels.sharding.block_figures import is_synced, kept_bytes, runs_once
from costmodels.sharding.graph import TensorKind
from costmodels.sharding.layouts import local_share
from costmodels.sharding.plan import Plan, PlanCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Time and memory of one part of the model on one device.

    Attributes:
        forward_s: Time of one micro-batch's forward pass [s].
        backward_s: Time of one micro-batch's backward pass [s].
        once_s: Compute time once a step [s].
        synced_s: Time of collectives once a step [s].
        state_bytes: Memory of parameters and optimizer states, which live from step to step [bytes].
        gradient_bytes: Memory of parameter gradients after summation over devices, for one micro-batch [bytes].
        partial_gradient_bytes: Memory of parameter gradients before that summation, as several micro-batches accumulate
            them [bytes].
        kept_bytes: Memory of activations that one micro-batch keeps for the backward pass [bytes].
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
    """Figures of a planned step by layers.

    Attributes:
        layer: Figures of one layer between two others.
        first: Figures of everything before the first layer.
        last: Figures of everything behind the last layer.
        entry_bytes: Memory of a layer's input: all that is kept of a recomputed layer [bytes].
        working_bytes: Memory that an operator needs temporarily at the peak [bytes].
    """

    layer: Share
    first: Share
    last: Share
    entry_bytes: float
    working_bytes: float


def layer_figures(plan: Plan, cost: PlanCost, *, num_layers: int) -> LayerFigures:
    """Return the figures of a plan with at least three layers, from the last layer but one.

    Args:
        plan: Plan of a transformer graph.
        cost: Cost of that plan.
        num_layers: Number of layers in the graph.
    """
    assert num_layers >= 3, f"num_layers must be at least 3, but got {num_layers}"
    graph = plan.graph
    parts = [_find_part(op.name, num_layers - 2) for op in graph.ops]
    # Part "other" collects the remaining layers; it counts only for the memory that is held at the peak.
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


def _find_part(name: str, layer: int) -> str:
    """Return the part of the model that an operator belongs to."""
    if name.startswith(f"layers.{layer}."):
        return "layer"
    if name.startswith("layers."):
        return "other"
    return "last" if name.startswith("head.") else "first"


def _add_times(plan: Plan, cost: PlanCost, parts: list[str], found: dict[str, dict[str, float]]) -> None:
    """Add the time of every operator and collective to its part of the model."""
    graph, turn = plan.graph, plan.graph.first_backward
    assert turn is not None, f"{graph.name!r} must mark the start of its backward pass"
    # Compute and collectives have one form here: operator, seconds of all executions, and the field for work once a
    # step.
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
    """Add the memory of every tensor to the part of the model that writes it."""
    graph, sizes = plan.graph, plan.mesh.sizes
    for number, kept in enumerate(kept_bytes(plan).tolist()):
        found[parts[number]]["kept_bytes"] += kept
    for tensor, array in enumerate(graph.tensors):
        maker, slot = graph.maker[tensor]
        own = found[parts[maker]]
        held_bytes = array.num_bytes * local_share(plan.layout(tensor), sizes)
        if graph.ops[maker].begins:
            # Parameters, moments and data of the step.
            own["state_bytes"] += held_bytes
        elif array.kind is TensorKind.GRADIENT:
            # Gradients of parameters; those of activations are short-lived and have another kind.
            own["gradient_bytes"] += held_bytes
            own["partial_gradient_bytes"] += array.num_bytes * local_share(plan.written(maker, slot), sizes)


def _entry_bytes(plan: Plan, layer: int) -> float:
    """Return the local size of a layer's input, the tensor that its residual connection reads [bytes]."""
    graph = plan.graph
    op = next(op for op in graph.ops if op.name == f"layers.{layer}.attention.residual")
    entry = op.operands[0]
    return graph.tensors[entry].num_bytes * local_share(plan.layout(entry), plan.mesh.sizes)
