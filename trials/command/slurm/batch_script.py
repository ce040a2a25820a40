"""Batch script of a trial, as sbatch reads it: srun starts the command on the hosts of the job, or the script does.

What a configuration determines is written into the script. What only a host knows (`{host_rank}`, `{master_address}`,
`{master_port}`) becomes a variable that its shell expands. So do variables of the environment of `meshtune run` and the
files of a trial: both may hold secrets, which belong into no command line.

Sources: the manual pages of sbatch and srun of Slurm 24.05.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping, Sequence

from trials.command.host_program import HostPlan
from trials.command.placeholders import FLAGS, KNOBS, PROFILE, parts_of, values_of_variables, without_wildcards

_HOST_RANK = "@meshtune-host-rank@"
"""Stands for the host's rank in the value of a variable, until a host replaces it by its own."""

_FOLDER = "MESHTUNE_FILES"
"""Variable with the folder of a trial's copies of files, on each host."""

_FILES = "@meshtune-files@"
"""Stands for that folder in the value of a variable, until a host replaces it by its own."""

_CARRIER = "MESHTUNE_VALUE_OF_"
"""Beginning of the names under which values of variables travel to the hosts."""

_REFERRED = "MESHTUNE_REFERRED_"
"""Beginning of the names under which variables that the command refers to travel to the hosts."""

_FILE = "MESHTUNE_FILE_"
"""Beginning of the names under which the texts of files travel to the hosts."""

FIRST_PORT, NUM_PORTS = 15_000, 15_000
"""Ports of the first host that jobs use: below those that Linux gives to clients (32,768 to 60,999)."""

_HEAD = f"""\
#!/bin/bash
export MESHTUNE_MASTER_ADDRESS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MESHTUNE_MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))
unset RANK WORLD_SIZE
"""
"""Beginning of each script; the ranks of the process that submits the job would mislead the command."""


_RANKS = """\
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR=$MESHTUNE_MASTER_ADDRESS MASTER_PORT=$MESHTUNE_MASTER_PORT"""
"""Variables by which torch.distributed finds the other processes where none of them is torchrun."""


def batch_script(plan: HostPlan, *, step: Sequence[str], per_device: bool) -> str:
    """Return the script of a trial.

    Args:
        plan: Work of each host.
        step: srun with its options, which starts the command; empty where the script starts it on its own host.
        per_device: Whether each task is the process of one device.
    """
    # values of variables may be secrets, which belong into no command line: hosts find them under other names
    carried = _values(plan, _HOST_RANK) | {
        name: shlex.quote(f"{_FILES}/{name}/{file_name}") for name, file_name, _ in plan.files
    }
    exports = [f"export {_REFERRED}{name}={shlex.quote(value)}" for name, value in plan.variables]
    exports += [f"export {_FILE}{name}={base64.b64encode(text.encode()).decode()}" for name, _, text in plan.files]
    settings = []
    for name, text in plan.environment:
        if text is None:
            settings.append(f"unset {name}")
        else:
            exports.append(f"export {_CARRIER}{name}={_word(text, carried)}")
            settings.append(f'export {name}="${{{_CARRIER}{name}//{_HOST_RANK}/$SLURM_NODEID}}"')
            if plan.files:
                settings.append(f'export {name}="${{{name}//{_FILES}/${_FOLDER}}}"')
    values = _values(plan, '"$SLURM_NODEID"')
    several = {f"{{{FLAGS}}}": plan.flags, f"{{{KNOBS}}}": plan.knobs}
    words: list[str] = []
    for argument in plan.arguments:
        words += map(shlex.quote, several[argument]) if argument in several else [_word(argument, values)]
    command = " ".join(words)
    # a command with files of its own ends before the shell, which removes them
    on_host = "\n".join((*_write_files(plan), *settings, command if plan.files else f"exec {command}"))
    on_host = f"{_RANKS}\n{on_host}" if per_device else on_host
    return "\n".join((_HEAD, *exports, f"exec {shlex.join((*step, 'bash', '-c', on_host))}", ""))


def _write_files(plan: HostPlan) -> list[str]:
    """Return the lines of a shell that write the copies of a trial's files into a folder that ends with the shell."""
    if not plan.files:
        return []
    lines = [f"{_FOLDER}=$(mktemp -d)", f"trap 'rm -rf \"${_FOLDER}\"' EXIT"]
    for name, file_name, _ in plan.files:
        path = _file_path(name, file_name)
        lines += [f'mkdir "${_FOLDER}/{name}"', f'printf %s "${_FILE}{name}" | base64 -d > {path}']
    return lines


def _file_path(name: str, file_name: str) -> str:
    """Return the path of a copy as a word of a shell on its host."""
    return f'"${_FOLDER}/{name}/"{shlex.quote(file_name)}'


def _values(plan: HostPlan, host_rank: str) -> dict[str, str]:
    """Return the placeholders' values as words of a shell."""
    values = {name: shlex.quote(value) for name, value in plan.values} | {
        "host_rank": host_rank,
        "master_address": '"$MESHTUNE_MASTER_ADDRESS"',
        "master_port": '"$MESHTUNE_MASTER_PORT"',
    }
    values |= {name: _file_path(name, file_name) for name, file_name, _ in plan.files}
    values |= values_of_variables((name, f'"${_REFERRED}{name}"') for name, _ in plan.variables)
    if plan.profile is None:
        return values
    return values | {PROFILE: _word(str(plan.profile_root / without_wildcards(plan.profile)), values)}


def _word(text: str, values: Mapping[str, str]) -> str:
    """Return a text with placeholders as one word of a shell."""
    words = (shlex.quote(literal) * bool(literal) + (values[name] if name else "") for literal, name in parts_of(text))
    return "".join(words) or "''"
