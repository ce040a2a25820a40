"""Flat form of a traced torch step: one list of values and one list of kernels with their rules.

Operators that only return their operand (`detach`) are not kernels. Results that depend only on a tensor's shape
(`zeros_like`) depend on no argument. Random numbers are treated the same way, because every device can draw those of
its own part. Tensors filled with one number are not operands, just as scalars are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from costmodels.sharding.dims import Rule
from costmodels.sharding.frontends.flat_program import Kernel, Names, Step, Value
from costmodels.sharding.frontends.rule_parts import Call, blocked_rule
from costmodels.sharding.frontends.torch.calls import bound, name_of
from costmodels.sharding.frontends.torch.flops import flop_of_call
from costmodels.sharding.frontends.torch.program import BACKWARD, SCOPE, Program, outputs_of
from costmodels.sharding.frontends.torch.rules import rule_of_call, unread
from costmodels.sharding.frontends.torch.shape_rules import VIEWS
from costmodels.sharding.frontends.torch.unknown_flops import flop_by_torch
from costmodels.sharding.graph import TensorKind

HANDED_ON = frozenset(("alias", "detach", "lift_fresh", "lift_fresh_copy", "prims.view_of"))
"""Operators that return their operand."""

OF_A_SHAPE = frozenset(
    """
    bernoulli empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like rand_like
    randint_like randn_like zeros_like
    """.split()  # noqa: SIM905  # one line is easier to scan than a list
)
"""Operators that read no element of their operands, except probabilities."""

FILLED = frozenset(
    ("full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros", "zeros_like")
)
"""Operators that fill their result with one number."""


@dataclass(slots=True)
class Flat:
    """A trace in flat form, under construction.

    Attributes:
        values: All arrays of the trace.
        kernels: All operators of the trace, in order.
        names: Registry of operator names.
        filled: Numbers of values that are filled with one number.
        known: Number of each node's value, or list of numbers if it has several results; None for non-arrays.
    """

    values: list[Value] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    filled: set[int] = field(default_factory=set)
    known: dict[Node, Any] = field(default_factory=dict)

    def add(
        self, name: str, array: torch.Tensor, *, varies: bool = False, kind: TensorKind = TensorKind.ACTIVATION
    ) -> int:
        """Add a value and return its number."""
        self.values.append(
            Value(
                name=name,
                shape=tuple(map(int, array.shape)),
                element_bytes=float(array.element_size()),
                kind=kind,
                varies=varies,
                dtype=str(array.dtype).removeprefix("torch."),
            )
        )
        return len(self.values) - 1

    def read(self, program: Program) -> list[int | None]:
        """Add all operators of a trace, and return the values of its outputs."""
        arguments = iter(program.arguments)
        for node in program.trace.graph.nodes:
            if node.op == "placeholder":
                argument, array = next(arguments), node.meta["val"]
                self.known[node] = self.add(
                    argument.name,
                    array,
                    varies=argument.kind != TensorKind.CONSTANT and 0 not in array.shape,
                    kind=argument.kind,
                )
            elif node.op == "call_function" and isinstance(node.target, OpOverload):
                self.known[node] = self._add_call(node, node.target)
            elif node.op == "call_function":  # `getitem` selects one of several results
                self.known[node] = self.known[node.args[0]][node.args[1]]
            elif node.op == "get_attr":
                self.known[node] = self.add("", getattr(program.trace, str(node.target)))
        return [None if output is None else self.known[output] for output in outputs_of(program.trace)]

    def _add_call(self, node: Node, op: OpOverload[..., Any]) -> Any:
        """Add one call of an ATen operator, and return its results' numbers.

        They have the structure of the node's value: one number or a list.
        """
        name = name_of(op)
        params, nodes = bound(op, node.args, node.kwargs, lambda one: isinstance(one, Node))
        operands = [self.known[one] for one in nodes]
        # `make_fx` stores the fake result of each node here, a list for several results.
        made = node.meta.get("val")
        arrays = list(made) if isinstance(made, (tuple, list)) else [made]
        is_empty = all(0 in array.shape for array in arrays if isinstance(array, torch.Tensor))
        if name in HANDED_ON or (name in ("copy", "copy_") and self._is_alike(operands)):
            return operands[-1]
        varies = name not in OF_A_SHAPE and any(self.values[operand].varies for operand in operands)
        if is_empty or not varies:
            numbers = [self.add("", array) if isinstance(array, torch.Tensor) else None for array in arrays]
            if name in FILLED or self._is_still_filled(op, operands):
                self.filled.update(number for number in numbers if number is not None)
        else:
            numbers = self._add_kernel(node, op, params, operands, arrays)
        return numbers if isinstance(made, (tuple, list)) else numbers[0]

    def _add_kernel(
        self, node: Node, op: OpOverload[..., Any], params: Mapping[str, Any], operands: list[int], arrays: list[Any]
    ) -> list[int | None]:
        """Add a kernel with its rule, and return the numbers of its results."""
        name = name_of(op)
        where = node.meta.get("custom", {})
        is_backward = bool(where.get(BACKWARD))
        scope = where.get(SCOPE, "")
        called = self.names.new([scope] if scope else [], name.strip("_"), is_backward=is_backward)
        kind = TensorKind.GRADIENT if is_backward else TensorKind.ACTIVATION
        numbers = [
            self.add(f"{called}:{number}" if number else called, array, varies=True, kind=kind)
            if isinstance(array, torch.Tensor)
            else None
            for number, array in enumerate(arrays)
        ]
        results = tuple(number for number in numbers if number is not None)
        call = Call(
            primitive=name,
            operands=tuple(self.values[operand].shape for operand in operands),
            results=tuple(self.values[result].shape for result in results),
            params=params,
        )
        rule = rule_of_call(call, op)
        is_known = rule is not None
        flop = flop_of_call(call) if is_known else flop_by_torch(op, node)
        rule = rule or blocked_rule(call)
        # Operands of which only the shape is read, or that are filled with one number, are no operands of the step.
        kept = [slot for slot in range(len(operands)) if slot not in unread(call) and operands[slot] not in self.filled]
        slots = (*kept, *(slot for slot in range(len(operands)) if slot not in kept))
        rule = Rule(factors=rule.factors, operands=tuple(rule.operands[slot] for slot in slots), results=rule.results)
        self.kernels.append(
            Kernel(
                step=Step(
                    name=called,
                    primitive=name,
                    operands=tuple(operands[slot] for slot in kept),
                    results=results,
                    params=params,
                    flop=flop,
                ),
                rule=rule,
                is_known=is_known,
                is_backward=is_backward,
                node=node,
                own_rule=rule,
                unread=tuple(operands[slot] for slot in slots[len(kept) :]),
                slots=slots,
                reads=((),) * len(kept),
                writes=((),) * len(results),
                reads_via=((),) * len(kept),
                writes_via=((),) * len(results),
            )
        )
        return numbers

    def _is_still_filled(self, op: OpOverload[..., Any], operands: list[int]) -> bool:
        """Return whether an operator on filled values yields a filled value.

        Elementwise operators, views and casts do.
        """
        is_elementwise = torch.Tag.pointwise in op.tags or name_of(op) in (*VIEWS, "_to_copy")
        return is_elementwise and all(operand in self.filled or not self.values[operand].shape for operand in operands)

    def _is_alike(self, operands: list[int]) -> bool:
        one, other = (self.values[operand] for operand in operands)
        return one.shape == other.shape and one.dtype == other.dtype
