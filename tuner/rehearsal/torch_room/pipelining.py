"""PyTorch's pipelines (`torch.distributed.pipelining`): what a stage hears from others before its first micro-batch.

A stage asks the one before it for the shapes that it sends. Stages are rehearsed one after the other, so that the
shapes are there when a later one asks; those between any two stages are taken to be the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from tuner.rehearsal.torch_room.watch import NoStandInError

_SENT: list[list[dict[str, Any]]] = []
"""Shapes of the tensors that a stage sent to the next, as JSON types; the last that is known."""


def changes() -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in PyTorch's modules of pipelines."""
    return {
        "torch.distributed.pipelining.stage": _exchange_shapes,
        "torch.distributed.pipelining.schedules": _vote_alone,
    }


def told() -> list[dict[str, Any]] | None:
    """Return the shapes that this process sent; None if it sent none."""
    return _SENT[-1] if _SENT else None


def hear(shapes: list[dict[str, Any]] | None) -> None:
    """Take the shapes that an earlier process sent."""
    if shapes is not None:
        _SENT[:] = [shapes]


def _exchange_shapes(stages: Any) -> None:
    """Let stages find the shapes of their neighbours."""
    kind = stages.PipelineStage
    if not hasattr(kind, "_recv_meta"):  # before PyTorch 2.12
        return

    def send(_: Any, shapes: Any, __: int) -> None:
        if isinstance(shapes, stages._StageForwardMeta):
            _SENT[:] = [[_as_json(one) for one in shapes.forward_metas]]

    def receive(stage: Any, other: int) -> Any:
        if other > stage.stage_index:  # gradients of what it sent
            sent = stage._stage_meta.outputs
            return stages._StageBackwardMeta(
                tuple(replace(one, requires_grad=False) if one.requires_grad else None for one in sent)
            )
        if not _SENT:
            raise NoStandInError("the shapes that an earlier stage sends: rehearse rank 0 as well")
        return stages._StageForwardMeta(tuple(_from_json(one) for one in _SENT[-1]))

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
