"""Launch command of a script that starts a Python program with torchrun, srun or mpirun, split into its parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.imports.bash.script import Command
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flag, flags_among
from tuner.imports.slurm_launch import end_of_options

Starter = Literal["torchrun", "srun", "mpirun", ""]
"""Program that starts the processes of the devices; empty if none is known."""

MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
"""Programs that start processes of MPI on all hosts."""

_TORCHRUN = ("torchrun", "ft_launcher")
_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")
ALL_DEVICES = ("gpu", "auto", "cpu")
"""Values of torchrun's --nproc-per-node that stand for all devices of a host."""
_OF_SHELL = ("exec", "command", "builtin", "time", "nohup")
"""Words before a command that say how a shell waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Launch command, split into its parts.

    Attributes:
        outer: Words before the launcher, such as srun with its options, containers and numactl.
        launcher: Words before the flags of the launcher.
        launcher_words: Words of the flags of the launcher.
        program: Path of the Python file, or `-m` and a module.
        training: Words after the program, which are its arguments.
        own: Variables that are set for the command alone, with their values.
    """

    outer: tuple[Argument, ...]
    launcher: tuple[Argument, ...]
    launcher_words: tuple[Argument, ...]
    program: tuple[Argument, ...]
    training: tuple[Argument, ...]
    own: tuple[tuple[str, Argument], ...] = ()

    @property
    def name(self) -> str:
        """Name of the file without its folders, or name of the module."""
        return base_name(self.program[-1])

    @property
    def launcher_flags(self) -> list[Flag]:
        """Flags of the launcher, with dashes in place of underscores."""
        return flags_among(self.launcher_words, dashed=True)

    @property
    def starter(self) -> Starter:
        """Program that starts the processes of the devices."""
        texts = [word.text for word in self.launcher]
        if (texts and base_name(self.launcher[-1]) in _TORCHRUN) or texts[-2:] in [["-m", one] for one in _LAUNCHERS]:
            return "torchrun"
        is_python = bool(self.launcher) and is_interpreter(self.launcher[0])
        names = [base_name(word) for word in self.outer]
        if not is_python or "-m" in texts:
            return ""
        return "mpirun" if set(names) & set(MPI) else "srun" if "srun" in names else ""

    @property
    def wrappers(self) -> tuple[Argument, ...]:
        """Words before the launcher that are no part of srun: containers, numactl, profilers, mpirun."""
        names = [base_name(word) for word in self.outer]
        begin = end_of_options(self.outer, names.index("srun") + 1) if "srun" in names else 0
        while begin < len(self.outer) and names[begin] in _OF_SHELL:
            begin += 1
        return self.outer[begin:]

    def unknown(self, kept: Sequence[Argument]) -> tuple[str, ...]:
        """Return the distinct reasons why words of a command with the arguments `kept` are unknown."""
        texts = " ".join(word.text for word in self.launcher)
        why = [] if self.starter else [f"{texts or 'it'} is not torchrun, and neither srun nor mpirun starts it"]
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
    first = next((number for number, word in enumerate(before) if _begins_launcher(word)), 0)
    flag = next((number for number in range(first, at) if before[number].text.startswith("--")), at)
    return Launch(
        outer=(*command.outer, *before[:first]),
        launcher=before[first:flag],
        launcher_words=before[flag:],
        program=words[at:behind],
        training=words[behind:],
        own=command.own,
    )


def _is_program(words: Sequence[Argument], at: int) -> bool:
    """Return whether a Python file, or `-m` with a module other than a launcher, begins at this word."""
    text = words[at].text
    return text.endswith(".py") or (text == "-m" and at + 1 < len(words) and words[at + 1].text not in _LAUNCHERS)


def base_name(word: Argument) -> str:
    """Return the name of a program without its folders."""
    return word.text.rsplit("/", 1)[-1]


def is_interpreter(word: Argument) -> bool:
    """Return whether a word is a Python interpreter."""
    return re.fullmatch(r"python[0-9.]*", base_name(word)) is not None


def _begins_launcher(word: Argument) -> bool:
    """Return whether a word is torchrun, DeepSpeed's launcher or a Python interpreter."""
    return base_name(word) in (*_TORCHRUN, "deepspeed") or is_interpreter(word)
