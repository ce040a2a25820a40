"""Program behind a trial's command: its interpreter, its Python file or module, its arguments, without wrappers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hardware.io.errors import ConfigError
from trials.started import Started
from tuner.imports.bash.script import Command
from tuner.imports.bash.texts import Argument
from tuner.imports.torchrun import Launch, base_name, is_interpreter, launch_of

CONTAINERS = ("singularity", "apptainer", "docker", "podman", "enroot", "shifter")
"""Programs that start a command in another file system."""
_BRACES = re.compile(r"\{[a-z_]+\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Python program as a rehearsal runs it.

    Attributes:
        interpreter: Path of the Python interpreter.
        script: Path of the Python file; None for a module.
        module: Name of the module that `-m` names; None for a file.
        arguments: Words after it.
        directory: Working directory.
        environment: Variables that the trial sets, by name; None for one that it removes.
    """

    interpreter: str
    script: Path | None
    module: str | None
    arguments: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str | None]


def program_of(starts: Started, environment: Mapping[str, str], key: str = "trial.command") -> Program:
    """Find the program that a trial starts.

    Args:
        starts: What the trial starts.
        environment: Variables of this process, for `$NAME` among the words and the search for the interpreter.
        key: Name of what states the command, for messages.

    Raises:
        ConfigError: the trial starts no command, or one that cannot be rehearsed here.
    """
    if not starts.command or starts.directory is None:
        raise ConfigError("starts no command: a rehearsal needs `backend: command`", key="trial.backend")
    words = [_expanded(word, starts, environment) for word in starts.command]
    launch = launch_of(Command(words=tuple(map(_argument, words)), line=1))
    if launch is None:
        raise ConfigError("names no Python program", key=key, value=shlex.join(words))
    texts = [word.text for word in launch.program]
    if container := next((word.text for word in launch.outer if base_name(word) in CONTAINERS), None):
        rule = "starts the program in a container; a rehearsal runs with an interpreter of this machine"
        raise ConfigError(rule, key=key, value=container, nearest="run `meshtune rehearse` inside the container")
    arguments = tuple(word.text for word in launch.training)
    if unknown := next((word for word in arguments if _BRACES.search(word)), None):
        raise ConfigError("has a value that only a host knows, or a trial's own copy of a file", key=key, value=unknown)
    module = texts[1] if texts[0] == "-m" else None
    script = None if module else starts.directory / texts[0]
    if script is not None and not script.is_file():
        raise ConfigError("names a Python file that is not there", key=key, value=str(script))
    variables = {
        name: None if text is None else _expanded(text, starts, environment)
        for name, text in starts.environment.items()
    }
    return Program(
        interpreter=_interpreter(launch, environment.get("PATH", os.defpath), key),
        script=script,
        module=module,
        arguments=arguments,
        directory=starts.directory,
        environment={name: text for name, text in variables.items() if not _BRACES.search(text or "")},
    )


def _expanded(word: str, starts: Started, environment: Mapping[str, str]) -> str:
    for name in starts.variables:
        word = word.replace(f"${name}", environment.get(name, ""))
    return word


def _argument(text: str) -> Argument:
    return Argument(text=text, line=1)


def _interpreter(launch: Launch, path: str, key: str) -> str:
    """Return the interpreter that the launcher is, names in its first line, or has beside it.

    Raises:
        ConfigError: it is not on this machine.
    """
    names = [word.text for word in launch.launcher]
    name = next((word.text for word in launch.launcher if is_interpreter(word)), names[0] if names else "python3")
    found = shutil.which(name, path=path)
    if found is None:
        rule = "is not on this machine: a rehearsal runs in the environment of the program"
        raise ConfigError(rule, key=key, value=name, nearest="activate that environment")
    if is_interpreter(_argument(name)):
        return found
    with Path(found).open("rb") as file:
        first = file.readline(4096).decode(errors="replace")
    named = re.match(r"#!\s*(\S*python[0-9.]*)\s*$", first)
    if named and os.access(named[1], os.X_OK):
        return named[1]
    beside = shutil.which("python3", path=str(Path(found).parent))
    return beside or shutil.which("python3", path=path) or "python3"
