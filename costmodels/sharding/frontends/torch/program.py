"""A torch module's training step as it was traced: forward, loss and gradients as one graph of ATen operators.

Nothing is allocated: parameters, buffers and inputs become fake tensors, wherever they lay. It is traced twice, first
with autograd, then without what overwrites memory and with operators decomposed that nobody wrote a rule for.

Operators carry the path of the module that called them, those of the backward pass the path of the forward operator
whose gradient they are.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import _pytree as pytree

from costmodels.sharding.frontends.torch.decompositions import decompositions
from costmodels.sharding.graph import TensorKind
from hardware.io.errors import ConfigError

Loss = Callable[..., torch.Tensor]
"""Takes the module and the inputs, and returns a scalar."""

SCOPE, BACKWARD = "meshtune_scope", "meshtune_backward"
"""What the nodes of a trace say of where they stand, in their `meta["custom"]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """An argument of a traced step.

    Attributes:
        name: That of the parameter or the buffer, or `inputs.` with the path of an input.
        kind: What it is for.
        gradient: The output that is its gradient; None where it has none.
        after: The output that it becomes; None where it stays as it is.
    """

    name: str
    kind: TensorKind
    gradient: int | None = None
    after: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A traced step.

    Attributes:
        name: What it is called.
        trace: Its operators, whose placeholders are the arguments.
        arguments: In their order.
    """

    name: str
    trace: GraphModule
    arguments: tuple[Argument, ...]


def traced(module: torch.nn.Module, inputs: Sequence[Any], loss: Loss | None = None) -> Program:
    """A module's forward and backward pass on inputs of these shapes.

    Args:
        module: On any device, also `meta`, or made of fake tensors; of its parameters those are trained that require
            gradients.
        inputs: Trees of tensors, of which shapes and types are read.
        loss: What is differentiated, as `loss(module, *inputs)`; None where that is `module(*inputs)`.

    Raises:
        ConfigError: the loss isn't one number that depends on a parameter.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    leaves, tree = pytree.tree_flatten(tuple(inputs))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    given = [*parameters.values(), *buffers.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    with mode:
        fakes = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in given]

    def step(*arguments: torch.Tensor) -> list[torch.Tensor]:
        """Loss, gradients, and buffers as they are left."""
        states = {
            name: tensor.detach().requires_grad_(parameters[name].requires_grad) if name in parameters else tensor
            for name, tensor in zip((*parameters, *buffers), arguments, strict=False)
        }
        rest = iter(arguments[len(states) :])
        call = pytree.tree_unflatten(
            [next(rest) if one else leaf for one, leaf in zip(is_tensor, leaves, strict=True)], tree
        )
        within = {f"module.{name}": tensor for name, tensor in states.items()}
        found = torch.func.functional_call(_Differentiated(module, loss), within, call)
        return [*found, *(states[name] for name in buffers)]

    with mode, preserve_node_meta():
        first = make_fx(step, tracing_mode="fake")(*fakes)
    trace = _functional(first, fakes, mode)
    return Program(
        name=type(module).__name__, trace=trace, arguments=(*_states(module, trace), *_inputs(tuple(inputs)))
    )


def _states(module: torch.nn.Module, trace: GraphModule) -> list[Argument]:
    """Parameters and buffers, and what a step, which returns the loss, gradients and buffers, makes of them."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    outputs = outputs_of(trace)
    placeholders = trace.graph.find_nodes(op="placeholder")[len(parameters) :]
    found, returned = [], 1
    for name, parameter in parameters.items():
        has_gradient = parameter.requires_grad and outputs[returned] is not None
        found.append(Argument(name=name, kind=TensorKind.PARAMETER, gradient=returned if has_gradient else None))
        returned += parameter.requires_grad
    for name, placeholder in zip(buffers, placeholders, strict=False):
        is_same = outputs[returned] is placeholder
        kind = TensorKind.CONSTANT if is_same else TensorKind.DATA
        found.append(Argument(name=name, kind=kind, after=None if is_same else returned))
        returned += 1
    return found


def _inputs(inputs: tuple[Any, ...]) -> list[Argument]:
    return [Argument(name=name, kind=TensorKind.DATA) for name in input_names(inputs)]


def input_names(inputs: tuple[Any, ...]) -> list[str]:
    """What the tensors among the inputs are called: by their paths."""
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return [
        ".".join(("inputs", *(re.sub(r"[^\w]", "", str(key)) for key in path)))
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def outputs_of(trace: GraphModule) -> list[Node | None]:
    """What a trace returns."""
    (outputs,) = trace.graph.output_node().args
    assert isinstance(outputs, (tuple, list)), "a step returns several things"
    return [output if isinstance(output, Node) else None for output in outputs]


class _Differentiated(torch.nn.Module):
    """A module that returns its loss and the gradients of its parameters.

    Both are found while its parameters are swapped for others, so that what is computed again in the backward pass
    finds the others, too.
    """

    def __init__(self, module: torch.nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, *inputs: Any) -> list[torch.Tensor | None]:
        with _Scopes().of(self.module) as scopes:
            loss = self.module(*inputs) if self.loss is None else self.loss(self.module, *inputs)
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ConfigError(
                    "must be one number that depends on a parameter that requires gradients",
                    key="loss",
                    value=tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__,
                    nearest="return (module, inputs, loss), where loss(module, *inputs) is a scalar",
                )
            with scopes.backward_of(loss):
                return [loss.detach(), *torch.autograd.grad(loss, trained, torch.ones_like(loss), allow_unused=True)]


@dataclass(slots=True)
class _Scopes:
    """Writes into the nodes of a trace by which module they were called.

    Autograd numbers the nodes of its own graph as the forward pass makes them; by these numbers the scope of a gradient
    is the one of what it is a gradient of.

    Attributes:
        starts: Numbers at which another scope began.
        scopes: These scopes.
    """

    starts: list[int] = field(default_factory=lambda: [0])
    scopes: list[str] = field(default_factory=lambda: [""])

    @contextmanager
    def of(self, module: torch.nn.Module) -> Iterator[_Scopes]:
        """While the module is called."""
        open_ones: list[tuple[str, AbstractContextManager[None]]] = []

        def enter(name: str) -> None:
            context = annotate({SCOPE: name})
            context.__enter__()
            open_ones.append((name, context))
            self._begin(name)

        def leave() -> None:
            open_ones.pop()[1].__exit__(None, None, None)
            self._begin(open_ones[-1][0] if open_ones else "")

        with ExitStack() as hooks:
            for name, part in module.named_modules():
                if name:
                    before = part.register_forward_pre_hook(lambda *_, name=name: enter(name))
                    after = part.register_forward_hook(lambda *_: leave(), always_call=True)
                    hooks.callback(before.remove)
                    hooks.callback(after.remove)
            yield self

    @contextmanager
    def backward_of(self, loss: torch.Tensor) -> Iterator[None]:
        """While the loss is differentiated."""
        with ExitStack() as here, annotate({BACKWARD: True}):

            def begin(number: int) -> None:
                here.close()
                here.enter_context(annotate({SCOPE: self.scopes[bisect.bisect_right(starts, number) - 1]}))

            starts = list(self.starts)  # what is computed again makes nodes of its own
            waiting, seen = [loss.grad_fn], set()
            while waiting:
                node = waiting.pop()
                if node is not None and node not in seen:
                    seen.add(node)
                    waiting += [before for before, _ in node.next_functions]
                    node.register_prehook(partial(lambda number, *_: begin(number), node._sequence_nr()))
            yield

    def _begin(self, scope: str) -> None:
        self.starts.append(_get_sequence_nr())
        self.scopes.append(scope)


def _functional(trace: GraphModule, arguments: Sequence[torch.Tensor], mode: FakeTensorMode) -> GraphModule:
    """The same without operators that overwrite what they read, and with those decomposed that have no rule."""

    def again(*arguments: torch.Tensor) -> Any:
        with preserve_node_meta():
            return Interpreter(trace).run(*arguments)

    with mode:
        return make_fx(
            torch.func.functionalize(again, remove="mutations"),
            decomposition_table=decompositions(),
            tracing_mode="fake",
        )(*arguments)
