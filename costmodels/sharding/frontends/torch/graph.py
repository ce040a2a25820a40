"""Graph of a torch module's training step: forward pass, backward pass, and Adam's update of every trained parameter.

The update is one operator per parameter, as fused optimizers run it, with float32 moments. Buffers that the step leaves
unchanged, such as masks and tables of angles, are constants. Other buffers are states, like parameters. Views are
folded into other operators (`view_folding`), and unused operators are removed.
"""

from __future__ import annotations

from dataclasses import replace

from costmodels.sharding.frontends.flat_program import FlatBuilder, Kernel, alive
from costmodels.sharding.frontends.rule_parts import Call, elementwise
from costmodels.sharding.frontends.torch.flat import Flat
from costmodels.sharding.frontends.torch.program import Argument, Program
from costmodels.sharding.frontends.torch.shape_rules import VIEWS
from costmodels.sharding.frontends.torch.view_folding import fold_views
from costmodels.sharding.graph import INPUT, STATE, Graph, GraphBuilder, TensorKind

MOMENTS = ("mean", "square")
"""Moments of a parameter's gradients that Adam keeps (Kingma and Ba 2015, algorithm 1)."""

UPDATE = "adam"
"""Primitive of the update, which reads parameter, gradient and moments."""

MOMENT_BYTES = 4.0


def flatten(program: Program) -> tuple[Flat, list[int | None], list[Kernel]]:
    """Return a traced step in flat form, its outputs, and its operators without unused ones and folded views."""
    flat = Flat()
    outputs = flat.read(program)
    # Gradients and new values of buffers are read by nobody, but must be computed.
    kept = {
        outputs[made]
        for argument in program.arguments
        for made in (argument.gradient, argument.after)
        if made is not None
    }
    wanted = {output for output in (outputs[0], *kept) if output is not None}
    steps = [kernel.step for kernel in flat.kernels]
    needed = alive(steps, wanted)
    kernels = fold_views([kernel for number, kernel in enumerate(flat.kernels) if number in needed], wanted, VIEWS)
    for kernel in kernels:
        for slot, result in enumerate(kernel.step.results):  # folding may have left a view's name
            name = f"{kernel.step.name}:{slot}" if slot else kernel.step.name
            flat.values[result] = replace(flat.values[result], name=name)
    return flat, outputs, kernels


def graph_of(program: Program, *, micro_batches: int = 1) -> Graph:
    """Return the graph of a traced step.

    Args:
        program: Traced step.
        micro_batches: Number of forward and backward passes before the update, each of which adds to the gradients.
    """
    flat, outputs, kernels = flatten(program)
    arguments = range(len(program.arguments))
    build = FlatBuilder(values=flat.values, builder=GraphBuilder(name=program.name, is_bucketed=True))
    for number, argument in zip(arguments, program.arguments, strict=True):
        if flat.values[number].varies:
            build.source(INPUT if argument.kind == TensorKind.DATA and argument.after is None else STATE, number)
    has_begun = False
    for kernel in kernels:
        # The trace is in execution order, so the first backward kernel ends the forward pass.
        if kernel.is_backward and not has_begun:
            build.builder.begin_backward()
            has_begun = True
        if not kernel.is_known:
            build.count_unknown(kernel.step.primitive)
        build.step(replace(kernel.step, times=micro_batches), kernel.shown_rule)
    for number, argument in zip(arguments, program.arguments, strict=True):
        if argument.gradient is not None:
            _add_update(build, number, argument, outputs[argument.gradient], micro_batches)
        after = None if argument.after is None else outputs[argument.after]
        if after is not None:
            build.builder.keep(build.tensors[number], build.read(after))
    sampled = tuple(dict.fromkeys(each.in_words for each in program.taken))
    return replace(build.builder.done(), sampled=sampled)


def _add_update(build: FlatBuilder, number: int, argument: Argument, gradient: int | None, micro_batches: int) -> None:
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
    read = build.read(gradient)
    if micro_batches > 1:  # each pass adds its gradient, whose partial sums are added up first
        added = builder.tensor(f"{argument.name}.sum", array.shape, array.element_bytes, TensorKind.GRADIENT)
        add = Call(primitive="add", operands=(array.shape,), results=(array.shape,), params={})
        builder.op(f"{argument.name}.sum", "add", [read], [added], elementwise(add), times=micro_batches)
        read = added
    # Adam works element by element, so any partition of a parameter is possible.
    call = Call(primitive=UPDATE, operands=(array.shape,) * 4, results=(array.shape,) * 3, params={})
    builder.op(name, UPDATE, [parameter, read, *moments], made, elementwise(call))
    for state, after in zip((parameter, *moments), made, strict=True):
        builder.keep(state, after)
