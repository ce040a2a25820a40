"""The graph of a torch module's training step: forward, backward, and Adam's update of every trained parameter.

The update is one operator for each parameter, as fused optimizers run it, and its moments are float32. Buffers that the
step leaves as they are, masks and tables of angles, are constants; others live on as parameters do. Views are no
operators (`view_folding`), and what nobody reads is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from costmodels.sharding.frontends.flat_program import FlatBuilder, alive
from costmodels.sharding.frontends.rule_parts import Call, elementwise
from costmodels.sharding.frontends.torch.flat import Flat
from costmodels.sharding.frontends.torch.program import Argument, Loss, Program, traced
from costmodels.sharding.frontends.torch.rules import VIEWS
from costmodels.sharding.frontends.torch.view_folding import folded
from costmodels.sharding.graph import INPUT, STATE, Graph, GraphBuilder, TensorKind

MOMENTS = ("mean", "square")
"""What Adam keeps of a parameter's gradients (Kingma and Ba 2015, algorithm 1)."""

UPDATE = "adam"
"""The primitive of the update, which reads parameter, gradient and moments."""

MOMENT_BYTES = 4.0


def is_module(thing: object) -> bool:
    """Whether it is what `graph_of_torch` takes."""
    return isinstance(thing, torch.nn.Module)


def graph_of_torch(module: torch.nn.Module, inputs: Sequence[Any], loss: Loss | None = None) -> Graph:
    """The graph of a module's training step; nothing is allocated or computed. See `torch_program.traced`."""
    return graph_of(traced(module, inputs, loss))


def graph_of(program: Program) -> Graph:
    """The graph of a traced step."""
    flat = Flat()
    outputs = flat.read(program)
    arguments = range(len(program.arguments))
    kept = {
        outputs[made]
        for argument in program.arguments
        for made in (argument.gradient, argument.after)
        if made is not None
    }
    wanted = {output for output in (outputs[0], *kept) if output is not None}
    steps = [kernel.step for kernel in flat.kernels]
    needed = alive(steps, wanted)
    kernels = folded([kernel for number, kernel in enumerate(flat.kernels) if number in needed], wanted, VIEWS)

    build = FlatBuilder(values=flat.values, builder=GraphBuilder(name=program.name))
    for number, argument in zip(arguments, program.arguments, strict=True):
        if flat.values[number].varies:
            build.source(INPUT if argument.kind == TensorKind.DATA and argument.after is None else STATE, number)
    has_begun = False
    for kernel in kernels:
        if kernel.is_backward and not has_begun:
            build.builder.begin_backward()
            has_begun = True
        if not kernel.is_known:
            build.count_unknown(kernel.step.primitive)
        for slot, result in enumerate(kernel.step.results):  # some have had the name of a view
            name = f"{kernel.step.name}:{slot}" if slot else kernel.step.name
            flat.values[result] = replace(flat.values[result], name=name)
        build.step(kernel.step, kernel.rule)
    for number, argument in zip(arguments, program.arguments, strict=True):
        if argument.gradient is not None:
            _update(build, number, argument, outputs[argument.gradient])
        after = None if argument.after is None else outputs[argument.after]
        if after is not None:
            build.builder.keep(build.tensors[number], build.read(after))
    return build.builder.done()


def _update(build: FlatBuilder, number: int, argument: Argument, gradient: int | None) -> None:
    """Adds what the optimizer makes of a parameter and its moments."""
    assert gradient is not None, f"the gradient of {argument.name!r} is a tensor"
    array, builder = build.values[number], build.builder
    parameter = build.tensors[number]
    moments = [
        builder.source(STATE, f"{argument.name}.{moment}", array.shape, MOMENT_BYTES, TensorKind.OPTIMIZER)
        for moment in MOMENTS
    ]
    name = f"{argument.name}.update"
    made = [
        builder.tensor(name, array.shape, array.element_bytes, TensorKind.PARAMETER),
        *(builder.tensor(f"{name}.{moment}", array.shape, MOMENT_BYTES, TensorKind.OPTIMIZER) for moment in MOMENTS),
    ]
    call = Call(primitive=UPDATE, operands=(array.shape,) * 4, results=(array.shape,) * 3, params={})
    builder.op(name, UPDATE, [parameter, build.read(gradient), *moments], made, elementwise(call))
    for state, after in zip((parameter, *moments), made, strict=True):
        builder.keep(state, after)
