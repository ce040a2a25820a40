"""Nested events of one rank's profile, as data that tests can write down without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """Operation of torch, node of its backward pass, or range that the program has marked.

    Attributes:
        name: Name of the event in the profiler.
        own_s: Time of this event outside of `children` [s]: time of its kernels on a GPU, else wall clock.
        shapes: Shapes of the operands; empty for operands that are no tensors.
        thread: Number of the thread that ran the event.
        sequence: Sequence number. A node has its own. An operation outside of nodes has the number of the next node,
            so the last operation with a number has made that node. All other events have -1.
        forward_thread: Number of the thread that has made a node.
        children: Events inside this one, in the order of their start.
    """

    name: str
    own_s: float = 0.0
    shapes: tuple[Shape, ...] = ()
    thread: int = 1
    sequence: int = -1
    forward_thread: int = 0
    children: tuple[TraceEvent, ...] = ()

    @property
    def is_operation(self) -> bool:
        """Whether the event is an operation of a library, such as `aten::mm`."""
        return "::" in self.name

    def elements(self, operand: int = 0) -> int:
        """Return the number of elements of one operand."""
        return math.prod(self.shapes[operand])

    def whole(self) -> Iterator[TraceEvent]:
        """Yield the event and all events inside it, in the order of their start."""
        yield self
        for child in self.children:
            yield from child.whole()
