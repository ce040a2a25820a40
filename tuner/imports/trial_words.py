"""Conversion of a script's launch command into the command of trials, which keeps its words.

Only what a trial has of its own is exchanged, where it stands: the numbers of hosts and devices, and the address at
which its processes meet. What a trial must not do is left out. Each change has its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from trials.command.own_words import flag_of, segments_of
from trials.command.placeholders import escape_braces
from trials.command.slurm.jobs import Tasks
from tuner.imports.bash.script import Script
from tuner.imports.bash.texts import Argument
from tuner.imports.imported import LaunchCommand
from tuner.imports.session import is_of_session
from tuner.imports.slurm_launch import slurm_options
from tuner.imports.torchrun import ALL_DEVICES, Launch

HOSTS, DEVICES, MEETING = (
    "a trial has the hosts of its configuration",
    "a trial has the devices of its hosts",
    "the processes of each trial meet at an address of their own",
)
"""Reasons for the words of launchers that are exchanged."""

_ADDRESS, _PORT = "{master_address}", "{master_port}"
_OF_TORCHRUN: Mapping[str, tuple[str, str]] = {
    "--nnodes": ("{num_hosts}", HOSTS),
    "--nproc-per-node": ("{devices_per_host}", DEVICES),
    "--node-rank": ("{host_rank}", HOSTS),
    "--master-addr": (_ADDRESS, MEETING),
    "--master-port": (_PORT, MEETING),
    "--rdzv-endpoint": (f"{_ADDRESS}:{_PORT}", MEETING),
    "--rdzv-id": ("{trial}", MEETING),
}
_ALONE = "--standalone"
_END = Argument(text="", line=0)
ValueOf = Callable[[str, Argument], tuple[str, str] | None]
"""Function that returns the value of a flag in a trial with the reason; None for the script's own."""
_TASKS: Mapping[str, Tasks] = {"srun": "per_device", "mpirun": "once"}
"""Processes that a job starts, by the program that starts those of the devices."""

_OF_MPI: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("-np", "--np", "-n", "--n", "-c"), ("{num_devices}", DEVICES)),
    **dict.fromkeys(
        ("-npernode", "--npernode", "-N", "-ppn", "--ppn", "-perhost", "--ntasks-per-node"),
        ("{devices_per_host}", DEVICES),
    ),
}
_MEETS = {"MASTER_ADDR": _ADDRESS, "MASTER_PORT": _PORT}
"""Variables by which processes find each other, with what trials set them to."""

_SET_BY_TRIALS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Environment variables that the launcher of each trial sets itself."""


def keep_words(
    words: Iterable[Argument], leaves: Callable[[str], str], *, switches: Set[str] = frozenset()
) -> tuple[list[Argument], dict[str, str]]:
    """Return the arguments that a trial keeps, and the reasons for the flags that it leaves out, as they are spelled.

    An unknown word may be more flags, as `$MORE_ARGS` is, unless it stands where a flag has its first value.

    Args:
        words: Arguments of the program.
        leaves: Function that returns the reason why a trial must not have a flag, or an empty text.
        switches: Flags without a value.
    """
    kept: list[Argument] = []
    left_out: dict[str, str] = {}
    why, takes_value = "", False
    for word in words:
        if name := flag_of(word.text):
            why, takes_value = leaves(name), name not in switches and "=" not in word.text
            left_out |= {word.text.partition("=")[0]: why} if why else {}
        elif word.unknown and not takes_value:
            why = ""
        else:
            takes_value = False
        if not why:
            kept.append(word)
    return kept, left_out


def with_value(words: Sequence[Argument], flag: str, value: str) -> list[Argument]:
    """Return arguments in which a flag has a value, where it stands or at the end."""
    at = next((number for number, word in enumerate(words) if flag_of(word.text) == flag_of(flag)), None)
    if at is None:
        return [*words, Argument(text=flag, line=0), Argument(text=value, line=0)]
    name, equals, _ = words[at].text.partition("=")
    own = [replace(words[at], text=f"{name}={value}" if equals else name, unknown="")]
    own += [] if equals else [Argument(text=value, line=words[at].line)]
    return [*words[:at], *own, *words[at + (1 if equals else 2) :]]


def launch_command(
    launch: Launch,
    script: Script,
    *,
    framework: str,
    arguments: Sequence[str],
    left_out: dict[str, str],
    reasons: dict[str, str],
    unknown: tuple[str, ...],
) -> LaunchCommand:
    """Return the command of a trial.

    Args:
        launch: Launch command of the script.
        script: Script.
        framework: Framework whose flags are exchanged and whose log format is read.
        arguments: Arguments of the program in the command of a trial, with placeholders.
        left_out: Reasons for the arguments that a trial must not have, by the flag.
        reasons: Reasons for other changed arguments, by the flag.
        unknown: Reasons why parts of the command are unknown.
    """
    begin, torchrun, changes, hidden = _launcher_words(launch)
    environment, of_variables, not_copied = _environment_of(script, dict(launch.own))
    directory, moves = _directory_of(script, launch)
    tasks = _TASKS.get(launch.starter, "per_host")
    slurm = slurm_options(script.header, launch.outer, tasks)
    words = (*launch.wrappers, *launch.launcher, *launch.launcher_words, *launch.program, *launch.training)
    return LaunchCommand(
        framework=framework,
        arguments=(*begin, *arguments),
        words=tuple(escape_braces(word.text) for word in words),
        reasons={**changes, **{flag_of(flag): why for flag, why in (left_out | reasons).items()}, **of_variables},
        tasks=tasks,
        torchrun=torchrun,
        environment=environment,
        unknown=tuple(dict.fromkeys((*unknown, *hidden, *(slurm.unknown if slurm else ())))),
        left_out=tuple(left_out),
        slurm=slurm,
        not_copied=not_copied,
        directory=directory,
        moves=moves,
    )


def on_hosts(command: LaunchCommand, hosts: int) -> LaunchCommand:
    """Return the command with the flags of torchrun that trials on so many hosts need beside the script's.

    Each trial has a port of its own. A script of one host may name neither the hosts nor their ranks, or be
    `--standalone`; every host would train alone if the study has several.
    """
    if command.torchrun is None:
        return command
    begin, end = command.torchrun
    own = segments_of(command.arguments[begin:end])
    given = {one.name for one in own}
    needed: tuple[str, ...] = ("--nnodes",) if hosts > 1 else ()
    if "--rdzv-endpoint" not in given and (hosts > 1 or _ALONE not in given):
        needed += ("--node-rank", "--master-addr", "--master-port") if hosts > 1 else ("--master-port",)
    missing = [name for name in needed if name not in given]
    flags = [word for one in own if hosts == 1 or one.name != _ALONE for word in one.words]
    flags += [f"{name}={_OF_TORCHRUN[name][0]}" for name in missing]
    return replace(
        command,
        arguments=(*command.arguments[:begin], *flags, *command.arguments[end:]),
        torchrun=(begin, begin + len(flags)),
        reasons={**command.reasons, **{name: _OF_TORCHRUN[name][1] for name in missing}, _ALONE: HOSTS},
    )


def _launcher_words(launch: Launch) -> tuple[list[str], tuple[int, int] | None, dict[str, str], list[str]]:
    """Return the words of a trial's command up to its arguments, and the place of torchrun's flags among them.

    The reasons for changes and for unknown words follow.
    """
    reasons: dict[str, str] = {}
    unknown: list[str] = []

    def exchanged(words: Sequence[Argument], value_of: ValueOf) -> list[str]:
        texts, flag = [], ""
        for word in (*words, _END):
            name = flag_of(word.text) if word.text.startswith("-") else ""
            own, equals, value = word.text.partition("=")
            # a command that counts devices prints nothing away from them, so the flag before has no value
            if flag and (name or word is _END) and (counted := value_of(flag, _END)):
                texts.append(counted[0])
                reasons[flag] = counted[1]
            if word is _END:
                break
            # the value of a flag stands behind its equals sign, or is the next word
            flag, given = (name, value if equals else None) if name else (flag, word.text)
            new = value_of(flag, replace(word, text=given)) if flag and given is not None else None
            if new is None:
                unknown.extend([word.unknown] if word.unknown else [])
                texts.append(escape_braces(word.text))
            else:
                texts.append(f"{own}={new[0]}" if name else new[0])
                reasons[flag] = new[1]
            flag = "" if given is not None else flag
        return texts

    wrappers = exchanged(launch.wrappers, _of_mpi if launch.starter == "mpirun" else _as_it_is)
    launcher = exchanged(launch.launcher, _as_it_is)
    flags = exchanged(launch.launcher_words, _of_torchrun if launch.starter == "torchrun" else _as_it_is)
    begin = len(wrappers) + len(launcher)
    at = (begin, begin + len(flags)) if launch.starter == "torchrun" else None
    return [*wrappers, *launcher, *flags, *exchanged(launch.program, _as_it_is)], at, reasons, unknown


def _as_it_is(_flag: str, _value: Argument) -> None:
    return None


def _of_torchrun(flag: str, value: Argument) -> tuple[str, str] | None:
    """Return the value of a flag of torchrun in a trial, with the reason; None for the script's own."""
    is_free = flag == "--rdzv-id" and not value.unknown
    is_counted = flag == "--nproc-per-node" and value.text in ALL_DEVICES
    return None if is_free or is_counted else _OF_TORCHRUN.get(flag)


def _of_mpi(flag: str, value: Argument) -> tuple[str, str] | None:
    """Return the value of an option of mpirun in a trial, with the reason; None for the script's own."""
    name, equals, _ = value.text.partition("=")
    if flag == "-x" and equals and name in _MEETS:
        return f"{name}={_MEETS[name]}", MEETING
    if flag in ("--map-by", "-map-by") and (found := re.fullmatch(r"ppr:[0-9]+:node(.*)", value.text)):
        return f"ppr:{{devices_per_host}}:node{found[1]}", DEVICES
    return _OF_MPI.get(flag)


def _environment_of(
    script: Script, own: Mapping[str, Argument]
) -> tuple[tuple[tuple[str, str], ...], dict[str, str], tuple[str, ...]]:
    """Return the exported variables with their values, the reasons for changes, and the names of those not copied.

    What belongs to the shell is not copied, nor what is known only at run time. `own` are the variables that the script
    sets for the command alone.
    """
    found, reasons, not_copied = [], {}, []
    for name in dict.fromkeys((*script.exported, *own)):
        words = (own[name],) if name in own else script.variables.get(name, ())
        if name in _MEETS:
            found.append((name, _MEETS[name]))
            reasons[name] = MEETING
        elif name in _SET_BY_TRIALS:
            reasons[name] = "the launcher of each trial sets it"
        elif words and not any(word.unknown for word in words) and not is_of_session(name):
            found.append((name, escape_braces(" ".join(word.text for word in words))))
        else:
            not_copied.append(name)
            reasons[name] = "its value is known only at run time: set it where `meshtune run` starts"
    return tuple(found), reasons, tuple(not_copied)


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
