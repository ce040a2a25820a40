"""Batches of a program's own data: PyTorch's data loader reads them with data, in this process."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, dataloader

from tuner.rehearsal.torch_room.host_tensors import mark_on_host

_OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
_OF_MEMORY = ("pin_memory", "pin_memory_device")
"""Arguments that keep their defaults: no processes beside this one, no pinned memory."""


def load_in_this_process(loader: Any) -> None:
    """Let a class of loaders use no workers."""
    begin = loader.__init__
    signature = inspect.signature(begin)

    def load_here(own: Any, *given: Any, **named: Any) -> None:
        bound = signature.bind(own, *given, **named)
        for name in (*_OF_WORKERS, *_OF_MEMORY):
            bound.arguments.pop(name, None)
        begin(*bound.args, **bound.kwargs)

    loader.__init__ = load_here


def stand_in_for_loader() -> None:
    """Let data loaders read in this process; what they return lies in the host's memory."""
    load_in_this_process(DataLoader)
    iterator: Any = dataloader._BaseDataLoaderIter
    start, following = iterator.__init__, iterator.__next__

    def start_with_data(own: Any, *given: Any, **named: Any) -> None:
        with _disable_current_modes():
            start(own, *given, **named)

    def read(own: Any) -> Any:
        with _disable_current_modes():
            batch = following(own)
            for leaf in tree_leaves(batch):
                if isinstance(leaf, torch.Tensor):
                    mark_on_host(leaf)
        return batch

    iterator.__init__, iterator.__next__ = start_with_data, read
