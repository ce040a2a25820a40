"""Values of a traced torch step that depend on no argument.

Every rank computes them whole, and keeps its part of them. This includes random numbers: all ranks draw the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg

from costmodels.sharding.exports.torch_local import is_random
from costmodels.sharding.frontends.torch.calls import name_of
from costmodels.sharding.frontends.torch.flat import OF_A_SHAPE
from costmodels.sharding.frontends.torch.program import Program
from hardware.io.errors import ConfigError


class Wholes:
    """Values of a trace that depend on no argument; every rank computes them whole.

    Attributes:
        known: Values so far, by number; those of constant arguments are given.
    """

    def __init__(self, program: Program, numbers: Mapping[Node, Any], varies: Sequence[bool]) -> None:
        self.known: dict[int, Tensor] = {}
        self._numbers, self._trace, self._varies = numbers, program.trace, varies
        self._maker: dict[int, Node] = {}
        taken = set(range(len(program.arguments)))
        for node in program.trace.graph.nodes:
            if node.op == "get_attr" or isinstance(node.target, OpOverload):
                made = [one for one in listed(numbers.get(node)) if one is not None and one not in taken]
                taken.update(made)
                self._maker |= {one: node for one in made if not varies[one]}

    def needed(self, read: Iterable[int]) -> tuple[list[Node], list[Node]]:
        """Return the calls whose values are read, with those that they need, and the ones that draw random numbers.

        Raises:
            ConfigError: probabilities of a draw depend on an argument.
        """
        random = [
            node
            for node in dict.fromkeys(self._maker.values())
            if isinstance(node.target, OpOverload) and is_random(node.target, {})
        ]
        for node in random:
            if node.target is torch.ops.aten.bernoulli.default and self._is_varying(node):
                raise ConfigError(
                    "draws with probabilities that depend on an argument",
                    key="parallelize",
                    value=str(node.target),
                    nearest="compare torch.rand_like(x) with them",
                )
        waiting = [self._maker[value] for value in read if value in self._maker] + random
        found: dict[Node, None] = {}
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found[node] = None
            if not self._is_shape_only(node):
                waiting += [
                    self._maker[one]
                    for before in node.all_input_nodes
                    for one in listed(self._numbers[before])
                    if one in self._maker
                ]
        return list(found), random

    def last_reads(self, order: Sequence[Any]) -> dict[int, int]:
        """Return the position at which each value that a call computes is read last, or computed if nobody reads it."""
        found: dict[int, int] = {}
        for number, node in enumerate(order):
            if isinstance(node, Node):
                read = [node, *(node.all_input_nodes if node.op == "call_function" else ())]
                found.update(
                    (value, number) for each in read for value in listed(self._numbers[each]) if value in self._maker
                )
        return found

    def compute(self, node: Node, device: torch.device) -> list[int]:
        """Compute the whole values of a call, and return their numbers."""
        if node.op == "get_attr":
            given_value = getattr(self._trace, str(node.target))
            if isinstance(given_value, FakeTensor) or given_value.is_meta:
                raise ConfigError(
                    "has no values, and is neither a parameter nor a buffer",
                    key="module",
                    value=f"tensor of shape {tuple(given_value.shape)}",
                    nearest="register it as a buffer, or plan the module with values",
                )
            made: Any = given_value.to(device)
        else:
            given, is_shape = dict(node.kwargs), self._is_shape_only(node)
            if "device" in given:
                given["device"] = device
            args, kwargs = map_arg((node.args, given), lambda one: self._value(one, device, is_shape=is_shape))
            assert isinstance(node.target, OpOverload), "a call of a trace is one of an operator"
            made = node.target(*args, **kwargs)
        numbers = listed(self._numbers[node])
        several = list(made) if isinstance(made, (tuple, list)) else [made]
        self.known.update((number, value) for number, value in zip(numbers, several, strict=True) if number is not None)
        return [number for number in numbers if number is not None]

    def _value(self, node: Node, device: torch.device, *, is_shape: bool) -> Any:
        """Return the value of a node, or something of its shape."""
        number = self._numbers[node]
        if number in self.known:
            return self.known[number]
        assert is_shape, f"{node} is read before it is computed"
        meta = node.meta["val"]
        return torch.empty((), dtype=meta.dtype, device=device).expand(meta.shape)

    def _is_shape_only(self, node: Node) -> bool:
        """Return whether a call reads no element of its operands; what has no elements depends on none."""
        is_of_shape = name_of(node.target) in OF_A_SHAPE if isinstance(node.target, OpOverload) else False
        return (is_of_shape and node.target is not torch.ops.aten.bernoulli.default) or self._is_varying(node)

    def _is_varying(self, node: Node) -> bool:
        return any(
            self._varies[one]
            for before in node.all_input_nodes
            for one in listed(self._numbers[before])
            if one is not None
        )


def listed(numbers: Any) -> list[int | None]:
    """Return the numbers of a node's values as a list; a handed-on value may be missing."""
    return list(numbers) if isinstance(numbers, (tuple, list)) else [numbers]
