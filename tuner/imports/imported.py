"""Contract of an importer: the facts that a framework's file states about the current configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from costmodels.job.facts import FactValue
from costmodels.job.model_spec import ModelSpec

if TYPE_CHECKING:
    from trials.command.slurm.jobs import Tasks
    from tuner.imports.log.steps import LogSteps


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """Part of a file that could not be read, or that Meshtune does not model.

    Attributes:
        what: Flag or key of the file.
        why: Reason, together with the value that is used instead.
        line: Line number in the file; None if the format has no lines.
    """

    what: str
    why: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.what}{f' (line {self.line})' if self.line else ''}: {self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """Flag that may change the model, the batch, the layout or memory in a way that the importer does not read.

    Attributes:
        flag: Name of the flag.
        why: Reason.
        key: Key of the study whose answer settles it; empty if only the user's word does that the flag may be ignored.
        line: Line number in the file; None if the format has no lines.
    """

    flag: str
    why: str
    key: str = ""
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.flag}{f' (line {self.line})' if self.line else ''}: {self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """Options of a trial that is a job of Slurm, in the form of a study's `trial:`.

    Attributes:
        sbatch: Options of sbatch.
        srun: Further options of srun.
        time_limit: Time limit of the script's job; empty if it has none.
        changes: Options of the script's job and its srun that a trial has not, what it has instead, and why.
        unknown: Distinct reasons for options that are not known.
    """

    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    time_limit: str = ""
    changes: tuple[tuple[str, str, str], ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCommand:
    """Command that starts the training program, in the form of a study's `trial.command`.

    Attributes:
        framework: Framework whose flags are exchanged and whose log format is read.
        flags: Name of its flags, where a version has others; empty for those of the framework's name.
        arguments: Command-line words with placeholders; unknown words appear as in the script.
        words: Command-line words of the script, from the one on that a trial starts; empty if the script's framework
            has a program of another kind.
        reasons: Reasons for the words of the script that a trial changes, by the flag.
        tasks: Whether a trial starts the command on every host, for each device (as srun does), or once.
        torchrun: Positions in `arguments` at which the flags of torchrun begin and end; None without torchrun.
        environment: Environment variables that the script exports with known values.
        unknown: Distinct reasons for unknown arguments; empty if the whole command is known.
        left_out: Flags of the script that a trial must not have.
        not_copied: Names of exported variables that are not in `environment`.
        variables: Names of variables that `{env:NAME}` stands for in the arguments and the environment, in place of the
            script's secrets.
        shows_secret: Whether an option of Slurm shows a secret, which no variable can stand for there.
        directory: Working directory of the command.
        script: Name of the script, if the configuration was imported from another file.
        steps_per_line: Number of training steps that the time of one line of its log covers.
        slurm: Options of the job that each trial is; None if the script says nothing of Slurm.
        moves: Last `cd` of the script before the command if its target is not a known absolute path, otherwise empty.
    """

    framework: str
    arguments: tuple[str, ...]
    words: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    flags: str = ""
    tasks: Tasks = "per_host"
    torchrun: tuple[int, int] | None = None
    environment: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    left_out: tuple[str, ...]
    not_copied: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    shows_secret: bool = False
    directory: str = "."
    slurm: SlurmOptions | None = None
    moves: str = ""
    script: str = ""
    steps_per_line: int = 1

    @property
    def launch(self) -> Literal["per_host", "once"]:
        """Whether a trial that is no job of Slurm starts the command on every host, or once."""
        return "once" if self.tasks == "once" and self.slurm is None else "per_host"


class Blocks(Protocol):
    """Layers that differ from those of a plain decoder."""

    def apply(self, model: ModelSpec) -> ModelSpec:
        """Return a plain decoder with these layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Facts that one file states. Missing values are filled with the defaults of the framework, never guessed.

    Attributes:
        framework: Name of the framework, as in the command's option: megatron, torchtitan, deepspeed, nanotron,
            gpt-neox, flagscale, hugging-face, json or log.
        runtime: Name of the runtime profile that describes the framework.
        model: Fields of a ModelSpec that the file states; empty if it does not describe the model.
        blocks: Layers of that model that are no plain decoder's, if the file states some.
        model_name: Name of the model in the catalog, or empty.
        named: Model that the framework knows by a name, and the catalog does not.
        missing: Fields of the model that the file does not state, with the flag or key for each, or a reason.
        job: Keys of a study's `job:`. A missing global_batch_size is `micro_batches` times dp times mbs.
        degrees: Parallel degrees by name. Most files leave dp to the number of devices; it is absent then.
        open: Degrees and keys of the job whose values could not be read, with the reason for each.
        origins: Flags that state degrees and keys of the job, with their lines, by key; as far as known.
        micro_batches: Micro-batches per step on each replica; None if the file states the global batch instead.
        layers: Number of layers of each virtual stage if the file states them, otherwise empty.
        assignment: Uneven work as text of a configuration, or empty.
        facts: Facts of the run that the file says, by their names in `costmodels.job.facts`.
        copies: Number of copies of the sharded training states: dp over dp_shard.
        hosts: Number of hosts that the file starts on; None if unknown.
        devices_per_host: Number of devices per host; None if unknown.
        command: Command that starts the training program; None if unknown.
        steps: Lines of a log with the steps of this configuration; None if the file is no log.
        unread: Parts of the file that could not be read or are not modelled.
        doubts: Flags that may change the study and that were not read; the user has to say what they do.
        notes: Further information for the user.
    """

    framework: str
    runtime: str
    model: Mapping[str, Any] = field(default_factory=dict)
    blocks: Blocks | None = None
    model_name: str = ""
    named: ModelSpec | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    open: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    micro_batches: int | None = None
    layers: tuple[int, ...] = ()
    assignment: str = ""
    facts: Mapping[str, FactValue] = field(default_factory=dict)
    copies: int = 1
    hosts: int | None = None
    devices_per_host: int | None = None
    command: LaunchCommand | None = None
    steps: LogSteps | None = None
    unread: tuple[Unread, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int | None:
        """Number of devices that the file starts on; None if unknown."""
        return None if self.hosts is None or self.devices_per_host is None else self.hosts * self.devices_per_host

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Degrees and keys of the job that the words of a command state, or need, and do not tell."""
        return tuple(name for name in self.open if name in self.origins or name in ("mbs", "vpp"))
