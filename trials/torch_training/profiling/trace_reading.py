"""Finds the executions of operators among the events of a rank's profile.

A forward operator is what runs in the range `@block.role`, also where a recomputation runs it again. A backward one is
what the nodes do that operations of the range have made. Three matters want care:

- A recomputation runs inside of the backward node that needs its results first, with gradients enabled as in any
  forward pass. So its operations have sequence numbers, and those of the node itself have none.
- It ends as soon as the last tensor is at hand that the backward pass needs (torch.utils.checkpoint's early stop). Its
  last operation is stopped before it computes anything if that tensor is an operand, as those of a product are.
- The gradient of a residual is a sum that torch's engine forms, once the norm hands its term to the node that has
  the residual's already.

Times are those of operations: what Python does between them is in none, nor are collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from costmodels.operators.layer_operators import Phase
from trials.profiling.trace_events import TraceEvent

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm")
CORE = "aten::_scaled_dot_product"
"""How the fused attention kernels' names begin."""

_MARK, _CONTINUED = "@", "+"
_NODE = "autograd::engine::evaluate_function: "
_SUMS = ("aten::add", "aten::add_")
_OF_WEIGHTS = ("@weights.", f"{_NODE}torch::autograd::AccumulateGrad", "FSDP::", "fsdp::", "Optimizer.")
_COLLECTIVES = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")


class Work(NamedTuple):
    """An operation with the seconds that are its own; those of a matrix product or attention kernel are all it has."""

    event: TraceEvent
    time_s: float


class Node(NamedTuple):
    """What a backward node did, and the operation that had made it."""

    name: str
    made_by: TraceEvent
    works: list[Work]


@dataclass(kw_only=True, slots=True, eq=False)
class Execution:
    """One execution of a marked operator, and of its gradient.

    Attributes:
        name: Block and role.
        forward: What it did.
        backward: What the nodes did that it made.
        fork: The sum of the gradients of what a norm and the residual beside it both read.
    """

    name: str
    forward: list[Work] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    fork: list[Work] = field(default_factory=list)

    @property
    def block(self) -> str:
        """The part of the model that it belongs to."""
        return self.name.partition(".")[0]

    @property
    def role(self) -> str:
        """What it does there."""
        return self.name.rpartition(".")[2]

    @property
    def products(self) -> list[TraceEvent]:
        """The matrix products of the forward pass."""
        return [work.event for work in self.forward if work.event.name in PRODUCTS]


class _Place(NamedTuple):
    """Where the reader stands: in an execution or in none, in a backward node or in none, in a recomputation or not."""

    execution: Execution | None = None
    node: Node | None = None
    is_again: bool = False


class TraceReader:
    """Reads the events of one rank.

    Attributes:
        executions: In the order of their begin.
        unexplained: Seconds of each pass's other operations, by their names.
    """

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self.executions: list[Execution] = []
        self.unexplained: dict[tuple[Phase, str], float] = defaultdict(float)
        self._begun: dict[tuple[int, str], Execution] = {}
        self._makers: dict[tuple[int, int], tuple[Execution | None, TraceEvent]] = {}
        self._last_again: tuple[Execution | None, Work] | None = None
        for event in events:
            self._visit(event, _Place())

    def _visit(self, event: TraceEvent, place: _Place) -> None:
        if event.name.startswith((*_COLLECTIVES, *_OF_WEIGHTS)):
            return
        if event.name.startswith(_NODE):
            self._visit_node(event)
            return
        if event.name.startswith(_MARK):
            is_again = place.is_again or place.node is not None
            place = _Place(execution=self._execution(event), is_again=is_again)
        elif place.node is not None and event.sequence >= 0 and not _is_part(event, place.node):
            place = _Place(is_again=True)
        elif place.node is None and event.sequence >= 0 and not place.is_again:
            self._makers[event.thread, event.sequence] = place.execution, event
        is_whole = event.name in PRODUCTS or event.name.startswith(CORE)
        if event.is_operation:
            self._add(Work(event, sum(part.own_s for part in event.whole()) if is_whole else event.own_s), place)
        if not is_whole:
            self._visit_all(event.children, place)

    def _visit_all(self, events: Sequence[TraceEvent], place: _Place) -> None:
        for event in events:
            self._visit(event, place)

    def _execution(self, mark: TraceEvent) -> Execution:
        """The execution that a mark begins or continues."""
        name = mark.name.removeprefix(_MARK)
        key = mark.thread, name.removesuffix(_CONTINUED)
        if not name.endswith(_CONTINUED):
            self._begun[key] = Execution(name=name)
            self.executions.append(self._begun[key])
        return self._begun[key]

    def _visit_node(self, event: TraceEvent) -> None:
        name = event.name.removeprefix(_NODE)
        execution, made_by = self._makers.get((event.forward_thread, event.sequence), (None, event))
        node = Node(name, made_by, [])
        self._last_again = None
        for child in event.children:
            is_kept = child.name in _SUMS and self._keeps_sum(Work(child, child.own_s), execution)
            if not is_kept:
                self._visit(child, _Place(execution=execution, node=node))
        if execution is not None:
            execution.backward.append(node)
        if self._last_again is not None:
            stopped, work = self._last_again
            if stopped is not None and work.event.name in PRODUCTS:
                stopped.forward.remove(work)

    def _keeps_sum(self, work: Work, execution: Execution | None) -> bool:
        """Whether a sum that the engine forms after a node is not part of the node's operator, and kept elsewhere.

        The first one after the nodes of a layer's norm has the residual's gradient for its other term. One after a
        product belongs to no operator.
        """
        if execution is None:
            return False
        if execution.role == "norm" and execution.block != "head" and not execution.fork:
            execution.fork.append(work)
            return True
        if execution.products:
            self.unexplained[Phase.BACKWARD, work.event.name] += work.time_s
            return True
        return False

    def _add(self, work: Work, place: _Place) -> None:
        if place.is_again and work.event.sequence >= 0:
            self._last_again = place.execution, work
        if place.execution is None:
            phase = Phase.FORWARD if place.node is None else Phase.BACKWARD
            self.unexplained[phase, work.event.name] += work.time_s
        elif place.node is None:
            place.execution.forward.append(work)
        else:
            place.node.works.append(work)


def _is_part(event: TraceEvent, node: Node) -> bool:
    """Whether an event with a number is the node's own: its body, or its function applied to gradients."""
    return event.name in (node.name, node.name.removesuffix("Backward"))
