"""Distributed tensors of PyTorch, as far as they ask a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tuner.rehearsal.torch_room.watch import unwatched


def changes() -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in PyTorch's modules of distributed tensors."""
    return {
        "torch.distributed.tensor._random": _forget_states,
        "torch.distributed.tensor._sharding_prop": _find_shapes_unwatched,
    }


def _find_shapes_unwatched(module: Any) -> None:
    """Leave out whole tensors of which only the shape is asked."""
    propagator = module.ShardingPropagator
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        if hasattr(propagator, name):
            setattr(propagator, name, unwatched(getattr(propagator, name)))


def _forget_states(random: Any) -> None:
    """Let random numbers be made without the states of a device's generator."""
    for tracker in (random.OffsetBasedRNGTracker, random._RNGStateTracker):
        tracker._distribute_region = lambda *_, **__: contextlib.nullcontext()
