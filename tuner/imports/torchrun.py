"""How a launch script starts a Python program with torchrun, and how a trial starts it so.

Hosts and devices become placeholders of a study's `trial.command`; what the script exports comes along.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.imports.bash.script import Command, Script
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import Flag, flags_among

TORCHRUN = (
    "--nnodes={num_hosts}",
    "--nproc-per-node={devices_per_host}",
    "--node-rank={host_rank}",
    "--master-addr={master_address}",
    "--master-port={master_port}",
)

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.I)
_OURS = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)
_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One command cut into its parts.

    Attributes:
        launcher: The words before the launcher's flags.
        launcher_flags: Its flags, with dashes in their names.
        program: The Python file, or `-m` and a module.
        training: The words behind it.
    """

    launcher: tuple[Argument, ...]
    launcher_flags: list[Flag]
    program: tuple[Argument, ...]
    training: tuple[Argument, ...]

    @property
    def name(self) -> str:
        """The file without its folders, or the module."""
        return self.program[-1].text.rsplit("/", 1)[-1]

    @property
    def begin(self) -> tuple[str, ...]:
        """How a trial starts the program, up to its own words."""
        texts = (word.text for word in (*self.launcher, *self.program))
        launcher = tuple(map(braced, texts))
        at = len(self.launcher)
        return (*launcher[:at], *TORCHRUN, *launcher[at:])

    def unknown(self, kept: Sequence[Argument]) -> tuple[str, ...]:
        """Why the command is not known whole, if a trial keeps these words of it behind the program."""
        texts = [word.text for word in self.launcher]
        is_torchrun = texts[-1:] == ["torchrun"] or texts[-2:] in [["-m", module] for module in _LAUNCHERS]
        why = [] if is_torchrun else [f"{' '.join(texts) or 'the launcher'} is not torchrun"]
        why += [word.unknown for word in (*self.launcher, *self.program, *kept) if word.unknown]
        return tuple(dict.fromkeys(why))


def launch_of(command: Command) -> Launch | None:
    """The parts of a command that starts a Python file or module; None for any other."""
    words = command.words
    at = next((number for number in range(len(words)) if _is_program(words, number)), None)
    if at is None:
        return None
    behind = at + 1 if words[at].text.endswith(".py") else at + 2
    before = words[:at]
    first = next((number for number, word in enumerate(before) if _begins_launcher(word.text)), 0)
    flag = next((number for number in range(first, at) if before[number].text.startswith("--")), at)
    flags = [
        Flag(name=one.name.replace("_", "-"), line=one.line, values=one.values) for one in flags_among(before[flag:])
    ]
    return Launch(launcher=before[first:flag], launcher_flags=flags, program=words[at:behind], training=words[behind:])


def _is_program(words: Sequence[Argument], at: int) -> bool:
    """Whether a file, or `-m` with a module that is no launcher, begins here."""
    text = words[at].text
    return text.endswith(".py") or (text == "-m" and at + 1 < len(words) and words[at + 1].text not in _LAUNCHERS)


def _begins_launcher(text: str) -> bool:
    name = text.rsplit("/", 1)[-1]
    return name == "torchrun" or re.fullmatch(r"python[0-9.]*", name) is not None


def braced(text: str) -> str:
    """A text in which no placeholder stands."""
    return text.replace("{", "{{").replace("}", "}}")


def environment_of(script: Script) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """What the script exports, and the names of what is not copied: secrets, and values that only a run could tell.

    What `{flags}` and the placeholders bring along is in neither.
    """
    found, not_copied = [], []
    for name in script.exported:
        words = script.variables.get(name, ())
        if name in _OURS:
            continue
        if words and not any(word.unknown for word in words) and not _SECRET.search(name):
            found.append((name, braced(" ".join(word.text for word in words))))
        else:
            not_copied.append(name)
    return tuple(found), tuple(not_copied)


def directory_of(script: Script, launch: Launch) -> tuple[str, str]:
    """Where the script starts its program, `.` where that is no absolute path; then also the `cd` that says so."""
    line = launch.program[0].line
    moves = [command for command in script.commands if command.words[0].text == "cd" and command.line <= line]
    if not moves:
        return ".", ""
    texts = [word.text for word in moves[-1].words]
    known = len(moves[-1].words) == 2 and not moves[-1].words[1].unknown and texts[1].startswith("/")
    return (texts[1], "") if known else (".", " ".join(texts))
