"""Placement on the CPU of what a program places on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tuner.rehearsal.torch_room.host_tensors import on_device
from tuner.rehearsal.torch_room.known_values import always_true

CPU = torch.device("cpu")
_TO, _DEVICE, _TENSOR = torch.Tensor.to, torch.device, torch.tensor
"""Functions that are given a device without its name, or numbers."""
_FINITE = (torch.isfinite, torch.Tensor.isfinite)
"""Functions that ask whether numbers are finite, as all are here."""


class OnCpu(TorchFunctionMode):
    """Exchanges the device of whatever is made or moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch with the CPU for every accelerator."""
        if not kwargs and func is not _TO and func is not _DEVICE and func is not _TENSOR:
            return func(*args)
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or not str(device).startswith(("cpu", "meta"))):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is _TO and any(map(_is_accelerator, (*args[1:2], device))):
            args = (on_device(args[0]), *((CPU, *args[2:]) if len(args) > 1 else ()))
        if func is _DEVICE and args and type(args[0]) is int:
            return torch.device("cuda", args[0])
        if func is torch._C._nn._parse_to and args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if func is _TENSOR:
            return _tensor(func, args, kwargs)
        made = func(*args, **kwargs)
        return always_true(made) if func in _FINITE else made


def _tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make a tensor of numbers; those of a list of whole numbers stay known to `tolist`."""
    if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args[0])):
        args = (tree_map(lambda leaf: 1 if isinstance(leaf, FakeTensor) else leaf, args[0]), *args[1:])
    return func(*args, **kwargs)


def _is_accelerator(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return type(value) is int or (isinstance(value, str) and value.startswith("cuda"))
