"""Answers of `torch.cuda` on a machine without a GPU, for frameworks that ask before they look at a layout.

Tensors that a program places on a GPU are made on the CPU. Streams and events do nothing. The device has compute
capability 9.0, as an H100.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Places on the CPU what a program would place on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], CPU, *args[2:])
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class _Anything:
    """Stands for a stream or an event: every method can be called, and the object is a context."""

    cuda_stream, device = 0, CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *_: object) -> None: ...


def install(gpus: int = 8) -> None:
    """Make `torch.cuda` of this process answer for so many devices; frameworks are imported after it."""
    torch.compile = lambda model=None, *_, **__: model or (lambda function: function)  # type: ignore[assignment]
    triton.runtime.driver.set_active(SimpleNamespace(get_benchmarker=lambda: None, get_current_target=lambda: None))
    properties = SimpleNamespace(major=9, minor=0, name="H100", total_memory=80 << 30, multi_processor_count=132)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": gpus,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": "H100",
        "get_device_properties": properties,
        "is_initialized": True,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    for name in (
        *("set_device", "synchronize", "init", "_lazy_init", "empty_cache", "manual_seed", "manual_seed_all"),
        *("set_rng_state", "set_stream", "reset_peak_memory_stats", "_lazy_call"),
    ):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch._C._cuda_getDevice = lambda: 0  # type: ignore[attr-defined]
    for name in ("Stream", "Event", "ExternalStream"):
        setattr(torch.cuda, name, _Anything)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: _Anything()  # type: ignore[assignment]
    torch.cuda.stream = torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.cuda.default_generators = tuple(torch.Generator() for _ in range(gpus))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment,method-assign]


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return type(value) is int or (isinstance(value, str) and value.startswith("cuda"))
