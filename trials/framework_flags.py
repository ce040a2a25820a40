"""Contract between a backend that runs a user's command and the exporters that write a framework's flags.

Exporters belong to a higher package. They therefore reach a backend as callables that keep this contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """One configuration, written as the flags and variables of a training framework.

    Attributes:
        arguments: Command-line arguments of the framework, one text each.
        environment: Environment variables that the framework needs; None removes a variable.
        refused: Further flags that the framework refuses with this configuration.
    """

    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str | None], ...] = ()
    refused: frozenset[str] = frozenset()


class WriteFlags(Protocol):
    """Function that writes a configuration as flags. It is pickled into workers together with its backend."""

    def __call__(self, config: ParallelConfig, /) -> Flags:
        """Return the flags of one configuration."""

    def reduced(self, to: Reduction, /) -> WriteFlags:
        """Return the function that writes the configurations of a smaller job."""


ReadFlags = Callable[[Sequence[str]], Flags | None]
"""Function that returns the flags which words of a command say, as the exporter writes them; None if it cannot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WordRules:
    """Rules by which the flags of a user's own command are exchanged.

    Attributes:
        groups: Names of groups of flags that say one thing together, by the flag; any other flag is a group of its own.
        follows: Groups that a changed configuration states anew by the groups whose change leads to it, because the
            command's own words, or a default, mean something else then.
        never_added: Groups that a command without them does not get: the habits of exports, not of configurations.
        never_removed: Groups that stay where a configuration does not need them.
    """

    groups: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    never_added: frozenset[str] = frozenset()
    never_removed: frozenset[str] = frozenset()

    def group(self, flag: str) -> str:
        """Return the group of a flag."""
        return self.groups.get(flag, flag)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagExporter:
    """Exporter of one framework's flags, for one job on one cluster.

    Attributes:
        write: Function that returns the flags of a configuration.
        ends_command: Whether the flags end with a subcommand, after which the program takes no other flags.
        tells_layers: Whether the flags of a smaller job tell its number of layers.
        read: Function that reads the flags of a command; None if its own words cannot be exchanged.
        rules: Rules by which they are.
    """

    write: WriteFlags
    ends_command: bool = False
    tells_layers: bool = False
    read: ReadFlags | None = None
    rules: WordRules = field(default_factory=WordRules)
