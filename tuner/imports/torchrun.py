"""Launch command of a script that starts a Python program with torchrun, and its conversion for trials.

Hosts and devices become placeholders of a study's `trial.command`. Exported variables are copied to its environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tuner.imports.bash.script import Command, Script
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flag, flags_among
from tuner.imports.imported import LaunchCommand
from tuner.imports.session import is_of_session
from tuner.imports.slurm_launch import slurm_options

TORCHRUN = (
    "--nnodes={num_hosts}",
    "--nproc-per-node={devices_per_host}",
    "--node-rank={host_rank}",
    "--master-addr={master_address}",
    "--master-port={master_port}",
)
"""Flags of torchrun in the command of a trial."""

_SET_BY_TRIALS = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)
"""Environment variables that each trial sets itself."""
_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Launch command, split into its parts.

    Attributes:
        outer: Words before the launcher, such as srun with its options.
        launcher: Words before the flags of the launcher.
        launcher_flags: Flags of the launcher, with dashes in place of underscores.
        program: Path of the Python file, or `-m` and a module.
        training: Words after the program, which are its arguments.
    """

    outer: tuple[Argument, ...]
    launcher: tuple[Argument, ...]
    launcher_flags: list[Flag]
    program: tuple[Argument, ...]
    training: tuple[Argument, ...]

    @property
    def name(self) -> str:
        """Name of the file without its folders, or name of the module."""
        return self.program[-1].text.rsplit("/", 1)[-1]

    @property
    def begin(self) -> tuple[str, ...]:
        """Words of a trial's command up to and including the program."""
        launcher, program = (
            tuple(escape_braces(word.text) for word in words) for words in (self.launcher, self.program)
        )
        module = ("-m", "torch.distributed.run") if self._is_process_of_srun else ()
        return (*launcher, *module, *TORCHRUN, *program)

    @property
    def _is_process_of_srun(self) -> bool:
        """Whether srun starts the program itself, once for each device: torchrun can start the same processes."""
        is_python = bool(self.launcher) and re.fullmatch(r"(.*/)?python[0-9.]*", self.launcher[0].text) is not None
        has_module = any(word.text == "-m" for word in self.launcher)
        return is_python and not has_module and any(word.text.rsplit("/", 1)[-1] == "srun" for word in self.outer)

    def unknown(self, kept: Sequence[Argument]) -> tuple[str, ...]:
        """Return the distinct reasons why words of a command with the arguments `kept` are unknown."""
        texts = [word.text for word in self.launcher]
        is_torchrun = texts[-1:] == ["torchrun"] or texts[-2:] in [["-m", module] for module in _LAUNCHERS]
        why = [] if is_torchrun or self._is_process_of_srun else [f"{' '.join(texts) or 'it'} is not torchrun"]
        why += [word.unknown for word in (*self.launcher, *self.program, *kept) if word.unknown]
        return tuple(dict.fromkeys(why))


def launch_of(command: Command) -> Launch | None:
    """Split a command that starts a Python file or module into its parts; return None for any other command."""
    words = command.words
    at = next((number for number in range(len(words)) if _is_program(words, number)), None)
    if at is None:
        return None
    behind = at + 1 if words[at].text.endswith(".py") else at + 2
    before = words[:at]
    first = next((number for number, word in enumerate(before) if _begins_launcher(word.text)), 0)
    flag = next((number for number in range(first, at) if before[number].text.startswith("--")), at)
    flags = flags_among(before[flag:], dashed=True)
    return Launch(
        outer=(*command.outer, *before[:first]),
        launcher=before[first:flag],
        launcher_flags=flags,
        program=words[at:behind],
        training=words[behind:],
    )


def _is_program(words: Sequence[Argument], at: int) -> bool:
    """Return whether a Python file, or `-m` with a module other than a launcher, begins at this word."""
    text = words[at].text
    return text.endswith(".py") or (text == "-m" and at + 1 < len(words) and words[at + 1].text not in _LAUNCHERS)


def _begins_launcher(text: str) -> bool:
    """Return whether a word is torchrun, DeepSpeed's launcher or a Python interpreter."""
    name = text.rsplit("/", 1)[-1]
    return name in ("torchrun", "deepspeed") or re.fullmatch(r"python[0-9.]*", name) is not None


def escape_braces(text: str) -> str:
    """Escape the braces of a text, so that it contains no placeholder."""
    return text.replace("{", "{{").replace("}", "}}")


def sort_words(
    words: Iterable[Argument],
    name_of: Callable[[str], str],
    *,
    replaces: Callable[[str], bool],
    leaves: Callable[[str], bool],
) -> tuple[list[Argument], tuple[str, ...]]:
    """Return the arguments that a trial keeps, and the names of the flags that it leaves out.

    `{flags}` replaces some flags, and a trial must not have others. The words after a flag share its fate. `name_of`
    reads the name of a flag off its word.
    """
    kept: list[Argument] = []
    left_out = []
    keeps = True
    for word in words:
        if word.text.startswith("--"):
            name = name_of(word.text)
            keeps = not leaves(name) and not replaces(name)
            left_out += [name] if leaves(name) else []
        if keeps:
            kept.append(word)
    return kept, tuple(dict.fromkeys(left_out))


def trial_command(
    launch: Launch,
    script: Script,
    *,
    framework: str,
    own: Iterable[str],
    unknown: tuple[str, ...],
    left_out: tuple[str, ...],
) -> LaunchCommand:
    """Return the command of a trial: the launcher of the script with its environment, and the program's `own` words."""
    environment, not_copied = _environment_of(script)
    directory, moves = _directory_of(script, launch)
    slurm = slurm_options(script.header, launch.outer)
    return LaunchCommand(
        framework=framework,
        arguments=(*launch.begin, *own),
        environment=environment,
        unknown=(*unknown, *(slurm.unknown if slurm else ())),
        left_out=left_out,
        slurm=slurm,
        not_copied=not_copied,
        directory=directory,
        moves=moves,
    )


def _environment_of(script: Script) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the exported variables with their values, and the names of variables that are not copied.

    What belongs to the shell is not copied, nor what is known only at run time. Variables that `{flags}` and the
    placeholders set are in neither result.
    """
    found, not_copied = [], []
    for name in script.exported:
        words = script.variables.get(name, ())
        if name in _SET_BY_TRIALS:
            continue
        if words and not any(word.unknown for word in words) and not is_of_session(name):
            found.append((name, escape_braces(" ".join(word.text for word in words))))
        else:
            not_copied.append(name)
    return tuple(found), tuple(not_copied)


def _directory_of(script: Script, launch: Launch) -> tuple[str, str]:
    """Return the working directory of the program, and the `cd` command that could not be followed.

    The directory is `.` unless the last `cd` before the program leads to a known absolute path.
    """
    line = launch.program[0].line
    moves = [command for command in script.commands if command.words[0].text == "cd" and command.line <= line]
    if not moves:
        return ".", ""
    texts = [word.text for word in moves[-1].words]
    known = len(moves[-1].words) == 2 and not moves[-1].words[1].unknown and texts[1].startswith("/")
    return (texts[1], "") if known else (".", " ".join(texts))
