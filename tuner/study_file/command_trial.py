"""A study's `trial:` with `backend: command`, resolved: what is run, how its log is read, and what that means."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from hardware.io.config_file import DocumentedModel
from hardware.io.errors import ConfigError, did_you_mean
from trials.command.backend import CommandBackend, Flags, Launch
from trials.command.log_pattern import LogPattern, named_pattern
from trials.command.placeholders import FLAGS, PROFILE, check_text, names_in
from tuner.export import find_exporter

WITH_FLAGS = ("megatron", "mindspeed", "torchtitan")
"""Exporters that write flags."""

ENDS_COMMAND = ("torchtitan",)
"""Those whose flags end with a subcommand, after which the program takes no other flags."""


class LogKeys(DocumentedModel):
    """`trial.log:` where no framework's name says it."""

    pattern: Annotated[list[str], Field(min_length=1)]
    """Regular expressions whose groups say what a number is; see [your own command](own-command.md#what-is-read)."""


class CommandKeys(DocumentedModel):
    """`trial:` with `backend: command`."""

    backend: Literal["command"]
    """Trials run your own command; see [your own command](own-command.md)."""

    command: Annotated[list[str], Field(min_length=1)]
    """The program and its arguments, with [placeholders](own-command.md)."""

    flags: str | None = None
    """The framework whose flags `{flags}` stands for: `megatron`, `mindspeed` or `torchtitan`."""

    environment: dict[str, str | None] = Field(default_factory=dict)
    """Variables over those of the worker; null removes one."""

    directory: str = "."
    """Where the command begins, relative to the study file."""

    log: str | LogKeys = "megatron"
    """Whose log lines it prints: `megatron`, `mindspeed`, `torchtitan`, `deepspeed` or `nemo`; or `{pattern: [...]}`.
    """

    launch: Launch = "per_host"
    """Started on every host (`per_host`), or `once` where it reaches the hosts by itself."""

    warmup_steps: Annotated[int, Field(ge=0, le=1000)] = 2
    """Step times of the log that are dropped."""

    steps: Annotated[int, Field(ge=1, le=1000)] = 5
    """Step times of the log that are measured after those."""

    logs: str | None = None
    """A folder for whole logs, relative to the study file.

    Default: none: the end of each stands in the study
    """

    profile: str | None = None
    """Where the command leaves traces of torch.profiler, whose operators correct all predictions: a folder, a file or a
    pattern with `*`, relative to the study file, with `{trial}` in it; see [your own command](own-command.md).

    Default: none: no operator times are read
    """

    hang_limit_s: Annotated[float, Field(gt=0)] = 600.0
    """A trial that prints nothing for so long hangs [s]."""

    time_limit_s: Annotated[float, Field(gt=0)] | None = None
    """A trial is cut off after this [s]; the steps that it measured are kept."""

    proxy: None = None
    """Refused: the command trains one job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFlags:
    """The flags of configurations for one framework, as a worker asks for them.

    Attributes:
        setting: What they are flags of.
        target: The exporter's name.
    """

    setting: Setting
    target: str

    def __call__(self, config: ParallelConfig) -> Flags:
        """Those of a configuration."""
        export = find_exporter(self.target)(self.setting, config)
        return Flags(arguments=export.arguments, environment=export.environment)


def command_backend(keys: CommandKeys, setting: Setting, base_dir: Path) -> CommandBackend:
    """What runs the study's trials.

    Args:
        keys: The study's `trial:`.
        setting: What is measured, and where.
        base_dir: The study file's folder, to which paths are relative.

    Raises:
        ConfigError: it cannot run them.
    """
    for number, argument in enumerate(keys.command):
        with _told_under(f"trial.command.{number}"):
            check_text(argument, flags=True)
    for name, text in keys.environment.items():
        with _told_under(f"trial.environment.{name}"):
            check_text(text or "", flags=False)
    _check_profile(keys)
    if len(setting.cluster.groups) > 1 and keys.launch == "per_host":
        raise ConfigError(
            f"needs hosts with equally many devices, and the cluster has {len(setting.cluster.groups)} groups of them",
            key="trial.launch",
            value=keys.launch,
            nearest="launch: once, with a command that reaches all hosts",
        )
    return CommandBackend(
        job=setting.job,
        cluster=setting.cluster,
        arguments=tuple(keys.command),
        environment=tuple(keys.environment.items()),
        flags=_flags(keys, setting),
        directory=(base_dir / keys.directory).absolute(),
        pattern=_pattern(keys.log),
        launch=keys.launch,
        warmup_steps=keys.warmup_steps,
        steps=keys.steps,
        hang_limit_s=keys.hang_limit_s,
        logs=None if keys.logs is None else (base_dir / keys.logs).absolute(),
        profile=keys.profile,
        profile_root=base_dir.absolute(),
    )


def command_meaning(trial: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that give a trial its meaning; values of variables may be secrets, so that only their digest is kept."""
    kept = {name: value for name, value in trial.items() if name not in ("logs", "profile")}
    digests = {
        name: None if text is None else hashlib.sha256(f"{name}={text}".encode()).hexdigest()[:16]
        for name, text in trial["environment"].items()
    }
    return kept | {"environment": digests}


def _check_profile(keys: CommandKeys) -> None:
    texts = [*keys.command, *(text or "" for text in keys.environment.values())]
    if keys.profile is None:
        if any(PROFILE in names_in(text) for text in texts):
            raise ConfigError(
                f"stands in the command as {{{PROFILE}}}, and nothing says where that is",
                key="trial.profile",
                nearest="profile: traces/{trial}",
            )
        return
    with _told_under("trial.profile"):
        check_text(keys.profile, flags=False)
    names = names_in(keys.profile)
    if "trial" not in names or PROFILE in names or {"master_address", "master_port"} & set(names):
        raise ConfigError(
            "must be a place of each trial's own",
            key="trial.profile",
            value=keys.profile,
            nearest="profile: traces/{trial}",
        )


def _flags(keys: CommandKeys, setting: Setting) -> ExportedFlags | None:
    wanted = f"{{{FLAGS}}}" in keys.command
    if keys.flags is None:
        if wanted:
            raise ConfigError(
                f"stands in the command as {{{FLAGS}}}, and nothing says whose", key="trial.flags", nearest="megatron"
            )
        return None
    if not wanted:
        raise ConfigError(
            "are asked for, and nothing takes them",
            key="trial.flags",
            value=keys.flags,
            nearest=f'the argument "{{{FLAGS}}}" in trial.command',
        )
    if keys.flags not in WITH_FLAGS:
        raise ConfigError(
            "is no framework whose flags are known",
            key="trial.flags",
            value=keys.flags,
            nearest=did_you_mean(keys.flags, WITH_FLAGS),
        )
    if keys.flags in ENDS_COMMAND and keys.command[-1] != f"{{{FLAGS}}}":
        raise ConfigError(
            "end with a subcommand, so that nothing may follow them",
            key="trial.flags",
            value=keys.flags,
            nearest=f'"{{{FLAGS}}}" last in trial.command',
        )
    return ExportedFlags(setting=setting, target=keys.flags)


def _pattern(log: str | LogKeys) -> LogPattern:
    if isinstance(log, str):
        with _told_under("trial.log"):
            return named_pattern(log)
    with _told_under("trial.log.pattern"):
        return LogPattern(expressions=tuple(log.pattern))


@contextlib.contextmanager
def _told_under(key: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise error.under(key) from None
