"""Contract of an exporter, which writes one configuration in the format of a training framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Configuration in the format of one framework.

    Attributes:
        target: Name of the exporter.
        text: Text that a user pastes into a script or saves as a file.
        notes: Facts that the text cannot express, one sentence each, beginning with the name of the dimension.
        arguments: Command-line arguments in the text; empty if the framework takes a file.
        environment: Environment variables that the flags require; the value None removes a variable.
    """

    target: str
    text: str
    notes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()


Exporter = Callable[[Setting, ParallelConfig], Export]
"""Function that writes a configuration of the setting's job. It is pure and accepts every valid configuration."""
