"""Process groups of a world in which only one rank exists."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes


class _Nccl:
    """Stands for the class of groups of NCCL, of which programs make options."""

    NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_EFFICIENCY, NCCL_CTA_POLICY_ZERO = 0, 1, 2

    class Options:
        """Options that nothing reads."""

        def __init__(self, **given: Any) -> None:
            self.config = types.SimpleNamespace()
            vars(self).update(given)


def stand_in_for_groups(rank: int, world: int) -> None:
    """Let programs make process groups of `world` ranks that send nothing."""
    module: Any = dist
    begin, add = module.init_process_group, module.new_group

    def init_process_group(*_: Any, **__: Any) -> None:
        begin(backend="fake", rank=rank, world_size=world, store=FakeStore())

    def new_group(ranks: Any = None, *_: Any, **named: Any) -> Any:
        kept = {key: named[key] for key in ("use_local_synchronization", "group_desc") if key in named}
        return add(ranks, backend="fake", **kept)

    if not hasattr(module, "ProcessGroupNCCL"):  # PyTorch for CPUs has none
        module.ProcessGroupNCCL = module.distributed_c10d.ProcessGroupNCCL = _Nccl
    mesh = module.device_mesh
    instead: dict[Callable[..., Any], Callable[..., Any]] = {
        begin: init_process_group,
        add: new_group,
        module.all_gather_object: _gathered_by_all,
        module.gather_object: _gathered,
        module.broadcast_object_list: lambda *_, **__: None,
        module.scatter_object_list: _scattered,
        mesh.init_device_mesh: with_data(_of_cpus(mesh.init_device_mesh)),
    }
    _replace_everywhere(instead)
    mesh.DeviceMesh.__init__ = _of_cpus(mesh.DeviceMesh.__init__, place=1)
    for name, held in list(vars(mesh.DeviceMesh).items()):  # it computes with the numbers of ranks
        if isinstance(held, types.FunctionType):
            setattr(mesh.DeviceMesh, name, with_data(held))
        elif isinstance(held, staticmethod):
            setattr(mesh.DeviceMesh, name, staticmethod(with_data(held.__func__)))
        elif isinstance(held, property) and held.fget is not None:
            setattr(mesh.DeviceMesh, name, property(with_data(held.fget)))


def _replace_everywhere(instead: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace functions under all names that modules gave them when they imported them."""
    for module in list(sys.modules.values()):
        for name, held in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
            if type(held) is types.FunctionType and held in instead:
                setattr(module, name, instead[held])


def _of_cpus(function: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
    """Let a function that makes a mesh of devices make one of CPUs, where the tensors are."""

    @functools.wraps(function)
    def make(*given: Any, **named: Any) -> Any:
        if "device_type" in named:
            return function(*given, **named | {"device_type": "cpu"})
        return function(*given[:place], "cpu", *given[place + 1 :], **named)

    return make


# The names of the arguments are PyTorch's (torch/distributed/distributed_c10d.py), since programs may use them.
def _gathered_by_all(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gathered(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scattered(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, *_: Any, **__: Any
) -> None:
    scatter_object_output_list[0] = scatter_object_input_list[0] if scatter_object_input_list else None


def with_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function compute with tensors that have data."""

    @functools.wraps(function)
    def compute(*given: Any, **named: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*given, **named)

    return compute
