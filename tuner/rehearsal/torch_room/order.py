"""Order of operators and collectives in a step, and who waits for which collective, for estimates of its time.

Streams of the program are not told apart: what it puts on several of them runs one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

_PICKING = ("aten.embedding", "aten.index", "aten.index_select", "aten.gather")
"""Operators that read no more of a tensor than they return."""
_CALLS = (
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "send"),
)
"""Methods of a process group that return what one may wait for."""


@dataclass(slots=True)
class Order:
    """Order of one step.

    Attributes:
        kinds: Number of each kind of operator (name, shapes, bytes moved) and of collective (name, bytes, ranks, peer).
        steps: What ran: the number of a kind, or -1 minus the number of the collective in the step that is waited for.
        collectives: Number of collectives so far.
        fused: Depth of functions that run as one kernel on a device; their operators are left out.
    """

    kinds: dict[tuple[Any, ...], int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    collectives: int = 0
    fused: int = 0
    _works: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _results: dict[int, int] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Forget the step before."""
        self.steps, self.collectives = [], 0
        self._works.clear()
        self._results.clear()

    def operator(self, name: str, shapes: tuple[tuple[int, ...], ...], moved: int) -> None:
        """Record an operator, with the bytes that it reads and writes; 0 where its shapes say them."""
        if not self.fused:
            self.steps.append(self.kinds.setdefault((name, shapes, moved), len(self.kinds)))

    def collective(self, name: str, size: int, ranks: tuple[int, ...], peer: int) -> None:
        """Record a collective as it begins."""
        self.steps.append(self.kinds.setdefault((name, size, ranks, peer), len(self.kinds)))
        self.collectives += 1

    def waited(self, number: int) -> None:
        """Record that all that follows waits for a collective."""
        self.steps.append(-1 - number)

    def functional(self, name: str, given: tuple[Any, ...], result: Any) -> None:
        """Record what the last functional collective returned, or the wait for such a tensor."""
        if name.endswith("wait_tensor"):
            number = self._results.pop(_storage(given[0]), None)
            if number is not None:
                self.waited(number)
        elif isinstance(result, torch.Tensor):
            self._results[_storage(result)] = self.collectives - 1

    def follow_works(self) -> None:
        """Record waits for what the calls of process groups return."""
        group: Any = torch._C._distributed_c10d.ProcessGroup
        for name in _CALLS:
            if hasattr(group, name):
                setattr(group, name, self._counted(getattr(group, name)))
        work: Any = dist.Work
        wait = work.wait

        def waited(own: Any, *given: Any, **named: Any) -> Any:
            number, _ = self._works.pop(id(own), (None, None))
            if number is not None:
                self.waited(number)
            return wait(own, *given, **named)

        work.wait = waited

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Remember which collective a call's result stands for; it is kept, so that no other gets its place."""

        def called(*given: Any, **named: Any) -> Any:
            before = self.collectives
            work = call(*given, **named)
            if work is not None and self.collectives > before:
                self._works[id(work)] = (self.collectives - 1, work)
            return work

        return called

    @contextlib.contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Leave out the operators inside, which are one kernel on a device."""
        self.fused += 1
        try:
            yield
        finally:
            self.fused -= 1

    def fuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is recorded as one operator, which reads its arguments and writes its results."""

        def fused(*given: Any, **named: Any) -> Any:
            with self.one_kernel():
                found = function(*given, **named)
            self.operator("fused", (), num_bytes((given, named)) + num_bytes(found))
            return found

        return fused


def moved_bytes(name: str, given: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    if name.rsplit(".", 1)[0] in _PICKING:
        return 2 * num_bytes(result)
    if name.startswith("aten.index_put"):
        return 2 * num_bytes(given[0][2])
    return num_bytes(given) + num_bytes(result)


def num_bytes(values: Any) -> int:
    """Return the bytes of all tensors among some values."""
    return sum(one.numel() * one.element_size() for one in tree_leaves(values) if isinstance(one, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
