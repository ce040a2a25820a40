"""Parts of PyTorch that load later: the first FSDP, torchdata's loaders, and checkpoints, which stay unread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.rehearsal.torch_room.loader import load_in_this_process
from tuner.rehearsal.torch_room.placement import CPU
from tuner.rehearsal.torch_room.progress import Progress


def changes(progress: Progress) -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in these modules, by their names."""
    return {
        "torch.distributed.checkpoint": lambda module: _keep_nothing(module, progress),
        "torch.distributed.fsdp._init_utils": _compute_on_cpu,
        "torchdata.stateful_dataloader.stateful_dataloader": (
            lambda module: load_in_this_process(module.StatefulDataLoader)
        ),
    }


def _compute_on_cpu(module: Any) -> None:
    module._get_compute_device = lambda *_, **__: CPU
    module._get_device_from_device_id = lambda device_id, *_, **__: None if device_id is None else CPU
    module._check_module_states_for_sync_module_states = lambda _: None


def _keep_nothing(module: Any, progress: Progress) -> None:
    """Let weights and states stay as they are where a checkpoint is loaded, and let none be saved."""

    def told(name: str) -> Callable[..., None]:
        def keep(*_: Any, **__: Any) -> None:
            progress.watch.invented[f"torch.distributed.checkpoint.{name}: no checkpoint is read or written"] += 1

        return keep

    for name in ("load", "load_state_dict", "save", "save_state_dict", "async_save"):
        if hasattr(module, name):
            setattr(module, name, told(name))
