"""Splits of the operators of a captured step: along which dim several devices can share the work of one.

A group of captured operators (`coarsening.py`) is shared by cutting one dim of all its tensors that have it, such as
the batch. Which dims are one is read off the rules of sharding, as TOAST's named dims are (`planners/toast`): the dims
of an operator that one factor of its rule runs over, and the dims of a tensor where it is written and read. Such a set
of factors is a colour. An operator without the colour, or with two of its factors, runs whole on each device.

    before      Each other device gets its part of what the group reads, or all of it where it reads all. Parameters and
                moments stay at home, and are sent like all else.
    meanwhile   Partial sums that the group itself reads are added up at home and sent back, and so are parts that it
                reads as a whole.
    after       Home gets the parts of what others read, and partial sums of it.

All this passes home's adapter: once for what all devices get and for sums, which travel in a ring, and once for each
other device for parts. Each time that they meet costs a latency more. Adding up takes no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from costmodels.sharding.dims import FactorKind
from costmodels.sharding.graph import STATE, Graph

Colour = Mapping[int, int]
"""Factor of each operator that is cut; all others run whole."""


class Sharing(NamedTuple):
    """A way to share a group among some devices.

    Attributes:
        colour: Factor of each operator that is cut.
        received_bytes: What each device but the home gets.
        exchanged_bytes: What passes the adapter of the home.
        meetings: Number of times that the devices exchange something.
    """

    colour: Colour
    received_bytes: float
    exchanged_bytes: float
    meetings: int


def sharings(graph: Graph, ops: Collection[int], parts: int, copied: frozenset[int]) -> Iterator[Sharing]:
    """Yield the ways to share a group among so many devices.

    Args:
        graph: Captured step.
        ops: Operators of the group.
        parts: Number of devices.
        copied: Tensors that every device computes for itself.
    """
    members = frozenset(ops)
    for colour in _colours(graph, members):
        cut = {op: factor for op, factor in colour.items() if graph.ops[op].rule.factors[factor].size % parts == 0}
        if cut:
            yield _sharing(graph, members, cut, parts, copied)


def _colours(graph: Graph, members: frozenset[int]) -> Iterator[Colour]:
    """Yield the sets of factors that the tensors inside a group connect, without operators that have two of them."""
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def find(name: tuple[int, int]) -> tuple[int, int]:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    for op in sorted(members):
        rule = graph.ops[op].rule
        for factor in rule.cuttable:
            find((op, factor))
        for operand, tensor in enumerate(graph.ops[op].operands):
            maker, slot = graph.maker[tensor]
            if maker not in members:
                continue
            written = graph.ops[maker].rule
            for made_dim, read_dim in zip(written.results[slot], rule.operands[operand], strict=True):
                sources = [factor for factor in made_dim if factor in written.cuttable]
                targets = [factor for factor in read_dim if factor in rule.cuttable]
                if sources and targets:
                    parent[find((op, targets[0]))] = find((maker, sources[0]))
    colours: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for op, factor in parent:
        colours[find((op, factor))][op].append(factor)
    for of_op in colours.values():
        yield {op: factors[0] for op, factors in of_op.items() if len(factors) == 1}


def _sharing(graph: Graph, members: frozenset[int], colour: Colour, parts: int, copied: frozenset[int]) -> Sharing:
    """Count the bytes and meetings of a group that is cut along a colour."""
    received = exchanged = 0.0
    begins = ends = False
    meetings = 0
    for tensor in sorted({one for op in members for one in (*graph.ops[op].operands, *graph.ops[op].results)} - copied):
        size = graph.tensors[tensor].num_bytes
        split_bytes = size / parts * (parts - 1)  # of all parts but one
        maker, slot = graph.maker[tensor]
        uses = graph.uses[tensor]
        inner = [use for use in uses if use.op in members and graph.ops[use.op].primitive != STATE]
        inside = {_read_dim(graph, colour, use.op, use.operand) for use in inner}
        reads_parts = len(inside) == 1 and None not in inside  # the same ones everywhere, or else all of it is sent
        own, factor = graph.ops[maker].rule, colour.get(maker)
        is_outer = maker not in members or graph.ops[maker].begins
        is_partial = not is_outer and factor is not None and own.factors[factor].kind is FactorKind.REDUCTION
        made = None if is_outer or factor is None or is_partial else own.result_dims[slot][factor]
        meets = bool(inside) and (is_partial or (made is not None and inside != {made}))
        leaves = not is_outer and (len(inner) < len(uses) or not uses)
        if inside and (is_outer or meets):
            received += size / parts if reads_parts else size
            exchanged += split_bytes if reads_parts else size
            begins |= is_outer
            meetings += meets
        if meets or leaves:
            returned = size if is_partial else split_bytes if made is not None else 0.0
            exchanged += returned
            ends |= leaves and returned > 0
    return Sharing(colour, received, exchanged, meetings + begins + ends)


def _read_dim(graph: Graph, colour: Colour, op: int, operand: int) -> int | None:
    """Return the dim of an operand that an operator reads a part of; None if it reads all."""
    factor = colour.get(op)
    return None if factor is None else graph.ops[op].rule.operand_dims[operand][factor]
