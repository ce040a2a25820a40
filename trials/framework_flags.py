"""Contract between a backend that runs a user's command and the exporters that write a framework's flags.

Exporters belong to a higher package. They therefore reach a backend as callables that keep this contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from costmodels.job.parallel_config import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """One configuration, written as the flags and variables of a training framework.

    Attributes:
        arguments: Command-line arguments of the framework, one text each.
        environment: Environment variables that the framework needs; None removes a variable.
    """

    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()


WriteFlags = Callable[[ParallelConfig], Flags]
"""Function that writes a configuration as flags. It is pickled into workers together with its backend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagExporter:
    """Exporter of one framework's flags, for one job on one cluster.

    Attributes:
        write: Function that returns the flags of a configuration.
        ends_command: Whether the flags end with a subcommand, after which the program takes no other flags.
    """

    write: WriteFlags
    ends_command: bool = False
