"""Trace of a torch module's training step: forward pass, loss and gradients as one graph of ATen operators.

Nothing is allocated: parameters, buffers and inputs are replaced by fake tensors, whatever their device. The step is
traced twice. The first trace runs autograd. The second one removes operators that overwrite memory, and decomposes
operators without a rule.

Operators carry the path of the module that called them. Operators of the backward pass carry the path of the forward
operator whose gradient they compute.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from traceback import extract_tb
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import _pytree as pytree

from costmodels.sharding.frontends.torch.composed_functions import composed_functions
from costmodels.sharding.frontends.torch.decompositions import decompositions
from costmodels.sharding.frontends.torch.fake_tensors import able_fake_tensors
from costmodels.sharding.frontends.torch.places import place_in
from costmodels.sharding.frontends.torch.sampled_values import SampledValues, TakenValue, has_values
from costmodels.sharding.graph import TensorKind
from hardware.io.errors import ConfigError

Loss = Callable[..., torch.Tensor]
"""Function of the module and the inputs that returns a scalar."""

SCOPE, BACKWARD = "meshtune_scope", "meshtune_backward"
"""Keys of a node's `meta["custom"]` that hold its scope and whether it belongs to the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """An argument of a traced step.

    Attributes:
        name: Name of the parameter or buffer, or `inputs.` with the path of an input.
        kind: Purpose of the tensor.
        gradient: Number of the output that holds its gradient; None if it has none.
        after: Number of the output that holds its new value; None if it stays unchanged.
    """

    name: str
    kind: TensorKind
    gradient: int | None = None
    after: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A traced step.

    Attributes:
        name: Name of the module's class.
        trace: Operators of the step; its placeholders are the arguments.
        arguments: Arguments of the step, in the order of the placeholders.
        taken: Values of the sample that the code has read, and on which the trace depends.
    """

    name: str
    trace: GraphModule
    arguments: tuple[Argument, ...]
    taken: tuple[TakenValue, ...] = ()


def trace_module(module: torch.nn.Module, inputs: Sequence[Any], loss: Loss | None = None) -> Program:
    """Trace a module's forward and backward pass on inputs of the given shapes.

    Args:
        module: Module on any device, also `meta`, or made of fake tensors. Parameters that require gradients are
            trained.
        inputs: Trees of tensors, of which shapes and dtypes are read, and values where the code asks for them.
        loss: Function to differentiate, called as `loss(module, *inputs)`; None to differentiate `module(*inputs)`.

    Raises:
        ConfigError: The loss is not one number that depends on a parameter, or shapes or branches depend on values that
            do not follow from the inputs.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    leaves, tree = pytree.tree_flatten(tuple(inputs))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    given = [*parameters.values(), *buffers.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    with mode:
        # Fake tensors have shapes and dtypes, but no memory.
        fakes = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in given]

    # what the code reads of values may follow from those of the inputs and of buffers
    sampled = SampledValues(
        {number: tensor for number, tensor in enumerate(given) if number >= len(parameters) and has_values(tensor)}
    )

    def step(*arguments: torch.Tensor) -> list[torch.Tensor]:
        """Return the loss, the gradients, and the buffers after the step."""
        # Swap the module's parameters for fresh leaves of autograd; buffers are used as they are.
        states = {
            name: tensor.detach().requires_grad_(parameters[name].requires_grad) if name in parameters else tensor
            for name, tensor in zip((*parameters, *buffers), arguments, strict=False)
        }
        rest = iter(arguments[len(states) :])
        call = pytree.tree_unflatten(
            [next(rest) if one else leaf for one, leaf in zip(is_tensor, leaves, strict=True)], tree
        )
        # `_LossAndGradients` holds the user's module under this name.
        within = {f"module.{name}": tensor for name, tensor in states.items()}
        with sampled, composed_functions():
            found = torch.func.functional_call(_LossAndGradients(module, loss), within, call)
        return [*found, *(states[name] for name in buffers)]

    try:
        with torch.enable_grad(), mode, preserve_node_meta(), _without_mkldnn(), able_fake_tensors():
            first = make_fx(step, tracing_mode="fake")(*fakes)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        place = place_in(extract_tb(error.__traceback__))
        raise ConfigError(
            "has shapes or branches that depend on values, which a plan cannot know",
            key="module",
            value=f"{type(module).__name__} calls {error.func}{f' ({place})' if place else ''}",
            nearest="compute with masks (torch.where, one-hot), or give inputs with values if these alone decide; for "
            "experts of transformers, build the model with experts_implementation='grouped_mm'",
        ) from error
    trace = _make_functional(first, fakes, mode)
    return Program(
        name=type(module).__name__,
        trace=trace,
        arguments=(*_list_states(module, trace), *_list_inputs(tuple(inputs))),
        taken=tuple(sampled.taken),
    )


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Take no kernels of MKL-DNN, some of which, such as an LSTM's, have no decomposition."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of settings that it touches, too
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _list_states(module: torch.nn.Module, trace: GraphModule) -> list[Argument]:
    """Return parameters and buffers with the outputs of the step that belong to them.

    The step returns the loss, then the gradients, then the buffers.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    outputs = outputs_of(trace)
    placeholders = trace.graph.find_nodes(op="placeholder")[len(parameters) :]
    # Output 0 is the loss.
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


def _list_inputs(inputs: tuple[Any, ...]) -> list[Argument]:
    return [Argument(name=name, kind=TensorKind.DATA) for name in input_names(inputs)]


def input_names(inputs: tuple[Any, ...]) -> list[str]:
    """Return the names of the tensors among the inputs, made from their paths."""
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return [
        ".".join(("inputs", *(re.sub(r"[^\w]", "", str(key)) for key in path)))
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def outputs_of(trace: GraphModule) -> list[Node | None]:
    """Return the output nodes of a trace; None for outputs that are not nodes."""
    (outputs,) = trace.graph.output_node().args
    assert isinstance(outputs, (tuple, list)), "a traced step returns a tuple or a list"
    return [output if isinstance(output, Node) else None for output in outputs]


class _LossAndGradients(torch.nn.Module):
    """Module that returns the loss of another module and the gradients of its parameters.

    Both are computed while the module's parameters are swapped for others, so that activations recomputed in the
    backward pass use the swapped parameters, too.
    """

    def __init__(self, module: torch.nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, *inputs: Any) -> list[torch.Tensor | None]:
        """Return the loss, and the gradient of each trained parameter; None for parameters that the loss ignores."""
        with _ScopeRecorder().of(self.module) as scopes:
            loss = self.module(*inputs) if self.loss is None else self.loss(self.module, *inputs)
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            # Check before differentiation, because autograd's own errors do not name the loss.
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ConfigError(
                    "must be one number that depends on a parameter that requires gradients",
                    key="loss",
                    value=tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__,
                    nearest="return (module, inputs, loss), where loss(module, *inputs) is a scalar",
                )
            # autocast is meant for forward passes only
            with scopes.backward_of(loss), torch.autocast("cpu", enabled=False):
                return [loss.detach(), *torch.autograd.grad(loss, trained, torch.ones_like(loss), allow_unused=True)]


@dataclass(slots=True)
class _ScopeRecorder:
    """Recorder that annotates the nodes of a trace with the module that called them.

    Autograd numbers the nodes of its own graph in the order of the forward pass. By these numbers, a gradient gets the
    scope of the operator that it belongs to.

    Attributes:
        starts: Autograd numbers at which another scope began.
        scopes: Scopes that began at these numbers.
    """

    starts: list[int] = field(default_factory=lambda: [0])
    scopes: list[str] = field(default_factory=lambda: [""])

    @contextmanager
    def of(self, module: torch.nn.Module) -> Iterator[_ScopeRecorder]:
        """Record scopes while the module is called."""
        # Hooks around every submodule open and close a scope; calls nest like the modules.
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
        """Record scopes while the loss is differentiated."""
        with ExitStack() as here, annotate({BACKWARD: True}):

            def begin(number: int) -> None:
                here.close()
                here.enter_context(annotate({SCOPE: self.scopes[bisect.bisect_right(starts, number) - 1]}))

            starts = list(self.starts)  # recomputation in the backward pass appends to the original
            # Visit the whole autograd graph, and let every node announce its scope before it runs.
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


def _make_functional(trace: GraphModule, arguments: Sequence[torch.Tensor], mode: FakeTensorMode) -> GraphModule:
    """Return the trace without operators that overwrite operands, and with operators without a rule decomposed."""

    def again(*arguments: torch.Tensor) -> Any:
        with preserve_node_meta():
            # The metadata of the first trace (scopes) is copied to the operators of the second.
            return Interpreter(trace).run(*arguments)

    with mode, able_fake_tensors(), torch.autocast("cpu", enabled=False):
        return make_fx(
            torch.func.functionalize(again, remove="mutations"),
            decomposition_table=decompositions(),
            tracing_mode="fake",
        )(*arguments)
