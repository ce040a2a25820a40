"""The events of one rank's profile as they nest, as data that tests can write down without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """An operation of torch, a node of its backward pass, or a range that the program has marked.

    Attributes:
        name: As the profiler calls it.
        own_s: Seconds of this event outside of `children`: of its kernels on a GPU, else of the wall clock.
        shapes: Of its operands; empty for those that are no tensors.
        thread: Where it ran.
        sequence: Of an operation outside of backward nodes the number that the next node gets, so that the last
            operation with a number has made the node; of a node its own; -1 of all else.
        forward_thread: Of a node the thread that has made it.
        children: In the order of their begin.
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
        """Whether it is an operation of a library, such as `aten::mm`."""
        return "::" in self.name

    def elements(self, operand: int = 0) -> int:
        """Elements of one operand."""
        return math.prod(self.shapes[operand])

    def whole(self) -> Iterator[TraceEvent]:
        """The event and all that it contains, in the order of their begin."""
        yield self
        for child in self.children:
            yield from child.whole()
