"""PyTorch's pipelines (`torch.distributed.pipelining`): what a stage hears from others before its first micro-batch.

A stage asks the one before it for the shapes that it sends. Stages are rehearsed one after the other, so that the
shapes are there when a later one asks; those between any two stages are taken to be the same.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tuner.rehearsal.torch_room.watch import NoStandInError

_SENT: list[bytes] = []
"""Shapes that a stage sent to the next, pickled; the last that is known."""


def changes() -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in PyTorch's modules of pipelines."""
    return {
        "torch.distributed.pipelining.stage": _exchange_shapes,
        "torch.distributed.pipelining.schedules": _vote_alone,
    }


def told() -> str | None:
    """Return the shapes that this process sent, as text; None if it sent none."""
    return base64.b64encode(_SENT[-1]).decode() if _SENT else None


def hear(shapes: str | None) -> None:
    """Take the shapes that an earlier process sent."""
    if shapes is not None:
        _SENT[:] = [base64.b64decode(shapes)]


def _exchange_shapes(stages: Any) -> None:
    """Let stages find the shapes of their neighbours."""
    kind = stages.PipelineStage
    if not hasattr(kind, "_recv_meta"):  # before PyTorch 2.12
        return

    def send(_: Any, shapes: Any, __: int) -> None:
        if isinstance(shapes, stages._StageForwardMeta):
            _SENT[:] = [pickle.dumps(shapes)]

    def receive(stage: Any, other: int) -> Any:
        if other > stage.stage_index:  # gradients of what it sent
            sent = stage._stage_meta.outputs
            return stages._StageBackwardMeta(
                tuple(replace(one, requires_grad=False) if one.requires_grad else None for one in sent)
            )
        if not _SENT:
            raise NoStandInError("the shapes that an earlier stage sends: rehearse rank 0 as well")
        return pickle.loads(_SENT[-1])  # noqa: S301 - made by this module

    kind._send_meta, kind._recv_meta = send, receive


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
