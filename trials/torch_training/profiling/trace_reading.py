"""Recognition of operator executions among the events of a rank's profile.

A forward execution is the work inside a range `@block.role`, also when a recomputation runs the range again. A backward
execution is the work of the autograd nodes that the range's operations created. Three cases need care:

- A recomputation runs inside the first backward node that needs its results, with gradients enabled as in any forward
  pass. So its operations have sequence numbers, and those of the node itself have none.
- A recomputation ends as soon as the last tensor is available that the backward pass needs (early stop of
  torch.utils.checkpoint). If that tensor is an operand, as for a product, the last operation stops before it computes
  anything.
- The gradient of a residual is a sum that torch's engine forms when the norm hands its term to a node that already has
  the residual's term.

Times are those of operations. They include neither the Python code between them nor collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from costmodels.blocks.operator import Phase
from trials.profiling.trace_events import TraceEvent

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_grouped_mm")
CORE = "aten::_scaled_dot_product"
"""Prefix of the fused attention kernels' names."""

_MARK, _CONTINUED = "@", "+"
_NODE = "autograd::engine::evaluate_function: "
_SUMS = ("aten::add", "aten::add_")
_OF_WEIGHTS = ("@weights.", f"{_NODE}torch::autograd::AccumulateGrad", "FSDP::", "fsdp::", "Optimizer.")
_COLLECTIVES = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")


class Work(NamedTuple):
    """An operation with its own time [s]; for a matrix product or an attention kernel, that of its children, too."""

    event: TraceEvent
    time_s: float


class Node(NamedTuple):
    """Work of a backward node, and the operation that created the node."""

    name: str
    made_by: TraceEvent
    works: list[Work]


@dataclass(kw_only=True, slots=True, eq=False)
class Execution:
    """One execution of a marked operator, and of its gradient.

    Attributes:
        name: Block and role of the operator.
        forward: Work of the forward pass.
        backward: Work of the autograd nodes that the forward pass created.
        fork: Sum of the two gradients of a tensor that both a norm and the residual read.
    """

    name: str
    forward: list[Work] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    fork: list[Work] = field(default_factory=list)

    @property
    def block(self) -> str:
        """Block of the model that the operator belongs to."""
        return self.name.partition(".")[0]

    @property
    def role(self) -> str:
        """Role of the operator in its block."""
        return self.name.rpartition(".")[2]

    @property
    def products(self) -> list[TraceEvent]:
        """Matrix products of the forward pass."""
        return [work.event for work in self.forward if work.event.name in PRODUCTS]


class _Place(NamedTuple):
    """Context of an event: its execution, its backward node, and whether it belongs to a recomputation."""

    execution: Execution | None = None
    node: Node | None = None
    is_again: bool = False


class TraceReader:
    """Reader of the events of one rank.

    Attributes:
        executions: Executions in the order of their start.
        unexplained: Time of all other operations by pass and name [s].
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
        """Assign an event and its children to the executions they belong to."""
        if event.name.startswith((*_COLLECTIVES, *_OF_WEIGHTS)):
            return
        if event.name.startswith(_NODE):
            self._visit_node(event)
            return
        if event.name.startswith(_MARK):
            # A range inside a backward node can only come from a recomputation.
            is_again = place.is_again or place.node is not None
            place = _Place(execution=self._find_execution(event), is_again=is_again)
        elif place.node is not None and event.sequence >= 0 and not _is_part_of_node(event, place.node):
            # A sequence number inside a node means that a recomputation has begun (see the module).
            place = _Place(is_again=True)
        elif place.node is None and event.sequence >= 0 and not place.is_again:
            # Remember which operation creates the node of this sequence number.
            self._makers[event.thread, event.sequence] = place.execution, event
        is_whole = event.name in PRODUCTS or event.name.startswith(CORE)
        if event.is_operation:
            self._add(Work(event, sum(part.own_s for part in event.whole()) if is_whole else event.own_s), place)
        if not is_whole:
            self._visit_all(event.children, place)

    def _visit_all(self, events: Sequence[TraceEvent], place: _Place) -> None:
        for event in events:
            self._visit(event, place)

    def _find_execution(self, mark: TraceEvent) -> Execution:
        name = mark.name.removeprefix(_MARK)
        key = mark.thread, name.removesuffix(_CONTINUED)
        if not name.endswith(_CONTINUED):
            self._begun[key] = Execution(name=name)
            self.executions.append(self._begun[key])
        return self._begun[key]

    def _visit_node(self, event: TraceEvent) -> None:
        """Assign a backward node's work to the execution that created the node."""
        name = event.name.removeprefix(_NODE)
        execution, made_by = self._makers.get((event.forward_thread, event.sequence), (None, event))
        node = Node(name, made_by, [])
        self._last_again = None
        for child in event.children:
            is_kept = child.name in _SUMS and self._claim_sum(Work(child, child.own_s), execution)
            if not is_kept:
                self._visit(child, _Place(execution=execution, node=node))
        if execution is not None:
            execution.backward.append(node)
        if self._last_again is not None:
            # The recomputation's last product was stopped before it ran (see the module).
            stopped, work = self._last_again
            if stopped is not None and work.event.name in PRODUCTS:
                stopped.forward.remove(work)

    def _claim_sum(self, work: Work, execution: Execution | None) -> bool:
        """Assign a sum that the engine forms after a node; return whether it lies outside of the node's operator.

        The first sum after the nodes of a layer's norm adds the residual's gradient. A sum after a product belongs to
        no operator.
        """
        if execution is None:
            return False
        # Only the first sum after a layer's norm adds the residual's gradient; the head's norm has no residual beside
        # it.
        if execution.role == "norm" and execution.block != "head" and not execution.fork:
            execution.fork.append(work)
            return True
        if execution.products:
            self.unexplained[Phase.BACKWARD, work.event.name] += work.time_s
            return True
        return False

    def _add(self, work: Work, place: _Place) -> None:
        """Add an operation to its execution, or to the unexplained time."""
        if place.is_again and work.event.sequence >= 0:
            self._last_again = place.execution, work
        if place.execution is None:
            phase = Phase.FORWARD if place.node is None else Phase.BACKWARD
            self.unexplained[phase, work.event.name] += work.time_s
        elif place.node is None:
            place.execution.forward.append(work)
        else:
            place.node.works.append(work)


def _is_part_of_node(event: TraceEvent, node: Node) -> bool:
    """Return whether an event with a sequence number is the node's own: its body, or its function on gradients."""
    return event.name in (node.name, node.name.removesuffix("Backward"))
