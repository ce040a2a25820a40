"""Results of operators that ran before on tensors of the same shapes, made again without asking PyTorch.

PyTorch takes some 0.2 ms for an operator on tensors without data, and a training step repeats the same few hundred
operators thousands of times. What an operator returns is learned at its first call: one of its arguments, a view of
one, or tensors of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

META = torch.device("meta")
_TAGS = (
    *(torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape),
    *(torch.Tag.inplace_view, torch.Tag.maybe_aliasing_or_mutating),
)
"""Tags of operators whose results follow from more than shapes, or that change the shapes of their arguments."""
_ASK_ANEW = ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::_local_scalar_dense", "aten::equal")
_VALUES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_SAME, _VIEW, _OWN, _VALUE = range(4)


@dataclass(frozen=True, slots=True)
class _Made:
    """How one of an operator's results is made.

    Attributes:
        how: One of `_SAME`, an argument; `_VIEW`, a view of an argument; `_OWN`, a tensor; `_VALUE`, no tensor.
        of: Number of the argument among the tensors of the call.
        shape: Shape.
        stride: Strides.
        offset: Place of its first element in the storage.
        needs: Bytes of the storage up to its last element.
        dtype: Type of its elements.
        device: Device that it seems to be on.
        attributes: Attributes of the tensor without data.
        value: Result that is no tensor.
    """

    how: int
    of: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    needs: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = META
    attributes: dict[str, Any] | None = None
    value: Any = None


class Known:
    """Results of an operator with arguments of certain shapes.

    Attributes:
        made: Each result; None if it can't be made again.
        sequence: Type of the sequence that holds the results; None for a single one.
        noted: What the record of the step says of the call.
    """

    __slots__ = ("made", "noted", "sequence")

    def __init__(self, made: tuple[_Made, ...] | None, sequence: type | None, noted: Any) -> None:
        self.made, self.sequence, self.noted = made, sequence, noted

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of a tensor without data, taken from one; empty if none was made."""
        return next((made.attributes for made in self.made or () if made.attributes), {})

    def again(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return the results for the tensors of a call; None if a view would not lie in its storage."""
        results = []
        for made in self.made or ():
            if made.how == _SAME:
                results.append(tensors[made.of])
            elif made.how == _VALUE:
                results.append(made.value)
            else:
                if made.how == _OWN:
                    plain = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=META)
                else:
                    storage = tensors[made.of].untyped_storage()
                    if storage.nbytes() < made.needs:
                        return None
                    plain = torch.empty_strided((0,), (1,), dtype=made.dtype, device=META)
                    plain.set_(storage, made.offset, made.shape, made.stride)
                results.append(fake(plain, made.device, made.attributes or {}))
        return results


def can_repeat(func: Any) -> bool:
    """Return whether the results of an operator follow from the shapes of its arguments."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._schema.name
    if not name.startswith(("aten::", "prims::")) or name in _ASK_ANEW:
        return False
    return not any(tag in func.tags for tag in _TAGS)


VIEWS = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        *(("view", "default"), ("slice", "Tensor"), ("select", "int"), ("detach", "default"), ("alias", "default")),
        *(("t", "default"), ("transpose", "int"), ("permute", "default"), ("expand", "default")),
        *(("unsqueeze", "default"), ("squeeze", "default"), ("squeeze", "dim"), ("squeeze", "dims")),
    )
)
"""Operators that return one view of their first argument; PyTorch's own kernel for tensors without data is quick."""


def view_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """Return a view by PyTorch's kernel of it for tensors without data; None where more than shapes is known of one.

    Args:
        func: One of `VIEWS`.
        args: Its arguments.
        kwargs: Its named arguments.
        attributes: Attributes of tensors without data.
    """
    tensor = args[0]
    if type(tensor) is not FakeTensor or tensor.__dict__["constant"] is not None or tensor.is_inference():
        return None
    mode: Any = tensor.fake_mode
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        mode.in_kernel_invocation = True
        try:
            plain = func(*args, **kwargs)
        finally:
            mode.in_kernel_invocation = False
    return fake(plain, tensor.__dict__["_fake_device"], attributes)


def fake(plain: torch.Tensor, device: torch.device, attributes: dict[str, Any]) -> Any:
    """Return a tensor of PyTorch's meta device as a tensor without data that seems to be on another."""
    tensor = torch.Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device)
    tensor.__dict__.update(attributes)
    tensor.__dict__["_fake_device"] = device
    return tensor


def key_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> tuple[Any, ...] | None:
    """Return all that the results of a call follow from; None if that is more than shapes.

    Args:
        func: Operator.
        args: Its arguments.
        kwargs: Its named arguments.
        tensors: Empty list that gets the tensors among the arguments.
    """
    key: list[Any] = [id(func), torch.get_default_dtype()]
    if not _add(key, args, tensors):
        return None
    if kwargs:
        key.extend(kwargs)
        if not _add(key, kwargs.values(), tensors):
            return None
    return tuple(key)


def _add(key: list[Any], values: Any, tensors: list[Any]) -> bool:
    """Add values to a key; return whether they may be parts of one."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            held = value.__dict__
            if held["constant"] is not None or value.is_inference() or value.dtype.is_complex:
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype, held["_fake_device"])
            tensors.append(value)
        elif kind in _VALUES:
            key += (kind, value)  # 1, 1.0 and True are equal, and make other types
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _add(key, value, tensors):
                return False
        else:
            return False
    return True


def learned(result: Any, tensors: Sequence[Any], noted: Any) -> Known | None:
    """Return how to make the result of a call again; None if that can't be told of this call.

    Args:
        result: What the operator returned.
        tensors: Tensors among its arguments.
        noted: What the record of the step says of the call.
    """
    sequence = type(result) if type(result) in (list, tuple) else None
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    made: list[_Made] = []
    own: set[int] = set()
    for leaf in result if sequence is not None else (result,):
        if type(leaf) in (int, float, bool, type(None)):
            made.append(_Made(how=_VALUE, value=leaf))
            continue
        if type(leaf) is not FakeTensor or not _is_plain(leaf):
            return Known(None, sequence, noted)
        same = [number for number, tensor in enumerate(tensors) if tensor is leaf]
        key = leaf.untyped_storage()._cdata
        sharing = [number for number, storage in enumerate(storages) if storage == key]
        if len(same) > 1 or (not same and len(sharing) > 1):
            return None
        if same:
            made.append(_Made(how=_SAME, of=same[0]))
            continue
        shape, stride, offset = tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())
        needs = _extent(shape, stride, offset) * leaf.dtype.itemsize
        is_own = not sharing and offset == 0 and leaf.untyped_storage().nbytes() == needs and key not in own
        if not sharing and not is_own:
            return Known(None, sequence, noted)
        own.add(key)
        made.append(
            _Made(
                how=_OWN if is_own else _VIEW,
                of=0 if is_own else sharing[0],
                shape=shape,
                stride=stride,
                offset=offset,
                needs=needs,
                dtype=leaf.dtype,
                device=leaf.device,
                attributes=dict(vars(leaf)),
            )
        )
    return Known(tuple(made), sequence, noted)


def _is_plain(tensor: FakeTensor) -> bool:
    """Return whether a tensor is no more than its shape."""
    if tensor.constant is not None or tensor.requires_grad or tensor.is_inference() or tensor.layout != torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg()) and all(value is None for _, value in _memos(tensor))


def _memos(tensor: FakeTensor) -> Iterator[tuple[str, Any]]:
    """Yield what a tensor remembers beside the mode and the device that it belongs to."""
    return ((name, value) for name, value in vars(tensor).items() if name not in ("_fake_device", "fake_mode"))


def _extent(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """Return the number of elements of a storage up to the last of a tensor."""
    if 0 in shape:
        return 0
    return offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
