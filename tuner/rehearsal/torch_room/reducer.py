"""DDP's reducer of gradients, whose C++ wants data: buckets, their sums over the ranks, and what they need.

`DistributedDataParallel` above it is PyTorch's own. Order of buckets and copies follow torch/csrc/distributed/c10d's
reducer.cpp and comm.cpp (PyTorch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import distributed as dist

from tuner.rehearsal.torch_room.storages import GRADIENTS, Storages
from tuner.rehearsal.torch_room.watch import NoStandInError

_INDICES = torch.int32
"""Type of the numbers by which rank 0 tells others its buckets, and ranks each other which parameters they used."""


class _Silent:
    """Stands for DDP's logger: every method can be called."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Bucket:
    """Gradients that are summed at once.

    Attributes:
        indices: Numbers of its parameters.
        flat: Storage of all.
        views: Part of each parameter, in its shape.
        pending: Number of parameters whose gradient is not there yet.
    """

    def __init__(self, number: int, is_last: bool, indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        self.indices, self.pending = list(indices), len(indices)
        self._number, self._is_last = number, is_last
        self._parameters = [parameters[index] for index in indices]
        first = self._parameters[0]
        self.flat = torch.empty(sum(one.numel() for one in self._parameters), dtype=first.dtype, device=first.device)
        self.views = self._views()

    def _views(self) -> list[torch.Tensor]:
        flat: Any = self.flat
        parts = flat.split([one.numel() for one in self._parameters])
        return [part.view(one.shape) for part, one in zip(parts, self._parameters, strict=True)]

    def index(self) -> int:
        """Return the bucket's number."""
        return self._number

    def is_last(self) -> bool:
        """Return whether it is the last of a backward pass."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return the storage of all gradients."""
        return self.flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Exchange the storage of all gradients."""
        self.flat, self.views = buffer, self._views()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradient of each parameter."""
        return self.views

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return self._parameters


class Reducer:
    """Sums gradients over the ranks while a backward pass makes them."""

    storages: Storages
    """Live storages of the rank."""

    def __init__(
        self,
        params: list[torch.Tensor],
        bucket_indices: list[list[int]],
        per_bucket_size_limits: list[int],  # noqa: ARG002 - the signature of PyTorch's
        process_group: Any,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 << 20,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Any = None,  # noqa: ARG002
        first_bucket_bytes: int = 1 << 20,
        skip_all_reduce_unused_params: bool = False,  # noqa: ARG002
        use_python_reducer: bool = False,  # noqa: ARG002
        limits: Sequence[int] = (),
        *_: Any,
    ) -> None:
        if any(expect_sparse_gradients):
            raise NoStandInError("the rehearsal knows no sparse gradients of DDP")
        self._parameters, self._group = params, process_group
        self._limits = list(limits) or [first_bucket_bytes, bucket_bytes_cap]
        self._finds_unused, self._is_view = find_unused_parameters, gradient_as_bucket_view
        self._is_static = self._was_static = self._is_rebuilt = self._expects = self._is_marked = False
        self._hook: tuple[Any, Any] | None = None
        self._ready: list[int] = []
        self._unused: list[int] = []
        self._futures: list[tuple[Bucket, Any]] = []
        self._post: list[Any] = []
        self._next = 0
        self._make_buckets(bucket_indices)
        hooked: list[Any] = params
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._made(index))
            for index, parameter in enumerate(hooked)
        ]

    def prepare_for_forward(self) -> None:
        """Do nothing: no times are taken."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Expect gradients from a backward pass that begins at some outputs."""
        self._expects, self._is_marked, self._next = True, False, 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.indices)
        self._unused = []
        if self._finds_unused and not self._is_static:
            used = _accumulated(outputs)
            self._unused = [index for index, one in enumerate(self._parameters) if id(one) not in used]

    def _rebuild_buckets(self) -> bool:
        """Order the buckets as the first backward pass made its gradients; return whether that was now."""
        if self._is_rebuilt or not self._ready or (self._finds_unused and not self._is_static):
            return False
        ordered = [self._parameters[index] for index in self._ready]
        found, _ = dist._compute_bucket_assignment_by_size(ordered, self._limits, [], self._ready)  # type: ignore[attr-defined]
        for numbers in (len(self._parameters) + 1 + len(found), 2 * len(found)):  # sync_bucket_indices
            dist.broadcast(torch.empty(numbers, dtype=_INDICES), group_src=0, group=self._group)
        self._is_rebuilt = True
        self._make_buckets(found)
        self._ready = []
        return True

    def _make_buckets(self, indices: Sequence[Sequence[int]]) -> None:
        self._buckets = [
            Bucket(number, number == len(indices) - 1, one, self._parameters) for number, one in enumerate(indices)
        ]
        self._place = {
            index: (bucket, position) for bucket in self._buckets for position, index in enumerate(bucket.indices)
        }
        self.storages.assign([bucket.flat for bucket in self._buckets], GRADIENTS)
        for index, parameter in enumerate(self._parameters) if self._is_view else ():
            if parameter.grad is not None:
                bucket, position = self._place[index]
                parameter.grad = bucket.views[position].copy_(parameter.grad)

    def _made(self, index: int) -> None:
        """Take the gradient of a parameter."""
        if not self._expects:
            return
        if self._is_static and not self._was_static:  # the first backward pass is reduced at its end
            return
        if not self._is_rebuilt and (self._is_static or not self._finds_unused):
            self._ready.append(index)
        if not self._is_marked:
            self._is_marked = True
            for unused in self._unused:
                self._take(unused)
        self._take(index)

    def _take(self, index: int) -> None:
        bucket, position = self._place[index]
        gradient, view = self._parameters[index].grad, bucket.views[position]
        if gradient is None:
            view.zero_()
        elif _is_same(gradient, view):
            view.div_(self._group.size())
        else:
            torch.mul(gradient.detach(), 1 / self._group.size(), out=view)
            if self._is_view:
                self._parameters[index].grad = view
        bucket.pending -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].pending == 0:
            self._send(self._buckets[self._next])
            self._next += 1
        if self._next == len(self._buckets):
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _send(self, bucket: Bucket) -> None:
        if self._hook is None:
            dist.all_reduce(bucket.flat, group=self._group)
            self._futures.append((bucket, None))
            return
        state, hook = self._hook
        self._futures.append((bucket, hook(state, bucket)))

    def _finish(self) -> None:
        """Give each parameter its sum."""
        self._expects, self._was_static = False, True
        if self._finds_unused and not self._is_static:
            dist.all_reduce(torch.empty(len(self._parameters), dtype=_INDICES), group=self._group)
        for bucket, future in self._futures:
            if future is not None:
                found = future.wait()
                bucket.set_buffer(found[0] if isinstance(found, list | tuple) else found)
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                parameter = self._parameters[index]
                if self._is_view:
                    parameter.grad = view if parameter.grad is not None else None
                elif parameter.grad is not None:
                    parameter.grad.copy_(view)
        self._futures.clear()
        for future in self._post:
            future.wait()
        self._post.clear()

    def _delay_all_reduce(self) -> None:
        """Reduce all gradients at the end of a static graph's first backward pass."""
        self._was_static = True
        dist.all_reduce(torch.empty(len(self._parameters), dtype=_INDICES), group=self._group)
        for index in range(len(self._parameters)):
            self._take(index)

    def _set_static_graph(self) -> None:
        self._is_static = True

    def _install_post_backward_futures(self, futures: Iterable[Any]) -> None:
        self._post.extend(futures)

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __getattr__(self, name: str) -> Any:
        """Refuse what has no stand-in by its name."""
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("set_logger", "_check_reducer_finalized", "_set_ddp_runtime_logging_sample_rate"):
            return lambda *_: None

        def missing(*_: Any, **__: Any) -> Any:
            raise NoStandInError(f"the rehearsal knows no {name} of DDP's reducer")

        return missing


def stand_in_for_reducer(storages: Storages) -> None:
    """Let DDP and FSDP wrap modules whose tensors have no data."""
    module: Any = dist
    Reducer.storages = storages
    module.Reducer, module.Logger = Reducer, _Silent
    module._verify_params_across_processes = lambda *_: None
    module._broadcast_coalesced = _broadcast_coalesced
    module._register_comm_hook = _register
    builtin = module.BuiltinCommHookType
    module._register_builtin_comm_hook = lambda reducer, kind: _register(reducer, kind == builtin.FP16_COMPRESS, _sum)


def _register(reducer: Reducer, state: Any, hook: Any) -> None:
    reducer._hook = state, hook


def _sum(is_half: bool, bucket: Bucket) -> Any:
    """Sum a bucket, in half precision if asked, as the hooks of default_comm_hooks.cpp do."""
    sent = bucket.flat.to(torch.float16) if is_half else bucket.flat
    dist.all_reduce(sent)
    done: Any = torch.futures.Future()
    done.set_result(bucket.flat.copy_(sent) if is_half else sent)
    return done


def _broadcast_coalesced(group: Any, tensors: Sequence[torch.Tensor], most_bytes: int, source: int = 0) -> None:
    """Send tensors from one rank to all, those of one type together in messages of a size."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor.detach())
    for same in by_type.values():
        found, _ = dist._compute_bucket_assignment_by_size(same, [most_bytes])  # type: ignore[attr-defined]
        for indices in found:
            flat = torch.cat([same[index].reshape(-1) for index in indices])
            dist.broadcast(flat, group_src=source, group=group)


def _accumulated(outputs: Sequence[torch.Tensor]) -> set[int]:
    """Return the identities of the parameters from which outputs were computed."""
    found: set[int] = set()
    left: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        with suppress(AttributeError):
            found.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return found


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
