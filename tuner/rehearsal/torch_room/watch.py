"""Record of a step: operators with their shapes, collectives with their bytes and ranks, and live storages."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tuner.rehearsal.torch_room.invented import ASKED, place_in_program
from tuner.rehearsal.torch_room.known_values import follow_copy
from tuner.rehearsal.torch_room.storages import Storages

_WAITS = ("wait_tensor", "barrier", "monitored_barrier_")
_OWN = (FakeTensor, torch.Tensor, torch.nn.Parameter)
"""Types of tensors that wrap no others."""
_PAIRS = ("send", "recv_", "recv_any_source_")


class NoStandInError(Exception):
    """A kernel is called that has no stand-in."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Kind of collective.

    Attributes:
        name: Name of PyTorch's operator, such as `_allgather_base_`.
        size: Bytes of its largest tensor on this rank, gathered ones included.
        ranks: Ranks of its group.
        peer: Other rank of a message; -1 for a collective.
    """

    name: str
    size: int
    ranks: tuple[int, ...]
    peer: int = -1


@dataclass(slots=True)
class Watch:
    """Record of one rank.

    Attributes:
        storages: Live storages.
        operators: Number of calls of each operator with its shapes, since the last step began.
        collectives: Number of calls of each kind of collective, since the last step began.
        invented: Number of times that a place in the program asked for a number that tensors without data do not have.
    """

    storages: Storages = field(default_factory=Storages)
    operators: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    invented: Counter[str] = field(default_factory=Counter)

    def begin_step(self) -> None:
        """Forget the operators and collectives before a step, and look for its peak."""
        self.operators.clear()
        self.collectives.clear()
        self.storages.begin_step()

    def note(self, kernel: str, *shapes: tuple[int, ...]) -> None:
        """Record a kernel that no operator of PyTorch stands for."""
        self.operators[kernel, shapes] += 1


_PAUSES: list[bool] = []
"""Not empty while nothing is recorded."""


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function run tensors that no device would have, such as those of which it wants the shape alone."""

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        _PAUSES.append(True)
        try:
            return function(*given, **named)
        finally:
            _PAUSES.pop()

    return run


class WatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's class has no types
    """Records in a `Watch` every operator that runs under it."""

    supports_higher_order_operators = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.watch = watch
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> WatchMode:
        storages, resize = self.watch.storages, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            storages.resized(storage)
            return result

        setattr(torch.UntypedStorage, "resize_", resized)  # noqa: B010 - a type has no such attribute for mypy
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010 - as above
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on tensors without data, and record it.

        An operator on tensors that wrap others, such as those of DTensor, is left to them: the operators on what they
        wrap come here.
        """
        if any(kind not in _OWN for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if _PAUSES:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return self._run_kernel(func, args, kwargs)
        return self._run(func, args, kwargs)

    def _run_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that takes functions, such as FlexAttention's, and record it."""
        result = func(*args, **kwargs)
        self.watch.storages.see([leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)])
        self.watch.note(func.name(), *(tuple(one.shape) for one in args if isinstance(one, torch.Tensor)))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on plain tensors, and record it."""
        if func.namespace in ("c10d", "_c10d_functional"):
            answer = self._answer_collective(func, args)
            if answer is not None:
                return answer
        if func in ASKED:
            try:
                return func(*args, **kwargs)
            except Exception:  # noqa: BLE001 - whatever fails here asks for data that do not exist
                self.watch.invented[place_in_program()] += 1
                return ASKED[func](args[0])
        result = func(*args, **kwargs)
        if args:
            follow_copy(func, args[0], result)
        self.watch.storages.see([leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)])
        if not func.is_view and func.namespace not in ("prim", "c10d", "_c10d_functional"):
            self.watch.note(str(func), *(tuple(one.shape) for one in args if isinstance(one, torch.Tensor)))
        return result

    def _answer_collective(self, func: Any, args: Any) -> Any:
        """Record a collective; return its result where PyTorch has no kernel for tensors without data."""
        name = func._schema.name.split("::")[1]
        if name in _WAITS:
            return None
        group = next((found for found in map(_group, args) if found is not None), None)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        size = max((_num_bytes(one) for one in args if isinstance(one, list | tuple | torch.Tensor)), default=0)
        if name == "all_gather_into_tensor":  # of the functional collectives, whose result is not an argument
            size *= args[1]
        peer = ranks[args[2]] if name in _PAIRS[:2] and len(args) > 2 else -1
        self.watch.collectives[Collective(name, size, ranks, peer)] += 1
        if func.namespace == "c10d" and "coalesced" in name:
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        return None


def _num_bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tree_leaves(tensors) if isinstance(one, torch.Tensor))


def _group(value: Any) -> Any:
    """Return the process group that an argument of a collective is, or names; None for any other."""
    module: Any = dist.distributed_c10d
    try:
        if isinstance(value, torch.ScriptObject):
            return ProcessGroup.unbox(value)
        if isinstance(value, str):
            return module._resolve_process_group(value)
    except Exception:  # noqa: BLE001 - another script object or text, such as the name of an operation
        return None
    return None
