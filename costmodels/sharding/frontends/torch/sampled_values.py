"""Values that a module's code reads from tensors while it is traced, such as the condition of a branch.

Fake tensors have none. Where a value follows from the inputs and the buffers alone, the operators that lead to it are
run on the sample's, and the trace goes on as the code does with that value. It holds for inputs with the same value
only: who runs the trace computes the value again and compares.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import extract_stack
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from costmodels.sharding.frontends.torch.places import place_in

READ = torch.ops.aten._local_scalar_dense.default
"""Operator that reads the value of a tensor of one element."""

Number = bool | int | float | complex


@dataclass(frozen=True, kw_only=True, eq=False)
class TakenValue:
    """A value that a trace has taken from the sample.

    Attributes:
        place: Line of the user's code that reads it.
        value: Value of the sample.
        arguments: Numbers of the arguments of the step that it follows from.
        program: Operators that compute it from these.
    """

    place: str
    value: Number
    arguments: tuple[int, ...]
    program: GraphModule

    def of(self, arguments: Sequence[Tensor]) -> Number:
        """Return the value for other arguments of the step; parts of DTensors are gathered, on all ranks."""
        found: Number = self.program(*(_whole(arguments[number]) for number in self.arguments)).item()
        return found

    @property
    def in_words(self) -> str:
        """Line that reads the value, and the value, in words."""
        return f"{self.place or 'the module'} reads {self.value!r}"


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values that one may read here."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


class SampledValues(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's class has no types
    """Mode in which reading a tensor's value gives that of the sample, where one can tell.

    Attributes:
        taken: Values so far.

    Args:
        sample: Values of arguments of the step, by number; parameters have none.
    """

    def __init__(self, sample: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taken: list[TakenValue] = []
        self._sample = sample

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, or take the value that it reads."""
        if func is READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            found = self._take(args[0])
            if found is not None:
                self.taken.append(found)
                return found.value
        return func(*args, **(kwargs or {}))

    def _take(self, read: Tensor) -> TakenValue | None:
        """Return the value of a tensor; None if it does not follow from values of the sample."""
        mode = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(read, mode.tracer, None)
        if slot is None:
            return None
        last = slot.proxy.node
        leading = _leading_to(last)
        graph, numbers = Graph(), []
        copies: dict[Node, Node] = {}
        for number, node in enumerate(last.graph.nodes):
            if node not in leading:
                continue
            if node.op == "placeholder":
                if number not in self._sample:
                    return None
                numbers.append(number)
            elif node.op != "get_attr" and not _is_repeatable(node):
                return None
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[last])
        assert mode is not None, "it has told the node"
        program = GraphModule(cast("PythonKeyTracer", mode.tracer).root, graph)
        place = place_in(extract_stack())
        with _disable_current_modes():
            value = program(*(_whole(self._sample[number]) for number in numbers)).item()
        return TakenValue(place=place, value=value, arguments=tuple(numbers), program=program)


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole values of a tensor on the CPU."""
    own = tensor.detach()
    return (own.full_tensor() if isinstance(own, DTensor) else own).cpu()


def _is_repeatable(node: Node) -> bool:
    """Return whether a call gives the same result each time."""
    if node.target is operator.getitem:  # one of several results
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded not in node.target.tags


def _leading_to(read: Node) -> frozenset[Node]:
    """Return a node with all that it follows from."""
    waiting, found = [read], {read}
    while waiting:
        before = set(waiting.pop().all_input_nodes) - found
        found |= before
        waiting += before
    return frozenset(found)
