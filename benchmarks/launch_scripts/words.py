"""Plain reading of a captured command line: its launcher, its program and its flags.

Sources: torch.distributed.run and torch.distributed.launch (`--nnodes`, `--nproc-per-node` and their defaults of 1),
DeepSpeed's launcher (`--num_nodes`, `--num_gpus`), the manual pages of sbatch, srun and mpirun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tuner.capture.record import Record

_MPI = ("mpirun", "mpiexec", "mpiexec.hydra")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Command line taken apart.

    Attributes:
        launcher: torchrun, deepspeed, or empty if the program starts by itself.
        options: Options of the launcher with their values.
        program: File or module that trains.
        flags: Values of each flag of the program, the last occurrence; names have dashes.
        positional: Words of the program that are no flags and follow none.
    """

    launcher: str
    options: Mapping[str, str]
    program: str
    flags: Mapping[str, tuple[str, ...]]
    positional: tuple[str, ...] = ()

    def has(self, *names: str) -> bool:
        """Return whether one of the flags is given."""
        return any(name in self.flags for name in names)

    def text(self, *names: str) -> str:
        """Return the first value of the first flag that is given, or nothing."""
        return next((self.flags[name][0] for name in names if self.flags.get(name)), "")

    def number(self, *names: str) -> int | None:
        """Return the value of the first flag that is given as a whole number."""
        text = self.text(*names).replace("_", "")
        return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def command_of(words: Sequence[str]) -> Command:
    """Take a command line apart."""
    launcher, rest = _launcher(list(words))
    at = 0
    options: dict[str, str] = {}
    while at < len(rest) and launcher:
        word = rest[at]
        if word in ("-m", "--module"):
            at += 1
            break
        if not word.startswith("-"):
            if word.endswith(".py") or (rest[at - 1 : at] and "=" in rest[at - 1]):
                break
            at += 1  # the value of an option, or a program without the usual ending
            continue
        name, equals, value = word.partition("=")
        following = rest[at + 1] if at + 1 < len(rest) else ""
        options[name.replace("_", "-")] = value if equals else following
        at += 1
    program = rest[at] if at < len(rest) else ""
    flags, positional = _flags(rest[at + 1 :])
    return Command(launcher=launcher, options=options, program=program, flags=flags, positional=positional)


def _launcher(words: list[str]) -> tuple[str, list[str]]:
    """Return the launcher and the words behind it."""
    name = words[0].rpartition("/")[2]
    if name.startswith("torchrun"):
        return "torchrun", words[1:]
    if name in ("deepspeed", "deepspeed.pt", "ds"):
        return "deepspeed", words[1:]
    rest = words[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
    if rest[:1] == ["-m"]:
        if rest[1].startswith("torch.distributed."):
            return "torchrun", rest[2:]
        rest = rest[1:]
    return "", rest


def _flags(words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {}
    positional: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--") and not re.fullmatch(r"--?[0-9.]+", word):
            flag, equals, value = word.partition("=")
            name = "--" + flag[2:].replace("_", "-")
            flags[name] = (value,) if equals else ()
        elif name:
            flags[name] = (*flags[name], word)
        else:
            positional.append(word)
    return flags, tuple(positional)


def world_of(record: Record, command: Command, script: str) -> int | None:
    """Return the number of devices on which a recorded command trains, or None if nothing states it."""
    slurm = _slurm(re.findall(r"^#SBATCH[ \t]+(.*)$", script, re.M))
    for outer in record.through:
        if outer[0] in ("srun", "sbatch", "salloc"):
            slurm |= _slurm([" ".join(outer[1:])])
    if command.launcher:
        hosts = _count(command.options, "--nnodes", "--num-nodes")
        if "--nnodes" not in command.options and command.launcher == "torchrun":
            hosts = 1
        devices = _count(command.options, "--nproc-per-node", "--num-gpus")
        if devices is None and command.launcher == "torchrun" and "--nproc-per-node" not in command.options:
            devices = 1
        return hosts * devices if hosts and devices else None
    for outer in record.through:
        if outer[0] in _MPI:
            total = next((int(b) for a, b in pairwise(outer) if a in ("-np", "-n")), None)
            if total:
                return total
    if any(outer[0] == "srun" for outer in record.through) and slurm.get("nodes"):
        return slurm["nodes"] * slurm["ntasks-per-node"] if "ntasks-per-node" in slurm else None
    return None


def _count(options: Mapping[str, str], *names: str) -> int | None:
    text = next((options[name] for name in names if name in options), "")
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,5}", text) else None


def _slurm(lines: Sequence[str]) -> dict[str, int]:
    """Return the counts that options of Slurm state."""
    text = " " + " ".join(line.partition(" #")[0] for line in lines)
    found = {}
    for name, pattern in {
        "nodes": r" (?:--nodes[= ]|-N ?)([0-9]+)",
        "ntasks-per-node": r" --ntasks-per-node[= ]([0-9]+)",
    }.items():
        if match := re.search(pattern, text):
            found[name] = int(match[1])
    return found
