"""PyTorch's pipelines (`torch.distributed.pipelining`): what a stage hears from others before its first micro-batch.

A stage asks the one before it for the shapes that it sends; a stage that is rehearsed waits until an earlier one has
sent them. Those between any two stages are taken to be the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tuner.rehearsal.torch_room.watch import NoStandInError

_NEVER = b"."
"""Text of a file after a stage ended without shapes."""
_POLL_S = 0.01
"""Time between two looks at the file [s]."""


@dataclass(slots=True)
class _Shared:
    """File in memory by which the stages of one candidate, each in a process of its own, tell each other shapes.

    Attributes:
        file: Descriptor; None where stages have none.
        is_first: Whether no earlier stage of the candidate is rehearsed.
        sent: Shapes that this process itself sent, as JSON; None before.
    """

    file: int | None = None
    is_first: bool = True
    sent: bytes | None = None


_SHARED = _Shared()


def changes() -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in PyTorch's modules of pipelines."""
    return {
        "torch.distributed.pipelining.stage": _exchange_shapes,
        "torch.distributed.pipelining.schedules": _vote_alone,
    }


def share(file: int, *, is_first: bool) -> None:
    """Let this process tell and hear shapes by a file in memory."""
    _SHARED.file, _SHARED.is_first = file, is_first


def no_more(file: int) -> None:
    """Say that a stage ended, whether it sent shapes or not."""
    if not os.fstat(file).st_size:
        os.pwrite(file, _NEVER, 0)


def _heard() -> Any:
    """Return the shapes that an earlier stage sent, and wait for them while it runs.

    Raises:
        NoStandInError: there are none.
    """
    file = _SHARED.file
    if _SHARED.sent is not None:
        return json.loads(_SHARED.sent)
    if file is None or _SHARED.is_first:
        raise NoStandInError("the shapes that an earlier stage sends: rehearse rank 0 as well")
    while not (size := os.fstat(file).st_size):
        time.sleep(_POLL_S)
    found = os.pread(file, size, 0)
    if found == _NEVER:
        raise NoStandInError("the shapes that an earlier stage sends: it ended before")
    return json.loads(found)


def _exchange_shapes(stages: Any) -> None:
    """Let stages find the shapes of their neighbours."""
    kind = stages.PipelineStage
    if not hasattr(kind, "_recv_meta"):  # before PyTorch 2.12
        return

    def send(_: Any, shapes: Any, __: int) -> None:
        if isinstance(shapes, stages._StageForwardMeta):
            _SHARED.sent = json.dumps([_as_json(one) for one in shapes.forward_metas]).encode()
            if _SHARED.file is not None and not os.fstat(_SHARED.file).st_size:
                os.pwrite(_SHARED.file, _SHARED.sent, 0)

    def receive(stage: Any, other: int) -> Any:
        if other > stage.stage_index:  # gradients of what it sent
            sent = stage._stage_meta.outputs
            return stages._StageBackwardMeta(
                tuple(replace(one, requires_grad=False) if one.requires_grad else None for one in sent)
            )
        return stages._StageForwardMeta(tuple(_from_json(one) for one in _heard()))

    kind._send_meta, kind._recv_meta = send, receive


def _as_json(shape: Any) -> dict[str, Any]:
    """Return what is known of a tensor (`_TensorMeta` or `_DTensorMeta`) as JSON types."""
    found = {field.name: getattr(shape, field.name) for field in fields(shape)}
    found["dtype"] = str(shape.dtype).removeprefix("torch.")
    if "placements" in found:
        found["placements"] = [_placement_as_json(one) for one in shape.placements]
        layout = shape.mesh_layout
        found["mesh_layout"] = None if layout is None else [[axis.shape, axis.stride] for axis in layout]
    return found


def _placement_as_json(placement: Any) -> list[Any]:
    name = type(placement).__name__
    if name not in ("Shard", "Replicate", "Partial"):
        raise NoStandInError(f"a distributed tensor of a pipeline that is placed as {name}")
    return [name, *([placement.dim] if name == "Shard" else [placement.reduce_op] if name == "Partial" else [])]


def _from_json(found: dict[str, Any]) -> Any:
    """Return what `_as_json` made JSON types of."""
    kinds, placements, layouts = (
        sys.modules[f"torch.distributed.{name}"] for name in ("pipelining._utils", "tensor", "_mesh_layout")
    )
    values = found | {"dtype": getattr(torch, found["dtype"])}
    for name in ("shape", "global_shape"):
        if name in values:
            values[name] = torch.Size(values[name])
    for name in ("stride", "global_stride", "mesh_dim_names"):
        if name in values:
            values[name] = tuple(values[name])
    if "placements" not in values:
        return kinds._TensorMeta(**values)
    values["placements"] = tuple(getattr(placements, name)(*given) for name, *given in values["placements"])
    if values["mesh_layout"] is not None:
        axes = [layouts._FlatLayout(tuple(shape), tuple(stride)) for shape, stride in values["mesh_layout"]]
        values["mesh_layout"] = layouts._MeshLayout(axes)
    return kinds._DTensorMeta(**values)


def _vote_alone(schedules: Any) -> None:
    """Let a rank decide alone whether stages exchange shapes; all ranks run the same program."""
    schedule = schedules._PipelineSchedule
    if not hasattr(schedule, "_warmup_p2p"):
        return
    warm_up = schedule._warmup_p2p

    def decide(own: Any, parts: list[Any], has_backward: bool, is_done: bool) -> None:
        if not all(isinstance(one, schedules.PipelineStage) for one in parts):
            warm_up(own, parts, has_backward, is_done)
            return
        mode = schedules.InferenceMode
        is_dynamic = any(mode.needs_dynamic(one._user_meta, has_backward) for one in parts)
        for one in parts:
            one._inference_mode = mode.DYNAMIC if is_dynamic else mode.STATIC

    schedule._warmup_p2p = decide
