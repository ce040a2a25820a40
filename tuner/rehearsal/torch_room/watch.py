"""Record of a step: operators with their shapes, collectives with their bytes and ranks, and live storages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tuner.rehearsal.torch_room.invented import ASKED, place_in_program
from tuner.rehearsal.torch_room.known_values import follow_copy
from tuner.rehearsal.torch_room.order import Order, moved_bytes
from tuner.rehearsal.torch_room.storages import Storages

_WAITS = ("wait_tensor", "barrier", "monitored_barrier_")
_PAIRS = ("send", "recv_", "recv_any_source_")


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
        order: Order of the step; None where nobody asks for its time.
    """

    storages: Storages = field(default_factory=Storages)
    operators: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = field(default_factory=Counter)
    collectives: Counter[Collective] = field(default_factory=Counter)
    invented: Counter[str] = field(default_factory=Counter)
    order: Order | None = None

    def begin_step(self) -> None:
        """Forget the operators and collectives before a step, and look for its peak."""
        self.operators.clear()
        self.collectives.clear()
        self.storages.begin_step()
        if self.order is not None:
            self.order.begin_step()

    def note(self, kernel: str, *shapes: tuple[int, ...], moved: int = 0) -> None:
        """Record a kernel that no operator of PyTorch stands for, with the bytes that it moves if they are known."""
        self.operators[kernel, shapes] += 1
        if self.order is not None:
            self.order.operator(kernel, shapes, moved)


class WatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's class has no types
    """Records in a `Watch` every operator that runs under it."""

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
        """Run an operator on tensors without data, and record it."""
        kwargs = kwargs or {}
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
            moved = 0 if self.watch.order is None else moved_bytes(str(func), (args, kwargs), result)
            self.watch.note(
                str(func), *(tuple(one.shape) for one in args if isinstance(one, torch.Tensor)), moved=moved
            )
        elif self.watch.order is not None and func.namespace == "_c10d_functional":
            self.watch.order.functional(func._schema.name, args, result)
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
        if self.watch.order is not None:
            self.watch.order.collective(name, size, ranks, peer)
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
