"""Several micro-batches of one optimizer step, as times of the operators of a graph.

Every operator of the forward and the backward pass runs once for each micro-batch. The update runs once a step, and so
does what adds up the gradients of a parameter with several readers. A gradient that only such operators read is added
up on each device by itself, and over the devices once a step (`Graph.sums`).
"""

from __future__ import annotations

from dataclasses import replace

from costmodels.sharding.block_figures import runs_once
from costmodels.sharding.graph import Graph


def repeat_micro_batches(graph: Graph, num_micro_batches: int) -> Graph:
    """Return the graph of a step of several micro-batches from that of a step of one."""
    if num_micro_batches == 1:
        return graph
    ops = tuple(
        op if runs_once(graph, number) else replace(op, times=op.times * num_micro_batches)
        for number, op in enumerate(graph.ops)
    )
    return replace(graph, ops=ops)


def count_micro_batches(graph: Graph) -> int:
    """Return the number of micro-batches of a graph of the transformer frontend, whose only loop they are."""
    return max(op.times for op in graph.ops)


def accumulated(graph: Graph) -> tuple[int, ...]:
    """Return the tensors that are added up over the micro-batches: what these write, and the update alone reads."""
    return tuple(
        tensor
        for tensor, (maker, _) in enumerate(graph.maker)
        if graph.uses[tensor] and max(use.times for use in graph.uses[tensor]) < graph.ops[maker].times
    )
