"""Plans of a forward pass, and the training step that follows from one.

D-Rec in MindSpore plans the forward graph, and so do people who write a plan by hand. The rest follows from it. A
gradient takes the factors of its operator, a parameter lies as its first reader wants it, and the update with its
moments lies as the parameter. ZeRO then cuts the update, and from stage 3 on the parameters, by the axes that are still
free (Rajbhandari et al. 2020, section 5). In MindSpore this is the parallel optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from costmodels.sharding.graph import CONSTANT, STATE, Graph, Op, Tensor, TensorKind
from costmodels.sharding.layouts import REPLICATED
from costmodels.sharding.plan import NONE, Plan, wanted_layout, written_layout
from hardware.arrays import IntArray


def forward_of(graph: Graph) -> Graph:
    """Return the forward pass of a step, with parameters as constants, which lie as their readers want them."""
    assert graph.first_backward is not None, f"{graph.name!r} says where its backward pass begins"
    # Sources that only the optimizer reads are left out, and tensors are numbered anew.
    body = [op for op in graph.ops[: graph.first_backward] if not op.is_source]
    read = {tensor for op in body for tensor in op.operands}
    sources = [op for op in graph.ops if op.is_source and read.intersection(op.results)]
    kept = [tensor for op in (*sources, *body) for tensor in op.results]
    number = {tensor: at for at, tensor in enumerate(kept)}
    ops = []
    for op in (*sources, *body):
        if op.primitive == STATE:
            op = replace(  # noqa: PLW2901 # the parameter as a constant
                op, primitive=CONSTANT, operands=(), rule=replace(op.rule, operands=())
            )
        ops.append(
            replace(
                op,
                operands=tuple(number[tensor] for tensor in op.operands),
                results=tuple(number[tensor] for tensor in op.results),
            )
        )
    return Graph(name=graph.name, tensors=tuple(graph.tensors[tensor] for tensor in kept), ops=tuple(ops))


def with_backward(graph: Graph, forward: Plan, *, zero_stage: int = 1) -> Plan:
    """Extend a plan of the forward pass to the whole training step.

    Args:
        graph: Graph of the training step.
        forward: Plan of `forward_of` that graph, possibly with further factors blocked.
        zero_stage: Stage of ZeRO: 0, 1 or 3.
    """
    mesh = forward.mesh
    rows: dict[str, list[int]] = dict(zip((op.name for op in forward.graph.ops), forward.served.tolist(), strict=True))
    leaders = {op.name: _Leader(op, rows[op.name]) for op in forward.graph.ops}
    served = np.full((len(graph.ops), len(mesh.sizes)), NONE, dtype=np.int64)
    assert graph.first_backward is not None, f"{graph.name!r} says where its backward pass begins"
    for number, op in enumerate(graph.ops[: graph.first_backward]):
        if op.primitive != STATE:
            served[number] = rows[op.name]
    updates = {
        _place_parameter(graph, served, tensor, mesh.sizes, zero_stage)
        for tensor, array in enumerate(graph.tensors)
        if array.kind is TensorKind.PARAMETER and graph.ops[graph.maker[tensor][0]].primitive == STATE
    }
    # Backward operators are visited in order, since each may follow the cuts of its operands.
    for number in range(graph.first_backward, len(graph.ops)):
        if number not in updates:
            served[number] = _follow_forward(graph, served, number, leaders, mesh.sizes)
    return Plan(graph=graph, mesh=mesh, served=served)


def _place_parameter(graph: Graph, served: IntArray, tensor: int, sizes: Sequence[int], zero_stage: int) -> int:
    """Place a parameter, its moments and its update, and return the number of the update."""
    first = graph.uses[tensor][0]
    wanted = list(wanted_layout(graph.ops[first.op].rule, first.operand, served[first.op].tolist()))
    # ZeRO 1 spreads moments and the update over the free axes; ZeRO 3 also spreads the parameter.
    spread = _spread(graph.tensors[tensor], wanted, sizes) if zero_stage >= 1 else wanted
    state = graph.maker[tensor][0]
    served[state] = spread if zero_stage >= 3 else wanted
    update, _ = graph.maker[graph.ops[state].operands[0]]
    rule = graph.ops[update].rule
    served[update] = [NONE if dim == REPLICATED else rule.results[0][dim][0] for dim in spread]
    # Other states that the update reads are the moments.
    for operand in graph.ops[update].operands:
        maker = graph.maker[operand][0]
        if graph.ops[maker].primitive == STATE and maker != state:
            served[maker] = spread
    return update


def _spread(tensor: Tensor, layout: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return a layout in which every free axis cuts the first dim that it divides."""
    left = list(tensor.shape)
    for dim, size in zip(layout, sizes, strict=True):
        if dim != REPLICATED:
            left[dim] //= size
    found = list(layout)
    for axis, size in enumerate(sizes):
        able = [dim for dim, count in enumerate(left) if count % size == 0]
        if layout[axis] == REPLICATED and able:
            found[axis] = able[0]
            left[able[0]] //= size
    return found


class _Leader:
    """An operator of the forward pass that its gradients follow.

    Attributes:
        known: Names of the operator's factors.
        served: Name of the factor that each axis serves; None for an axis that serves none.
    """

    def __init__(self, op: Op, row: Sequence[int]) -> None:
        self.known = {factor.name for factor in op.rule.factors}
        self.served = [None if factor == NONE else op.rule.factors[factor].name for factor in row]


def _follow_forward(
    graph: Graph, served: IntArray, number: int, leaders: Mapping[str, _Leader], sizes: Sequence[int]
) -> list[int]:
    """Return the factors of a backward operator: those of its forward operator.

    Where one of the two does not have the factor, the cuts of the operands decide.
    """
    op = graph.ops[number]
    own = {factor.name: at for at, factor in enumerate(op.rule.factors) if at in op.rule.cuttable}
    leader = leaders[_find_leader(op.name, leaders)]
    found = [NONE] * len(sizes)
    ways = [1] * len(op.rule.factors)
    for axis, name in enumerate(leader.served):
        # An axis without a factor in the forward operator may still cut a factor that only the backward operator has.
        cut = _factors_cut(graph, served, number, axis)
        if name is None:
            choices = [factor for factor in cut if op.rule.factors[factor].name not in leader.known]
        else:
            choices = [own[name]] if name in own else cut
        for factor in choices:
            if op.rule.factors[factor].size % (ways[factor] * sizes[axis]) == 0:
                found[axis] = factor
                ways[factor] *= sizes[axis]
                break
    return found


def _find_leader(name: str, leaders: Mapping[str, _Leader]) -> str:
    """Return the name of the forward operator with which an operator's name begins."""
    while name not in leaders:
        assert "." in name, "a gradient is called after an operator of the forward pass"
        name = name.rpartition(".")[0]
    return name


def _factors_cut(graph: Graph, served: IntArray, number: int, axis: int) -> list[int]:
    """Return the factors that an axis cuts in an operator's operands and can cut in the operator, too."""
    op = graph.ops[number]
    found = []
    for slot, tensor in enumerate(op.operands):
        maker, result = graph.maker[tensor]
        dim = written_layout(graph.ops[maker].rule, result, served[maker].tolist())[axis]
        place = op.rule.operands[slot]
        if dim >= 0 and place[dim] and place[dim][0] in op.rule.cuttable:
            found.append(place[dim][0])
    return found
