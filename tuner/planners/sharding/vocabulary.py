"""A planner's vocabulary: the factors that it knows how to cut (ManuMatic section 2.5, new split dimensions).

A framework may cut more than the planner has been told of: experts, or the sequence. `restricted` takes such factors
out of a graph by blocking them, so that no planner can serve them there. A pin puts its own back where it names them:
at the operators that it matches, and at those that follow these because they do no arithmetic of their own (norms,
sums, activations, the way to experts), as far as the same dim of the tensors between them leads. Products and
attention that no pin names stay as the planner knows them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from costmodels.sharding.dims import FactorKind, Rule
from costmodels.sharding.graph import Graph
from tuner.planners.sharding.pins import Pin, matched

EXPERTS = frozenset({"experts"})
"""The factor of expert parallelism."""
SEQUENCE = frozenset({"sequence", "queries", "chunks"})
"""Those of sequence and context parallelism, as the transformer frontend calls them."""

_Place = tuple[int, int]
"""An operator and a factor of it."""


def restricted(graph: Graph, names: Collection[str], pins: Sequence[Pin] = ()) -> Graph:
    """The same graph for a planner that does not know factors of these names, but where pins put them back.

    Args:
        graph: What is planned.
        names: Of factors.
        pins: What a user asks for; found in the graph as it is.

    Raises:
        ConfigError: a pin matches no operator, or names no dim of one or one that can't be cut.
    """
    given = {place for number, pin in enumerate(pins) for place in matched(number, pin, graph).items()}
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
                rules[key] = _blocked(op.rule, blocked)
            op = replace(op, rule=rules[key])  # noqa: PLW2901 # the operator under its new rule
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _blocked(rule: Rule, factors: Collection[int]) -> Rule:
    return replace(
        rule,
        factors=tuple(
            replace(factor, kind=FactorKind.BLOCKED) if number in factors else factor
            for number, factor in enumerate(rule.factors)
        ),
    )


def _followers(graph: Graph, names: Collection[str], given: Collection[_Place]) -> set[_Place]:
    """Factors of those names that lie on the same dims as the given ones, at operators without arithmetic."""
    found: set[_Place] = set()
    waiting = list(given)
    while waiting:
        for other, factor in _coupled(graph, *waiting.pop()):
            op = graph.ops[other]
            if not op.precision and op.rule.factors[factor].name in names and (other, factor) not in found:
                found.add((other, factor))
                waiting.append((other, factor))
    return found


def _coupled(graph: Graph, number: int, factor: int) -> Iterator[_Place]:
    """The factors of other operators that lie on the same dim of a tensor, the first of each dim."""
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
