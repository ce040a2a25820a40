"""The contract of an import: what a file of some training framework says of the configuration in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """Something that could not be read, or that Meshtune does not model.

    Attributes:
        what: The flag or key.
        why: The reason, and what stands in its place.
        line: Where it stands; None where the format has no lines.
    """

    what: str
    why: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.what}{f' (line {self.line})' if self.line else ''}: {self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand:
    """How the training program is started, in the form of a study's `trial.command`.

    Attributes:
        framework: Whose flags `{flags}` stands for, and whose log is read.
        arguments: With placeholders; what is unknown stands as the script has it.
        environment: Variables that the script exports with known values.
        unknown: Why arguments are unknown, once each; empty where the command is whole.
        left_out: Flags that a trial must not have, or has from `{flags}` or the placeholders.
        not_copied: Variables that the script exports and that are not in `environment`.
        directory: Where the command begins.
        moves: The script's `cd` before it, where that does not tell an absolute path; empty without one.
    """

    framework: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    left_out: tuple[str, ...]
    not_copied: tuple[str, ...] = ()
    directory: str = "."
    moves: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What one file says. Nothing is guessed: what the file leaves to its framework's defaults is filled with those.

    Attributes:
        framework: Whose file it is, by the option that names it: megatron, torchtitan, deepspeed, nanotron,
            hugging-face or json.
        runtime: The profile that describes the framework.
        model: Fields of a ModelSpec, as far as the file tells them; empty where it tells nothing of the model.
        model_name: The model in the catalog that the file names, or empty.
        missing: Fields of the model that the file leaves open, with what would tell each.
        job: Keys of a study's `job:`. Where global_batch_size is missing it is `micro_batches` times dp times mbs.
        degrees: Degrees by name; dp only where the file tells it and does not leave it to the number of devices.
        open: Degrees, and keys of the job, that the file tells by something that can't be read, with the reason.
        micro_batches: Micro-batches of a step on each replica; None where the file tells the global batch instead.
        layers: Layers of each virtual stage where the file tells them one by one.
        assignment: Uneven work in the form of a configuration, where the file tells it so.
        copies: Copies of the sharded training states: dp over dp_shard.
        hosts: Hosts that the file starts on; None where it doesn't say.
        devices_per_host: Devices of each; None where it doesn't say.
        command: How the program is started; None where the file doesn't say.
        unread: What could not be read, or is not modelled.
        notes: What a user should know besides.
    """

    framework: str
    runtime: str
    model: Mapping[str, Any] = field(default_factory=dict)
    model_name: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    open: Mapping[str, str] = field(default_factory=dict)
    micro_batches: int | None = None
    layers: tuple[int, ...] = ()
    assignment: str = ""
    copies: int = 1
    hosts: int | None = None
    devices_per_host: int | None = None
    command: LaunchCommand | None = None
    unread: tuple[Unread, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_degrees(self) -> bool:
        """Whether the file tells a configuration, and not a model alone."""
        return bool(self.degrees)

    @property
    def num_devices(self) -> int | None:
        """Devices that the file starts on."""
        return None if self.hosts is None or self.devices_per_host is None else self.hosts * self.devices_per_host
