"""Answers of `torch.cuda` as a device gives them, on a machine that has none."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from tuner.rehearsal.torch_room.groups import with_data
from tuner.rehearsal.torch_room.host_tensors import on_device
from tuner.rehearsal.torch_room.known_values import answer_lists
from tuner.rehearsal.torch_room.placement import CPU, OnCpu

_SILENT = (
    *("set_device", "synchronize", "init", "_lazy_init", "empty_cache", "manual_seed", "manual_seed_all"),
    *("set_rng_state", "set_stream", "reset_peak_memory_stats", "reset_max_memory_allocated", "_lazy_call"),
    "ipc_collect",
)
"""Functions that do nothing here."""
_ACCELERATOR = {
    name: name
    for name in (
        *("is_available", "device_count", "synchronize", "empty_cache", "set_stream", "memory_stats"),
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    )
} | {
    "current_device_index": "current_device",
    "set_device_index": "set_device",
    "current_device_idx": "current_device",
    "set_device_idx": "set_device",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "reset_accumulated_memory_stats": "reset_peak_memory_stats",
}
"""Functions of `torch.accelerator`, with that of `torch.cuda` that answers alike."""
_ALIGNED = 512
"""Multiple of each address, as PyTorch's allocator gives them (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)."""
CUDA_VERSION = "13.1"
"""Version of CUDA that programs are told."""
_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor", "DoubleTensor", "ByteTensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """Facts of the device that programs ask for.

    Attributes:
        name: Name.
        capability: Compute capability.
        memory_bytes: Memory [bytes].
        num_sms: Number of streaming multiprocessors.
        per_host: Devices of a host.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    num_sms: int
    per_host: int


class _Stream:
    """Stands for a stream, an event or a graph: every method can be called, as can the object as a context."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True


class _TypeOfTensors(type):
    """Stands for a class such as `torch.cuda.FloatTensor`: all tensors of its dtype are its instances."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype is cls.dtype

    def __call__(cls, *given: Any) -> torch.Tensor:
        make: Any = torch.empty if all(type(one) is int for one in given) else torch.tensor
        made: torch.Tensor = make(*given, dtype=cls.dtype)
        return made


def stand_in_for_cuda(device: DeviceFacts) -> None:
    """Let `torch.cuda` of this process answer for a device, and place on the CPU what goes there."""
    properties = SimpleNamespace(
        major=device.capability[0],
        minor=device.capability[1],
        name=device.name,
        total_memory=device.memory_bytes,
        multi_processor_count=device.num_sms,
        warp_size=32,
        gcnArchName="",
        L2_cache_size=50 << 20,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": device.per_host,
        "current_device": 0,
        "get_device_capability": device.capability,
        "get_device_name": device.name,
        "get_device_properties": properties,
        "mem_get_info": (device.memory_bytes, device.memory_bytes),
        "memory_stats": defaultdict(int),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "is_current_stream_capturing": False,
        "is_bf16_supported": device.capability >= (8, 0),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        "utilization": 0,
    } | dict.fromkeys(_SILENT)
    torch.version.cuda = CUDA_VERSION
    cuda: Any = torch.cuda
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, _answer=answer, **__: _answer)
    accelerator: Any = torch.accelerator
    of_accelerators = {name: answers[of] for name, of in _ACCELERATOR.items()} | {
        "current_accelerator": torch.device("cuda"),
        "current_stream": _Stream(),
    }
    for name, answer in of_accelerators.items():
        setattr(accelerator, name, lambda *_, _answer=answer, **__: _answer)
    for name in ("Stream", "Event", "ExternalStream"):
        setattr(cuda, name, _Stream)
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    cuda.default_generators = tuple(torch.Generator() for _ in range(device.per_host))
    for name in _TYPES:
        setattr(cuda, name, _TypeOfTensors(name, (), {"dtype": getattr(torch, name)(0).dtype}))
    _stand_in_for_tensors()
    answer_lists()
    _stand_in_for_modules()


def _stand_in_for_tensors() -> None:
    """Let tensors say that they are on a device, and let backward passes place what they make."""
    tensor: Any = torch.Tensor
    tensor.cuda = lambda own, *_, **__: on_device(own)
    tensor.pin_memory = lambda own, *_, **__: own
    tensor.record_stream = lambda *_: None
    tensor.is_cuda = property(lambda _: True)
    storage: Any = torch.UntypedStorage
    address, of_storage = tensor.data_ptr, storage.data_ptr
    storage.data_ptr = lambda own: own._cdata * _ALIGNED if own.device.type == "meta" else of_storage(own)
    copy, copying = tensor.__deepcopy__, list[bool]()

    def data_ptr(own: Any) -> Any:
        if not isinstance(own, FakeTensor):
            return address(own)
        return 0 if copying else own.untyped_storage().data_ptr() + own.storage_offset() * own.element_size()

    copy_data = with_data(copy)

    def copied(own: Any, memo: Any) -> Any:
        if type(own) is torch.Tensor:  # it has data, as a mesh of ranks does
            return copy_data(own, memo)
        copying.append(True)  # PyTorch clones a tensor without an address; of others it copies the storage
        try:
            return copy(own, memo)
        finally:
            copying.pop()

    tensor.data_ptr, tensor.__deepcopy__ = data_ptr, copied
    cast = tensor.type

    def of_device(own: Any, *given: Any, **named: Any) -> Any:
        if given or named:
            return cast(own, *given, **named)
        return cast(own).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")

    tensor.type = of_device
    dispatch: Any = FakeTensor.__torch_dispatch__

    def run_operator(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator that a subclass of tensors, as those of FP8, runs on what it holds."""
        found = dispatch(func, types, args, kwargs)
        return func(*args, **(kwargs or {})) if found is NotImplemented else found

    setattr(FakeTensor, "__torch_dispatch__", classmethod(run_operator))  # noqa: B010 - mypy knows a method
    graph: Any = torch.autograd.graph
    run = graph._engine_run_backward

    def run_backward(*given: Any, **named: Any) -> Any:
        with OnCpu():  # PyTorch leaves a function mode while it handles `backward`
            return run(*given, **named)

    torch.autograd._engine_run_backward = graph._engine_run_backward = run_backward  # type: ignore[attr-defined]


def _stand_in_for_modules() -> None:
    """Let dropout keep a byte an element, as on a device, and modules move tensors without data."""
    functional: Any = nn.functional
    functional.dropout = lambda x, p=0.5, training=True, inplace=False: (  # noqa: ARG005 - the signature of PyTorch's
        torch.native_dropout(x, p, training)[0] if training and p else x
    )
    nn.Module._apply = _apply  # type: ignore[method-assign]
    parallel: Any = nn.parallel.DistributedDataParallel
    begin = parallel.__init__

    def without_device(own: Any, module: nn.Module, *_: Any, **named: Any) -> None:
        begin(
            own, module, **{name: value for name, value in named.items() if name not in ("device_ids", "output_device")}
        )

    parallel.__init__ = without_device


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Apply a function to a module's tensors; PyTorch's own method refuses fake tensors that something refers to."""
    for child in module.children() if recurse else ():
        _apply(child, function)
    with torch.no_grad():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is None or (new := function(old)) is old:
                    continue
                if held is module._parameters:
                    new = nn.Parameter(new, old.requires_grad)
                    vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})
                held[name] = new
    return module
