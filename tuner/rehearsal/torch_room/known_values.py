"""Values of small tensors that no data of a program decide: positions, lengths, indices of a sampler.

A rehearsal computes them beside the tensors without data, as long as every argument is known. How many elements a
mask selects is known where the framework knows it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_MOST_WHOLE, _MOST_FLOATING = 1 << 22, 256
"""Largest number of elements of a tensor whose values are kept: of whole numbers, and of others."""
_REAL: dict[int, torch.UntypedStorage] = {}
"""Storage with the values, by the address of the storage that has none."""
_SELECTED: list[int] = []
"""Numbers of elements that masks select, the present one last."""
_EMPTY, _EMPTY_STRIDED, _FULL = torch.empty, torch.empty_strided, torch.full
"""PyTorch's own functions, which programs may replace."""
_NO_VALUES = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted", "resize_")
"""Operators whose result has no values, whatever they are given."""
_TRUE: set[int] = set()
"""Storages, by their addresses, of truth values that are true in all places, however many they are."""
_STAY_TRUE = (
    *(torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten._reshape_copy.default),
    *(torch.ops.aten.all.default, torch.ops.aten.any.default),
)
"""Operators whose result is true if their first argument is true in all places."""


def shared_numbers(shape: tuple[int, ...], total: int) -> torch.Tensor:
    """Make a tensor that stands for whole numbers that add up to a total, none more than one above another."""
    found = _EMPTY(shape, dtype=torch.long)
    with _disable_current_modes():
        count = math.prod(shape)
        values = _FULL((count,), total // count, dtype=torch.long, device="cpu")
        values[: total % count] += 1
        _keep(found, values.reshape(shape))
    return found


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's values; None if they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor if type(tensor) is torch.Tensor and tensor.device.type == "cpu" else None
    storage = _REAL.get(tensor.untyped_storage()._cdata)
    if storage is None:
        return None
    with _disable_current_modes():
        made = _EMPTY(0, dtype=tensor.dtype, device="cpu")
        return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def are_known(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether something is known of the values of one of several tensors."""
    if not (_REAL or _TRUE):
        return False
    storages = (tensor.untyped_storage()._cdata for tensor in tensors)
    return any(storage in _REAL or storage in _TRUE for storage in storages)


def makes_values(func: Any) -> bool:
    """Return whether what an operator makes of no tensors has values."""
    return func._schema.name.split("::")[1] not in _NO_VALUES


def asked(func: Any, args: Any) -> Any:
    """Return what an operator returns that makes no tensor, from the values of its arguments if they are known."""
    found = [values_of(one) if isinstance(one, torch.Tensor) else one for one in args]
    if any(one is None for one in found):
        return func(*args)
    with _disable_current_modes():
        return func(*found)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on tensors without data, and on their values where all are known."""
    if (chosen := selected(func, args)) is not None:
        return chosen
    given = list(_tensors(args, kwargs))
    if func in _STAY_TRUE and is_true(given[0]):
        return always_true(func(*args, **kwargs))
    if given and not any(not isinstance(one, FakeTensor) or one.untyped_storage()._cdata in _REAL for one in given):
        return func(*args, **kwargs)
    is_known = all(_is_kept(one) and values_of(one) is not None for one in given)
    if not is_known or func.namespace not in ("aten", "prims") or not makes_values(func):
        if func._schema.is_mutable or func.namespace == "c10d":
            for one in given:
                _REAL.pop(one.untyped_storage()._cdata, None)
        return func(*args, **kwargs)
    return _run_known(func, args, kwargs)


def _run_known(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on tensors without data, and on their values, which are all known."""
    try:
        result = func(*args, **kwargs)
    except DynamicOutputShapeException:
        with _disable_current_modes():
            found = func(*_values(args), **_values(kwargs))
        return tree_map(lambda one: _without_data(one) if isinstance(one, torch.Tensor) else one, found)
    made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
    if all(isinstance(one, FakeTensor) and _is_kept(one) for one in made):
        _follow(func, args, kwargs, result)
    return result


def always_true(tensor: torch.Tensor) -> torch.Tensor:
    """Let truth values be true in all places, and return them."""
    storage = tensor.untyped_storage()
    _TRUE.add(storage._cdata)
    weakref.finalize(storage, _TRUE.discard, storage._cdata)
    return tensor


def is_true(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is known to be true in all places."""
    return tensor.untyped_storage()._cdata in _TRUE


@contextmanager
def selecting(count: int) -> Iterator[None]:
    """Let every mask inside select `count` elements."""
    _SELECTED.append(count)
    try:
        yield
    finally:
        _SELECTED.pop()


def count_selected() -> int | None:
    """Return how many elements a mask selects here; None if that is not known."""
    return _SELECTED[-1] if _SELECTED else None


def selected(func: Any, args: Any) -> torch.Tensor | None:
    """Return what an operator selects by a mask whose number of elements is known; None for others."""
    if func is not torch.ops.aten.masked_select.default or not _SELECTED:
        return None
    return torch.empty((_SELECTED[-1],), dtype=args[0].dtype)


def answer_lists() -> None:
    """Let `tolist` and `numpy` return the values that are known, and one answer in all places for others."""
    kind: Any = FakeTensor
    kind.tolist = lambda own: _answered(own).tolist()
    kind.numpy = lambda own, **_: _answered(own.detach()).numpy()


def _answered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor, or as many times what its first element is said to be."""
    found = values_of(tensor)
    if found is not None:
        return found
    answer = tensor.reshape(-1)[0].item() if tensor.numel() else 0
    with _disable_current_modes():
        return _FULL(tensor.shape, answer, dtype=tensor.dtype, device="cpu")


def _follow(func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
    """Keep the values of what an operator made."""
    with _disable_current_modes():
        found = func(*_values(args), **_values(kwargs))
        for one, real in zip(tree_leaves(result), tree_leaves(found), strict=True):
            if isinstance(one, FakeTensor) and one.untyped_storage()._cdata not in _REAL and _is_kept(one):
                _keep(one, real)


def _without_data(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data that stands for values."""
    made: torch.Tensor = torch.ops.aten.clone.default(values)
    with _disable_current_modes():
        _keep(made, values)
    return made


def _keep(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if values.stride() != tensor.stride():
        values = _EMPTY_STRIDED(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(values)
    storage = tensor.untyped_storage()
    key = storage._cdata
    _REAL[key] = values.untyped_storage()
    weakref.finalize(storage, _REAL.pop, key, None)


def _values(given: Any) -> Any:
    return tree_map(lambda one: values_of(one) if isinstance(one, torch.Tensor) else one, given)


def _is_kept(tensor: torch.Tensor) -> bool:
    is_floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (_MOST_FLOATING if is_floating else _MOST_WHOLE) and tensor.device.type == "cpu"


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for one in (*args, *kwargs.values()):
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from (inner for inner in one if isinstance(inner, torch.Tensor))
