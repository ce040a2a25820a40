"""Order of a planned torch step on a rank, and how long it keeps each value in each layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node

from costmodels.sharding.exports.torch_kernels import Held, LocalKernel
from costmodels.sharding.exports.torch_local import is_random
from costmodels.sharding.exports.torch_wholes import Wholes
from costmodels.sharding.frontends.torch.flat import Flat
from costmodels.sharding.frontends.torch.program import BACKWARD, Program
from costmodels.sharding.graph import TensorKind
from costmodels.sharding.layouts import Layout
from hardware.io.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Order of a step.

    Attributes:
        order: Operators, and calls whose values depend on no argument, which every rank computes whole.
        boundary: Number of those in the forward pass, which come first.
        is_random: Whether one of them draws random numbers.
        last: Position at which each value is read last in each layout; that behind the end for what the step returns.
        ends: Values in layouts whose last reader stands at a position.
        forgotten: Whole values whose last reader stands at a position.
        layouts: Layouts in which operators read each value that depends on no argument, or the step returns it.
        states: Arguments that are parameters, of which copies are made again in the backward pass.
    """

    order: Sequence[LocalKernel | Node]
    boundary: int
    is_random: bool
    last: Mapping[Held, int]
    ends: Mapping[int, Sequence[Held]]
    forgotten: Mapping[int, Sequence[int]]
    layouts: Mapping[int, set[Layout]]
    states: frozenset[int]


def scheduled(
    program: Program,
    flat: Flat,
    returned: Sequence[int],
    kernels: Sequence[LocalKernel],
    wholes: Wholes,
    layout: Callable[[int], Layout],
) -> Schedule:
    """Put operators and values that depend on no argument in order, and find the last reader of everything.

    Args:
        program: Traced step.
        flat: Its flat form.
        returned: Values that the step returns.
        kernels: Operators as this rank runs them.
        wholes: Values that depend on no argument.
        layout: Layout of each value in the plan.

    Raises:
        ConfigError: Random numbers are drawn in the backward pass, or with probabilities that depend on an argument.
    """
    position = {node: number for number, node in enumerate(program.trace.graph.nodes)}
    read = {value for one in kernels for value, _ in one.reads} | set(returned)
    needed, random = wholes.needed(read)

    def place(one: LocalKernel | Node) -> tuple[bool, int]:
        # A kernel stands where its own call does, though it may write what a view of its result was. What depends
        # on no argument is computed in the forward pass.
        is_late = not isinstance(one, Node) and one.kernel.is_backward
        return is_late, position[one if isinstance(one, Node) else one.kernel.node]

    order: list[LocalKernel | Node] = sorted([*kernels, *needed], key=place)
    boundary = sum(not place(one)[0] for one in order)
    _check_random(order)
    forgotten: dict[int, list[int]] = {}
    for value, number in wholes.last_reads(order).items():
        forgotten.setdefault(number, []).append(value)
    states = frozenset(
        number for number, argument in enumerate(program.arguments) if argument.kind == TensorKind.PARAMETER
    )
    layouts: dict[int, set[Layout]] = {}
    last: dict[Held, int] = {}
    for number, one in enumerate(order):
        for slot, (value, wanted) in enumerate(one.reads if isinstance(one, LocalKernel) else ()):
            if isinstance(one, LocalKernel) and is_shape_read(flat, one, slot):
                continue
            if not flat.values[value].varies:
                layouts.setdefault(value, set()).add(wanted)
                last[value, wanted] = number
                continue
            own = layout(value)
            is_first = (value, wanted) not in last or (value in states and last[value, wanted] < boundary <= number)
            if is_first and wanted != own:
                last[value, own] = max(number, last.get((value, own), -1))
            last[value, wanted] = number
    for value in returned:
        layouts.setdefault(value, set()).add(layout(value))
        last[value, layout(value)] = len(order)
    ends: dict[int, list[Held]] = {}
    for key, number in last.items():
        ends.setdefault(number, []).append(key)
    return Schedule(
        order=order,
        boundary=boundary,
        is_random=bool(random),
        last=last,
        ends=ends,
        forgotten=forgotten,
        layouts=layouts,
        states=states,
    )


def is_shape_read(flat: Flat, one: LocalKernel, slot: int) -> bool:
    """Return whether only the shape of a value is read, which each rank can make for itself."""
    return slot >= len(one.kernel.step.operands) and flat.values[one.reads[slot][0]].varies


def _check_random(order: Sequence[LocalKernel | Node]) -> None:
    for one in order:
        node = one if isinstance(one, Node) else one.kernel.node
        params = {} if isinstance(one, Node) else one.kernel.step.params
        is_late = node.meta.get("custom", {}).get(BACKWARD)
        if is_late and isinstance(node.target, OpOverload) and is_random(node.target, params):
            raise ConfigError(
                "draws other random numbers in the backward pass than in the forward pass",
                key="parallelize",
                value=str(node.target),
                nearest="keep dropout out of recomputed parts (torch.utils.checkpoint)",
            )
