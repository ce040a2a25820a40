"""The array IR: tensors, operators with their rules, and the graph of one training step that planners shard.

A graph is the steady state of a loop. What lives from step to step, a parameter or a moment of the optimizer, is the
result of an operator `state` that stands first and whose operand is what the step makes of it: that both must be
sharded alike, or moved once a step, is an edge as any other. Data of the step come from operators `input`, constants
that any device can make for itself (masks, positions) from operators `constant`.

All else runs in the order of the graph. An operator may stand for several equal executions, as the body of a loop does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property

from costmodels.sharding.dims import Factor, FactorKind, Rule

STATE, INPUT, CONSTANT = "state", "input", "constant"
SOURCES = (STATE, INPUT, CONSTANT)
"""Primitives that make a tensor out of nothing that the step has computed before."""

CARRY, NEXT, STACK, UNSTACK = "carry", "next", "stack", "unstack"
LOOP = (CARRY, NEXT, STACK, UNSTACK)
"""Primitives by which values pass into a loop, from one iteration to the next, and out of it; they do nothing."""


class TensorKind(StrEnum):
    """What a tensor is for, as memory is told apart."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    DATA = "data"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """An array of the step, whole.

    Attributes:
        name: Unique in its graph.
        shape: Its dims; empty for a scalar.
        element_bytes: Bytes of one element.
        kind: What it is for.
        dim_names: What its dims are called, where somebody named them; empty otherwise.
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: float
    kind: TensorKind
    dim_names: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> float:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operator of the step.

    Attributes:
        name: Unique in its graph, for example `layers.0.mlp.up`.
        primitive: What it computes.
        operands: Numbers of the tensors that it reads.
        results: Numbers of the tensors that it writes.
        rule: Its iteration space.
        flop: Floating-point operations of one execution, whole.
        times: Executions in a step.
        precision: Type of its arithmetic; empty for what moves data only.
    """

    name: str
    primitive: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule
    flop: float = 0.0
    times: int = 1
    precision: str = ""

    @property
    def is_source(self) -> bool:
        """Whether it makes a tensor out of nothing."""
        return self.primitive in SOURCES

    @property
    def begins(self) -> bool:
        """Whether it stands at the begin of the step; a constant is made where it is first wanted."""
        return self.primitive in (STATE, INPUT)

    @property
    def is_free(self) -> bool:
        """Whether a device has nothing to do for it."""
        return self.primitive in SOURCES or self.primitive in LOOP


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A tensor where an operator reads it.

    Attributes:
        op: Number of the operator.
        operand: Which of its operands.
        times: How often that is in a step.
        is_back: Whether the operator stands before the one that writes the tensor: a state, or the begin of a loop,
            takes it over for what comes next.
    """

    op: int
    operand: int
    times: int = 1
    is_back: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """One training step.

    Attributes:
        name: What it is called.
        tensors: Every array.
        ops: Every operator, in an order in which they can run.
        unknown: How often each primitive occurs that no rule is known for; all dims of these are blocked.
        first_backward: Number of the first operator of the backward pass; None where nobody said.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    unknown: tuple[tuple[str, int], ...] = ()
    first_backward: int | None = None

    @cached_property
    def maker(self) -> tuple[tuple[int, int], ...]:
        """Of each tensor the operator that writes it, and which of its results it is."""
        found = {tensor: (number, slot) for number, op in enumerate(self.ops) for slot, tensor in enumerate(op.results)}
        return tuple(found[tensor] for tensor in range(len(self.tensors)))

    @cached_property
    def uses(self) -> tuple[tuple[Use, ...], ...]:
        """Of each tensor where it is read, in the order of the operators."""
        found: list[list[Use]] = [[] for _ in self.tensors]
        for number, op in enumerate(self.ops):
            for slot, tensor in enumerate(op.operands):
                maker, _ = self.maker[tensor]
                times = self.ops[maker].times if op.primitive == CARRY and slot else op.times
                found[tensor].append(Use(op=number, operand=slot, times=times, is_back=number < maker))
        return tuple(map(tuple, found))

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """How often partial sums of each tensor are added up: as it is written, or read if that is less often.

        Gradients of several micro-batches are summed up where they stand until the update reads them.
        """
        return tuple(
            min(self.ops[maker].times, max((use.times for use in uses), default=self.ops[maker].times))
            for (maker, _), uses in zip(self.maker, self.uses, strict=True)
        )


@dataclass(kw_only=True)
class GraphBuilder:
    """A graph under construction; tensors are named by their numbers.

    Attributes:
        name: Of the graph.
        tensors: Those so far.
        ops: Those so far.
        unknown: See Graph.
    """

    name: str
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)
    _num_forward: int | None = None
    _states: dict[int, int] = field(default_factory=dict)
    _carries: dict[int, int] = field(default_factory=dict)
    _tensor_names: set[str] = field(default_factory=set)
    _op_names: set[str] = field(default_factory=set)

    def tensor(
        self, name: str, shape: Sequence[int], element_bytes: float, kind: TensorKind, dim_names: Sequence[str] = ()
    ) -> int:
        """Adds a tensor that some operator will write; returns its number."""
        assert name not in self._tensor_names, f"{name!r} is a tensor already"
        assert not dim_names or len(dim_names) == len(shape), f"{name!r} has a name for each dim or for none"
        self._tensor_names.add(name)
        self.tensors.append(
            Tensor(name=name, shape=tuple(shape), element_bytes=element_bytes, kind=kind, dim_names=tuple(dim_names))
        )
        return len(self.tensors) - 1

    def source(
        self,
        primitive: str,
        name: str,
        shape: Sequence[int],
        element_bytes: float,
        kind: TensorKind,
        dim_names: Sequence[str] = (),
    ) -> int:
        """Adds an operator that makes a tensor of the same name at the begin of the step; returns the tensor.

        Each of its dims is a factor of its own. A state is read by nobody before `keep` says what the step makes of it.
        """
        assert primitive in SOURCES, f"{primitive!r} is no source"
        tensor = self.tensor(name, shape, element_bytes, kind, dim_names)
        names = dim_names or [""] * len(shape)
        rule = _source_rule(tuple(shape), tuple(names), num_operands=0)
        self._add(Op(name=name, primitive=primitive, operands=(), results=(tensor,), rule=rule))
        if primitive == STATE:
            self._states[tensor] = len(self.ops) - 1
        return tensor

    def keep(self, state: int, made: int) -> None:
        """Says what the step makes of a state, a tensor of its shape; without it the state stays as it is."""
        number = self._states.pop(state)
        op = self.ops[number]
        assert self.tensors[made].shape == self.tensors[state].shape, f"{op.name!r} keeps its shape from step to step"
        self.ops[number] = Op(
            name=op.name,
            primitive=op.primitive,
            operands=(made,),
            results=op.results,
            rule=_source_rule(
                self.tensors[state].shape, tuple(factor.name for factor in op.rule.factors), num_operands=1
            ),
        )

    def carry_on(self, carried: int, made: int, rule: Rule) -> None:
        """Says what an iteration hands on to the next in place of what a `carry` has given it.

        Args:
            carried: What the carry writes.
            made: What the iteration makes of it.
            rule: Of the carry with both operands, the first iteration's and the others'.
        """
        number = self._carries.pop(carried)
        self.ops[number] = replace(self.ops[number], operands=(*self.ops[number].operands, made), rule=rule)

    def op(
        self,
        name: str,
        primitive: str,
        operands: Sequence[int],
        results: Sequence[int],
        rule: Rule,
        *,
        flop: float = 0.0,
        times: int = 1,
        precision: str = "",
    ) -> None:
        """Adds an operator; its rule must give the shapes that its tensors have."""
        places = [
            *map(rule.operand_shape, range(len(rule.operands))),
            *map(rule.result_shape, range(len(rule.results))),
        ]
        shapes = [self.tensors[tensor].shape for tensor in (*operands, *results)]
        assert places == shapes, f"the rule of {name!r} is about {places}, its tensors are {shapes}"
        if primitive == CARRY:
            self._carries[results[0]] = len(self.ops)
        self._add(
            Op(
                name=name,
                primitive=primitive,
                operands=tuple(operands),
                results=tuple(results),
                rule=rule,
                flop=flop,
                times=times,
                precision=precision,
            )
        )

    def begin_backward(self) -> None:
        """Says that the forward pass is written down, and the backward pass follows."""
        self._num_forward = sum(not op.begins for op in self.ops)

    def done(self) -> Graph:
        """The graph; states and inputs stand before all other operators, wherever they were added."""
        num_sources = sum(op.begins for op in self.ops)
        graph = Graph(
            name=self.name,
            tensors=tuple(self.tensors),
            ops=tuple(sorted(self.ops, key=lambda op: not op.begins)),
            unknown=tuple(sorted(self.unknown.items())),
            first_backward=None if self._num_forward is None else num_sources + self._num_forward,
        )
        _check(graph)
        return graph

    def _add(self, op: Op) -> None:
        assert op.name not in self._op_names, f"{op.name!r} is an operator already"
        self._op_names.add(op.name)
        self.ops.append(op)


@cache
def _source_rule(shape: tuple[int, ...], names: tuple[str, ...], *, num_operands: int) -> Rule:
    """Every dim is a factor; sources of one shape share the rule and what is known of it."""
    place = tuple((dim,) for dim in range(len(shape)))
    return Rule(
        factors=tuple(
            Factor(size=size, kind=FactorKind.MAP, name=name) for size, name in zip(shape, names, strict=True)
        ),
        operands=(place,) * num_operands,
        results=(place,),
    )


def _check(graph: Graph) -> None:
    """Every tensor is written once, and before it is read but by a state or a loop's begin."""
    written: set[int] = set()
    for op in graph.ops:
        read = () if op.primitive == STATE else op.operands[:1] if op.primitive == CARRY else op.operands
        late = [tensor for tensor in read if tensor not in written]
        assert not late, f"{op.name!r} reads {graph.tensors[late[0]].name!r} before it is written"
        for tensor in op.results:
            assert tensor not in written, f"{graph.tensors[tensor].name!r} is written twice"
            written.add(tensor)
    assert len(written) == len(graph.tensors), "somebody writes every tensor"
