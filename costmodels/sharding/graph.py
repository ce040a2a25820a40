"""Array IR: tensors, operators with their sharding rules, and the graph of one training step that planners shard.

A graph is the steady state of the training loop. A parameter or an optimizer moment lives from step to step. It is the
result of a `state` operator at the start of the graph, and the operand of that operator is the updated value at the end
of the step. The edge between both says, like any other edge, that they must be sharded alike or moved once a step.
Operators `input` provide the data of a step. Operators `constant` provide values that every device can compute for
itself, such as masks and positions.

All other operators run in the order of the graph. An operator may stand for several equal executions, for example the
body of a loop.
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
"""Primitives that provide a tensor without reading an earlier result of the step."""

CARRY, NEXT, STACK, UNSTACK = "carry", "next", "loop_stack", "loop_unstack"
MERGE = "merge"
PASSING = (CARRY, NEXT, STACK, UNSTACK, MERGE)
"""Primitives that pass values into a loop, between iterations and out of it, or out of branches."""


class FusionKind(StrEnum):
    """Way in which a compiler can fuse an operator with others (`fusion.py`)."""

    NONE = "none"
    """Reads its operands from memory and writes its results to it."""
    LOOP = "loop"
    """Computes each element of its results by itself."""
    SUM = "sum"
    """Adds up elements that it can compute by itself."""
    PICK = "pick"
    """Returns a part of its first operand."""
    PUT = "put"
    """Writes its last operand to a part of its first one, in place."""
    STACK = "stack"
    """Writes its operand, which it can compute by itself, to a part of its result."""
    VIEW = "view"
    """Shows the elements of its operand in another order or shape."""


class TensorKind(StrEnum):
    """Purpose of a tensor; memory is accounted by it."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    DATA = "data"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A whole array of the step, before it is sharded.

    Attributes:
        name: Name, unique in its graph.
        shape: Size of each dim; empty for a scalar.
        element_bytes: Size of one element [bytes].
        kind: Purpose of the tensor: parameter, activation, gradient and so on.
        dim_names: Name of each dim; empty if the frontend gave none.
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: float
    kind: TensorKind
    dim_names: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> float:
        """Size of the whole tensor [bytes]."""
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operator of the step.

    Attributes:
        name: Name, unique in its graph, for example `layers.0.mlp.up`.
        primitive: Name of the computation, for example `matmul`.
        operands: Numbers of the tensors that it reads.
        results: Numbers of the tensors that it writes.
        rule: Sharding rule of the operator.
        flop: Floating-point operations of one execution on whole tensors.
        times: Number of executions in a step.
        precision: Data type of its arithmetic; empty if it only moves data.
        fusion: How a compiler can fuse it with others.
    """

    name: str
    primitive: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule
    flop: float = 0.0
    times: int = 1
    precision: str = ""
    fusion: FusionKind = FusionKind.NONE

    @property
    def is_source(self) -> bool:
        """Whether the operator provides a tensor without reading an earlier result."""
        return self.primitive in SOURCES

    @property
    def begins(self) -> bool:
        """Whether the operator stands at the start of the step.

        A constant does not: it is made just before its first reader.
        """
        return self.primitive in (STATE, INPUT)

    @property
    def is_free(self) -> bool:
        """Whether the operator costs a device no time; a compiler has kernels that fill and read stacks of loops."""
        return self.primitive in SOURCES or (self.primitive in PASSING and self.fusion is FusionKind.NONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One read of a tensor by an operator.

    Attributes:
        op: Number of the operator.
        operand: Index of the tensor among the operator's operands.
        times: Number of such reads in a step.
        is_back: Whether the operator stands before the one that writes the tensor. A state, or the start of a loop,
            reads the tensor for the next step or iteration.
    """

    op: int
    operand: int
    times: int = 1
    is_back: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """One training step.

    Attributes:
        name: Name of the model or program.
        tensors: All arrays of the step.
        ops: All operators, in an order in which they can run.
        unknown: Number of occurrences of each primitive without a known rule; all dims of these operators are blocked.
        first_backward: Number of the first operator of the backward pass; None if the frontend did not mark it.
        sampled: Values that the program's code has read from its sample, each with where, in words; the step is another
            one for inputs with other values.
        is_bucketed: Whether sums that no operator reads soon are added up together, as in a torch program.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    unknown: tuple[tuple[str, int], ...] = ()
    first_backward: int | None = None
    sampled: tuple[str, ...] = ()
    is_bucketed: bool = False

    @cached_property
    def is_fused(self) -> bool:
        """Whether a compiler fuses operators of this graph, such as XLA."""
        return any(op.fusion is not FusionKind.NONE for op in self.ops)

    @cached_property
    def maker(self) -> tuple[tuple[int, int], ...]:
        """Operator that writes each tensor, and the index of the tensor among that operator's results."""
        # Every tensor has exactly one writer (`_check_order`), so the entries cannot collide.
        found = {tensor: (number, slot) for number, op in enumerate(self.ops) for slot, tensor in enumerate(op.results)}
        return tuple(found[tensor] for tensor in range(len(self.tensors)))

    @cached_property
    def uses(self) -> tuple[tuple[Use, ...], ...]:
        """Reads of each tensor, in the order of the operators."""
        found: list[list[Use]] = [[] for _ in self.tensors]
        for number, op in enumerate(self.ops):
            for slot, tensor in enumerate(op.operands):
                maker, _ = self.maker[tensor]
                # The second operand of a `carry` comes from inside the loop, so it is read once per iteration; the
                # first only once.
                times = self.ops[maker].times if op.primitive == CARRY and slot else op.times
                found[tensor].append(Use(op=number, operand=slot, times=times, is_back=number < maker))
        return tuple(map(tuple, found))

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """Number of times that partial sums of each tensor are added up in a step.

        They are added up when the tensor is written, or when it is read if that happens less often. For example,
        gradients of several micro-batches are accumulated locally until the update reads them.
        """
        return tuple(
            min(self.ops[maker].times, max((use.times for use in uses), default=self.ops[maker].times))
            for (maker, _), uses in zip(self.maker, self.uses, strict=True)
        )


@dataclass(kw_only=True)
class GraphBuilder:
    """Graph under construction; tensors are identified by their numbers.

    Attributes:
        name: Name of the graph.
        tensors: Tensors added so far.
        ops: Operators added so far.
        unknown: Number of occurrences of each primitive without a known rule; see Graph.
        is_bucketed: Whether sums are added up together; see Graph.
    """

    name: str
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)
    is_bucketed: bool = False
    _num_forward: int | None = None
    _states: dict[int, int] = field(default_factory=dict)
    _carries: dict[int, int] = field(default_factory=dict)
    _tensor_names: set[str] = field(default_factory=set)
    _op_names: set[str] = field(default_factory=set)

    def tensor(
        self, name: str, shape: Sequence[int], element_bytes: float, kind: TensorKind, dim_names: Sequence[str] = ()
    ) -> int:
        """Add a tensor that a later operator will write, and return its number."""
        assert name not in self._tensor_names, f"{name!r} is a tensor already"
        assert not dim_names or len(dim_names) == len(shape), f"{name!r} needs a name for each dim or for none"
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
        """Add an operator that provides a tensor of the same name, and return the tensor's number.

        Each dim of the tensor is a factor of its own. A state has no operand until `keep` names the updated value.
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
        """Name the tensor that replaces a state for the next step; without this call the state stays unchanged.

        Args:
            state: Number of the state's tensor.
            made: Number of the updated value, a tensor of the same shape.
        """
        number = self._states.pop(state)
        op = self.ops[number]
        assert self.tensors[made].shape == self.tensors[state].shape, (
            f"{op.name!r} must keep its shape from step to step"
        )
        # The source was added before its updated value existed; it is replaced by one with that operand.
        names = tuple(factor.name for factor in op.rule.factors)
        rule = _source_rule(self.tensors[state].shape, names, num_operands=1)
        self.ops[number] = replace(op, operands=(made,), rule=rule)

    def carry_on(self, carried: int, made: int, rule: Rule) -> None:
        """Name the tensor that an iteration hands on to the next one in place of a `carry` result.

        Args:
            carried: Number of the tensor that the carry writes.
            made: Number of the tensor that the iteration computes from it.
            rule: Rule of the carry with both operands: the value of the first iteration, and that of later ones.
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
        fusion: FusionKind = FusionKind.NONE,
    ) -> None:
        """Add an operator; its rule must give the shapes of its tensors."""
        places = [
            *map(rule.operand_shape, range(len(rule.operands))),
            *map(rule.result_shape, range(len(rule.results))),
        ]
        shapes = [self.tensors[tensor].shape for tensor in (*operands, *results)]
        assert places == shapes, f"the rule of {name!r} has the shapes {places}, but its tensors have {shapes}"
        # `carry_on` adds the second operand later, when the iteration's result exists.
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
                fusion=fusion,
            )
        )

    def begin_backward(self) -> None:
        """Mark the end of the forward pass; all operators added later belong to the backward pass."""
        self._num_forward = sum(not op.begins for op in self.ops)

    def done(self) -> Graph:
        """Return the graph, with states and inputs before all other operators wherever they were added."""
        num_sources = sum(op.begins for op in self.ops)
        graph = Graph(
            name=self.name,
            tensors=tuple(self.tensors),
            # The sort is stable, so the remaining operators keep their order.
            ops=tuple(sorted(self.ops, key=lambda op: not op.begins)),
            unknown=tuple(sorted(self.unknown.items())),
            # `_num_forward` counts operators behind the sources, which now all stand in front.
            first_backward=None if self._num_forward is None else num_sources + self._num_forward,
            is_bucketed=self.is_bucketed,
        )
        _check_order(graph)
        return graph

    def _add(self, op: Op) -> None:
        assert op.name not in self._op_names, f"{op.name!r} is an operator already"
        self._op_names.add(op.name)
        self.ops.append(op)


@cache
def _source_rule(shape: tuple[int, ...], names: tuple[str, ...], *, num_operands: int) -> Rule:
    """Return the rule of a source: every dim is a factor. Sources of equal shapes share one cached rule."""
    place = tuple((dim,) for dim in range(len(shape)))
    return Rule(
        factors=tuple(
            Factor(size=size, kind=FactorKind.MAP, name=name) for size, name in zip(shape, names, strict=True)
        ),
        operands=(place,) * num_operands,
        results=(place,),
    )


def _check_order(graph: Graph) -> None:
    """Assert that every tensor is written once, and read after that except by states and the starts of loops."""
    written: set[int] = set()
    for op in graph.ops:
        # A state reads the end of the step, and a carry's second operand the end of an iteration.
        read = () if op.primitive == STATE else op.operands[:1] if op.primitive == CARRY else op.operands
        late = [tensor for tensor in read if tensor not in written]
        assert not late, f"{op.name!r} reads {graph.tensors[late[0]].name!r} before it is written"
        for tensor in op.results:
            assert tensor not in written, f"{graph.tensors[tensor].name!r} is written twice"
            written.add(tensor)
    assert len(written) == len(graph.tensors), "every tensor needs an operator that writes it"
