"""Vocabulary of a planner: the factors that it knows how to cut (ManuMatic, section 2.5, new split dimensions).

A framework may cut factors that the planner has not been told of, for example experts or the sequence. `restricted`
takes such factors out of a graph by blocking them, so that no planner can serve them there. A pin unblocks the factors
that it names, at the operators that it matches. It also unblocks them at operators that follow these because they do no
arithmetic of their own (norms, sums, activations, the way to experts), along the same dims of the tensors between them.
Products and attention that no pin names stay as the planner knows them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from costmodels.sharding.dims import FactorKind, Rule
from costmodels.sharding.graph import Graph
from tuner.planners.sharding.pins import Pin, match_pin

EXPERTS = frozenset({"experts"})
"""Factor of expert parallelism."""
SEQUENCE = frozenset({"sequence", "queries", "chunks"})
"""Factors of sequence and context parallelism, as the transformer frontend names them."""

_Place = tuple[int, int]
"""An operator and one of its factors."""


def restricted(graph: Graph, names: Collection[str], pins: Sequence[Pin] = ()) -> Graph:
    """Block factors of these names, except where pins name them.

    Args:
        graph: Graph of the training step.
        names: Names of the factors to block.
        pins: Pins of the user, which are matched in the graph as it is.

    Raises:
        ConfigError: a pin matches no operator, or names no dim of one or one that can't be cut.
    """
    given = {place for number, pin in enumerate(pins) for place in match_pin(number, pin, graph).items()}
    known = given | _followers(graph, names, given)
    rules: dict[tuple[int, frozenset[int]], Rule] = {}
    ops = []
    for number, op in enumerate(graph.ops):
        blocked = frozenset(
            factor
            for factor, each in enumerate(op.rule.factors)
            if each.name in names and (number, factor) not in known
        )
        if blocked:
            key = (id(op.rule), blocked)
            if key not in rules:
                rules[key] = _block(op.rule, blocked)
            op = replace(op, rule=rules[key])  # noqa: PLW2901 # the operator under its new rule
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _block(rule: Rule, factors: Collection[int]) -> Rule:
    """Return a rule in which some factors are blocked."""
    return replace(
        rule,
        factors=tuple(
            replace(factor, kind=FactorKind.BLOCKED) if number in factors else factor
            for number, factor in enumerate(rule.factors)
        ),
    )


def _followers(graph: Graph, names: Collection[str], given: Collection[_Place]) -> set[_Place]:
    """Find factors of those names that lie on the same dims as the given ones, at operators without arithmetic."""
    found: set[_Place] = set()
    waiting = list(given)
    while waiting:
        for other, factor in _find_coupled(graph, *waiting.pop()):
            op = graph.ops[other]
            if not op.precision and op.rule.factors[factor].name in names and (other, factor) not in found:
                found.add((other, factor))
                waiting.append((other, factor))
    return found


def _find_coupled(graph: Graph, number: int, factor: int) -> Iterator[_Place]:
    """Yield the factors of other operators that lie on the same dim of a tensor, the first of each dim."""
    op = graph.ops[number]
    for tensors, dims in ((op.operands, op.rule.operand_dims), (op.results, op.rule.result_dims)):
        for tensor, of_factor in zip(tensors, dims, strict=True):
            dim = of_factor[factor]
            if dim is None:
                continue
            maker, slot = graph.maker[tensor]
            places = [(maker, graph.ops[maker].rule.results[slot])]
            places += [(use.op, graph.ops[use.op].rule.operands[use.operand]) for use in graph.uses[tensor]]
            yield from ((other, place[dim][0]) for other, place in places if other != number and place[dim])
