"""Mixed precision of devices (`torch.autocast`, `GradScaler`), with tensors that lie on the CPU.

Autocast casts for other operators on the CPU than on devices. Here it casts as on devices: the lists are those of
ATen/autocast_mode.h (PyTorch 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

_IN_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm"),
    *("rms_norm", "group_norm", "cosine_similarity", "dist", "renorm", "logsumexp"),
)
"""Operators whose tensors become fp32 (AT_FORALL_FP32), as far as the CPU's list lacks them."""
_RETURN_FP32 = ("softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList")
"""Operators that return fp32 (AT_FORALL_FP32_SET_OPT_DTYPE), likewise."""
_IN_LOW = ("convolution", "addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot")
"""Operators whose tensors become fp16 or bf16 (AT_FORALL_LOWER_PRECISION_FP), likewise."""
_LOW = (torch.float16, torch.bfloat16)
_LIBRARIES: list[Any] = []
"""What was registered, which lasts as long as this refers to it."""


def stand_in_for_autocast(invented: Counter[str]) -> None:
    """Let programs cast as on devices, and count the steps of `GradScaler` that data would have allowed."""
    kind: Any = torch.amp.autocast_mode.autocast
    begin = kind.__init__

    def without_device(own: Any, device_type: str, dtype: Any = None, *given: Any, **named: Any) -> None:
        begin(own, "cpu", torch.float16 if dtype is None and device_type != "cpu" else dtype, *given, **named)

    kind.__init__ = without_device
    module: Any = torch
    is_enabled, set_enabled = module.is_autocast_enabled, module.set_autocast_enabled
    module.is_autocast_enabled = lambda *_: is_enabled("cpu")
    module.set_autocast_enabled = lambda *given: set_enabled("cpu", given[-1])
    get, put = module.get_autocast_dtype, module.set_autocast_dtype
    module.get_autocast_dtype = lambda device_type: get("cpu") if is_enabled("cpu") else get(device_type)
    module.set_autocast_dtype = lambda _, dtype: put("cpu", dtype)
    module.get_autocast_gpu_dtype = lambda: get("cpu") if is_enabled("cpu") else torch.float16
    module.set_autocast_gpu_dtype = lambda dtype: put("cpu", dtype)

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call] # torch's class has no types
    for names, policy in ((_IN_FP32, _in_fp32), (_RETURN_FP32, _returning_fp32), (_IN_LOW, _in_low)):
        for name in names:
            library.impl(name, policy(_operator(name)), "AutocastCPU")
    _LIBRARIES.append(library)

    def step(_: Any, optimizer: Any, __: Any, *given: Any, **named: Any) -> Any:
        invented["GradScaler: no gradient overflowed"] += 1
        return optimizer.step(*given, **named)

    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = step


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _uncast(operator: Any, given: Any, named: Any) -> Any:
    """Call an operator without autocast."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(key):
        return operator(*given, **named)


def _in_fp32(operator: Any) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        cast = [_cast(one, torch.float32) for one in given]
        return _uncast(operator, cast, {name: _cast(one, torch.float32) for name, one in named.items()})

    return call


def _in_low(operator: Any) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        return _uncast(operator, [_cast(one, dtype) for one in given], named)

    return call


def _returning_fp32(operator: Any) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        has_dtype = any(isinstance(one, torch.dtype) for one in (*given, *named.values()))
        is_low = isinstance(given[0], torch.Tensor) and given[0].dtype in _LOW
        if not is_low or has_dtype:
            return _uncast(operator, given, named)
        names = [one.name for one in operator._schema.arguments]
        return _uncast(operator, given[: names.index("dtype")], named | {"dtype": torch.float32})

    return call


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor of floating-point numbers, and those of a list; leave fp64 and any other value."""
    if isinstance(value, list | tuple):
        return type(value)(_cast(one, dtype) for one in value)
    is_cast = isinstance(value, torch.Tensor) and value.dtype in (*_LOW, torch.float32)
    return value.to(dtype) if is_cast else value
