"""Cost of a planned training step by blocks of the model.

Equal layers are sharded alike, so a block's figures are the totals of all layers with that block, divided by their
number. A collective counts to the communication part named after the slowest of its axes. There are two exceptions,
which count to `ep`: collectives by which experts exchange tokens, and collectives along the part of dp over which
experts are distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.blocks.operator import OpKind
from costmodels.job.layer_change import PLANNED_BLOCKS
from costmodels.sharding.graph import CONSTANT, STATE, Graph, TensorKind
from costmodels.sharding.layouts import local_share, moves
from costmodels.sharding.plan import Plan, PlanCost, PlannedCollective
from costmodels.step.breakdown import EXPOSED_PARTS
from hardware.arrays import FloatArray

OUTSIDE = ("embedding", "head")
INSIDE = ("layers", "prediction")
"""First words of the names of operators that belong to a numbered layer or prediction module, and to a block of it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockFigures:
    """Seconds of one block and micro-batch.

    Attributes:
        blocks: Names of the blocks [B]: PLANNED_BLOCKS, and then others that the graph has.
        compute_s: Compute time of the forward and the backward pass [2, B] [s].
        exposed_s: Communication time by pass and EXPOSED_PARTS [2, 4, B] [s].
        once_s: Time of weight and gradient collectives, once a step [B] [s].
        kept_bytes: Activations that are kept for the backward pass [B] [bytes].
        entry_bytes: Input of a layer between two others, or of the last one [bytes].
    """

    blocks: tuple[str, ...]
    compute_s: FloatArray
    exposed_s: FloatArray
    once_s: FloatArray
    kept_bytes: FloatArray
    entry_bytes: float


def block_figures(plan: Plan, cost: PlanCost) -> BlockFigures:
    """Return the figures of a plan for a transformer graph, on axes named after parallel degrees.

    Operators that run several times a step count once.
    """
    graph, turn = plan.graph, plan.graph.first_backward
    assert turn is not None, f"{graph.name!r} must mark the start of its backward pass"
    names = [_block_of(op.name) for op in graph.ops]
    known = tuple(dict.fromkeys((*PLANNED_BLOCKS, *names)))
    blocks = [known.index(name) for name in names]
    compute_s = np.zeros((2, len(known)))
    exposed_s = np.zeros((2, len(EXPOSED_PARTS), len(known)))
    once_s = np.zeros(len(known))
    # The optimizer's update is left out: it runs once a step, not once a micro-batch.
    for number, (op, seconds) in enumerate(zip(graph.ops, cost.compute_s.tolist(), strict=True)):
        if not runs_once(graph, number):
            compute_s[int(number >= turn), blocks[number]] += seconds / op.times
    for each in cost.collectives:
        block = blocks[each.op]
        if is_synced(graph, each):
            once_s[block] += each.seconds * each.times
        else:
            # A collective may run less often than its operator, for example once after a loop.
            often = each.times / graph.ops[each.op].times
            part = EXPOSED_PARTS.index(_part_of(plan, each, known[block]))
            exposed_s[int(each.op >= turn), part, block] += often * each.seconds
    # equal layers are sharded alike, so that the mean is the figure of each
    layers = _times_of_blocks(graph, known)
    return BlockFigures(
        blocks=known,
        compute_s=compute_s / layers,
        exposed_s=exposed_s / layers,
        once_s=once_s / layers,
        kept_bytes=np.bincount(blocks, weights=kept_bytes(plan), minlength=len(known)) / layers,
        entry_bytes=_entry_bytes(plan),
    )


def kept_bytes(plan: Plan) -> FloatArray:
    """Return the activations of each forward operator that are kept for the backward pass [o] [bytes].

    A tensor is kept in its own layout if the backward pass reads it so, and in each other layout in which it reads it,
    except one that is a part of its own: a device takes its part anew.
    """
    graph, sizes, turn = plan.graph, plan.mesh.sizes, plan.graph.first_backward
    assert turn is not None, f"{graph.name!r} must mark the start of its backward pass"
    found = np.zeros(len(graph.ops))
    for tensor, array in enumerate(graph.tensors):
        maker, own = graph.maker[tensor][0], plan.layout(tensor)
        op = graph.ops[maker]
        if op.begins or maker >= turn or op.primitive == CONSTANT or array.kind is TensorKind.GRADIENT:
            continue
        if any(use.op >= turn and plan.wanted(use.op, use.operand) == own for use in graph.uses[tensor]):
            found[maker] += array.num_bytes * local_share(own, sizes)
        for copy in plan.copies(tensor):
            if copy.readers[-1] >= turn:
                is_slice = not moves(own, copy.layout, array.num_bytes, sizes)
                found[maker] += array.num_bytes * local_share(own if is_slice else copy.layout, sizes)
    return found


def _entry_bytes(plan: Plan) -> float:
    """Return the local size of the largest activation that the last layer reads from before it [bytes]."""
    graph, sizes = plan.graph, plan.mesh.sizes
    turn = graph.first_backward or len(graph.ops)
    layers = [_layer_of(op.name) for op in graph.ops]
    last = max((layer for layer in layers if layer is not None), default=None)
    return max(
        (
            graph.tensors[tensor].num_bytes * local_share(plan.layout(tensor), sizes)
            for number, op in enumerate(graph.ops[:turn])
            if layers[number] == last and not op.begins
            for tensor in op.operands
            if _is_activation(graph, tensor) and layers[graph.maker[tensor][0]] != last
        ),
        default=0.0,
    )


def _layer_of(name: str) -> int | None:
    """Return the number of the layer that an operator belongs to; None outside of layers."""
    place, *inside = name.split(".")
    return int(inside[0]) if place == "layers" else None


def _is_activation(graph: Graph, tensor: int) -> bool:
    """Return whether a tensor is computed from data in each micro-batch."""
    op = graph.ops[graph.maker[tensor][0]]
    return not op.begins and op.primitive != CONSTANT and graph.tensors[tensor].kind is TensorKind.ACTIVATION


def runs_once(graph: Graph, number: int) -> bool:
    """Return whether an operator belongs to the update.

    It reads optimizer states, stores an updated state, or adds up gradients of one parameter.
    """
    op = graph.ops[number]
    kinds = [graph.tensors[each].kind for each in op.operands]
    return (
        op.primitive == STATE
        or TensorKind.OPTIMIZER in kinds
        or (bool(kinds) and all(kind is TensorKind.GRADIENT for kind in kinds))
    )


def is_synced(graph: Graph, collective: PlannedCollective) -> bool:
    """Return whether a collective runs once a step: for gradients of parameters, or around the update."""
    return graph.tensors[collective.tensor].kind is TensorKind.GRADIENT or runs_once(graph, collective.op)


def ratios(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Divide element by element; return 1 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.ones_like(numerator), where=denominator > 0)


def _block_of(name: str) -> str:
    """Return the name of the block that an operator belongs to."""
    place, *inside = name.split(".")
    if place in INSIDE:
        return inside[1]
    return place if place in OUTSIDE else "embedding"


def _part_of(plan: Plan, collective: PlannedCollective, block: str) -> str:
    names = [plan.mesh.names[axis] for axis in collective.move.axes]
    if "dp" in names or (block.startswith("moe_mlp") and collective.move.kind == OpKind.ALL_TO_ALL):
        return "ep"
    return names[0]


def _times_of_blocks(graph: Graph, known: Sequence[str]) -> FloatArray:
    """Count how often layers and modules contain each block [B]; blocks outside of them count 1."""
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in known}
    for op in graph.ops:
        place, *inside = op.name.split(".")
        # of equal blocks in one layer, the second one's roles begin with a number
        again = inside[2] if place in INSIDE and len(inside) > 2 and inside[2].isdecimal() else ""
        found[_block_of(op.name)].add((f"{place}.{inside[0]}" if place in INSIDE else "", again))
    return np.array([max(len(found[name]), 1) for name in known], dtype=np.float64)
