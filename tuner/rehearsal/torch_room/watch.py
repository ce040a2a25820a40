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

from tuner.rehearsal.both_rooms.places import place_in_program
from tuner.rehearsal.torch_room import known_values
from tuner.rehearsal.torch_room.invented import ASKED
from tuner.rehearsal.torch_room.order import Order, moved_bytes
from tuner.rehearsal.torch_room.repeats import VIEWS, Known, can_repeat, key_of, learned, view_of
from tuner.rehearsal.torch_room.storages import Storages

_WAITS = ("wait_tensor", "barrier", "monitored_barrier_")
_DEVICE = torch.ops.prim.device.default
_OWN = (FakeTensor, torch.Tensor, torch.nn.Parameter)
"""Types of tensors that wrap no others."""
_PAIRS = ("send", "recv_", "recv_any_source_")


class NoStandInError(Exception):
    """A kernel is called that has no stand-in."""


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """Kind of collective; compared by identity, since its ranks may be thousands.

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


def as_lists(collectives: Counter[Collective]) -> list[tuple[str, int, tuple[int, ...], int, int]]:
    """Return name, bytes, ranks, peer and number of calls of each kind of collective, the most frequent first."""
    found: Counter[tuple[str, int, tuple[int, ...], int]] = Counter()
    for one, count in collectives.items():
        found[one.name, one.size, one.ranks, one.peer] += count
    return [(*one, count) for one, count in found.most_common()]


class WatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's class has no types
    """Records in a `Watch` every operator that runs under it."""

    supports_higher_order_operators = True

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.watch = watch
        self._resize = torch.UntypedStorage.resize_
        self._repeats: dict[Any, bool] = {}
        self._known: dict[tuple[Any, ...], Known] = {}
        self._attributes: dict[str, Any] = {}
        self._collectives: dict[tuple[Any, ...], Collective] = {}

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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and the wrapper that skips compilers takes time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on tensors without data, or make its results again, and record it.

        An operator on tensors that wrap others, such as those of DTensor, is left to them: the operators on what they
        wrap come here.
        """
        if func is _DEVICE:
            return args[0].device
        if any(kind not in _OWN for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if _PAUSES:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return self._run_kernel(func, args, kwargs)
        view = self._view(func, args, kwargs) if func in VIEWS and self._attributes else None
        if view is not None:
            return view
        can_repeat_it = self._repeats.get(func)
        if can_repeat_it is None:
            can_repeat_it = self._repeats[func] = self.watch.order is None and func not in VIEWS and can_repeat(func)
        return (self._run_or_repeat if can_repeat_it else self._run)(func, args, kwargs)

    def _run_or_repeat(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make the results of an operator again if they are known, or run it and learn them."""
        tensors: list[Any] = []
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            key = key_of(func, args, kwargs, tensors)
            if known_values.are_known(tensors) or (not tensors and known_values.makes_values(func)):
                key = None
            known = self._known.get(key) if key is not None else None
            results = known.again(tensors) if known is not None and known.made is not None else None
            if known is not None and results is not None:
                return self._record_again(known, results)
        result = self._run(func, args, kwargs)
        if key is not None and known is None:
            self._learn(key, func, args, kwargs, tensors, result)
        return result

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a view of a tensor without data, whose storage is recorded; None if it needs more."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            view = view_of(func, args, kwargs, self._attributes)
            if view is not None:
                self.watch.storages.see_one(view)
            return view

    def _record_again(self, known: Known, results: list[Any]) -> Any:
        """Record an operator whose results were made again, and return them."""
        storages = self.watch.storages
        for one in results:
            if type(one) is FakeTensor:
                storages.see_one(one)
        self._count(known.noted)
        return known.sequence(results) if known.sequence is not None else results[0]

    def _learn(self, key: Any, func: Any, args: Any, kwargs: Any, tensors: list[Any], result: Any) -> None:
        """Keep how the results of an operator are made, unless it changed the shapes of its arguments."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if key == key_of(func, args, kwargs, []):
                known = learned(result, tensors, self._noted(func, args))
                if known is not None:
                    self._known[key] = known
                    self._attributes = self._attributes or known.attributes

    def _noted(self, func: Any, args: Any) -> Any:
        """Return what is recorded of the call of an operator; None for views."""
        if func.is_view or func.namespace in ("prim", "c10d", "_c10d_functional"):
            return None
        return str(func), tuple(tuple(one.shape) for one in args if isinstance(one, torch.Tensor))

    def _run_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that takes functions, such as FlexAttention's, and record it."""
        result = func(*args, **kwargs)
        self.watch.storages.see([leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)])
        self.watch.note(func.name(), *(tuple(one.shape) for one in args if isinstance(one, torch.Tensor)))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors without data, and record it."""
        if func.namespace in ("c10d", "_c10d_functional"):
            answer = self._answer_collective(func, args)
            if answer is not None:
                return answer
        if func in ASKED:
            try:
                return known_values.asked(func, args)
            except Exception:  # noqa: BLE001 - whatever fails here asks for data that do not exist
                self.watch.invented[place_in_program()] += 1
                return ASKED[func](args[0])
        result = known_values.run(func, args, kwargs)
        self.watch.storages.see([leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)])
        noted, order = self._noted(func, args), self.watch.order
        if order is None:
            self._count(noted)
        elif noted is not None:
            self.watch.note(noted[0], *noted[1], moved=moved_bytes(noted[0], (args, kwargs), result))
        elif func.namespace == "_c10d_functional":
            order.functional(func._schema.name, args, result)
        return result

    def _count(self, noted: Any) -> None:
        """Record the call of an operator, unless it is none that is recorded."""
        if noted is not None:
            self.watch.operators[noted] += 1

    def _answer_collective(self, func: Any, args: Any) -> Any:
        """Record a collective; return its result where that is clear, since PyTorch takes long, or has no kernel."""
        name = func._schema.name.split("::")[1]
        if name in _WAITS:
            return None
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            size = max((_num_bytes(one) for one in args if isinstance(one, list | tuple | torch.Tensor)), default=0)
        if name == "all_gather_into_tensor":  # of the functional collectives, whose result is not an argument
            size *= args[1]
        group = next((found for found in map(_group, args) if found is not None), None)
        key = (name, size, "" if group is None else group.group_name, args[2] if name in _PAIRS[:2] else -1)
        kind = self._collectives.get(key)
        if kind is None:
            ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
            peer = ranks[args[2]] if name in _PAIRS[:2] and len(args) > 2 else -1
            kind = self._collectives[key] = Collective(name, size, ranks, peer)
        self.watch.collectives[kind] += 1
        if self.watch.order is not None:
            self.watch.order.collective(name, size, kind.ranks, kind.peer)
        if func.namespace != "c10d" or not func._schema.returns:
            return None
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if "coalesced" not in name and not all(type(one) is FakeTensor and one.constant is None for one in given):
            return None
        self.watch.storages.see([leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, FakeTensor)])
        work = FakeWork().boxed()  # all return their first argument, work that is done, or both
        return work if len(func._schema.returns) == 1 else (args[0], work)


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
