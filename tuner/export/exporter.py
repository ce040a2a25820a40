"""The contract of an exporter: one configuration, written as a training framework takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """One configuration for one framework.

    Attributes:
        target: The exporter's name.
        text: What a user pastes.
        notes: What the text cannot say, one sentence each, led by the dimension that it is about.
        arguments: The flags that the text holds, an argument each; empty where a framework takes a file instead.
        environment: Variables that belong to them; None removes one.
    """

    target: str
    text: str
    notes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()


Exporter = Callable[[Setting, ParallelConfig], Export]
"""Writes a configuration of the setting's job; pure, and never fails on a configuration that could be tried."""
