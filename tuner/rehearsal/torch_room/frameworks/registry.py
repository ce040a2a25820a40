"""All frameworks that need something of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.rehearsal.torch_room.frameworks import deepspeed, hugging_face, megatron, torch_parts, torchtitan
from tuner.rehearsal.torch_room.progress import Progress

FRAMEWORKS = (deepspeed, hugging_face, megatron, torch_parts, torchtitan)
"""Modules with a function `changes`."""


def changes(progress: Progress) -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in the frameworks' modules, by their names.

    A function gets its module as soon as that was imported.
    """
    return {name: change for framework in FRAMEWORKS for name, change in framework.changes(progress).items()}
