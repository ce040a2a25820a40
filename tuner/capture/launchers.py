"""Programs that have a stand-in, and the command that a launcher or a container starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from tuner.capture.slurm import Allocation

TRAINING = (
    *("python", "python3", "torchrun", "deepspeed", "accelerate", "colossalai", "msrun", "composer", "ds"),
    *("megatron", "nemo"),
)
"""Programs that start a training; a stand-in writes their command down."""
ALIASES = {"deepspeed.pt": "deepspeed", "ft_launcher": "torchrun"}
"""Other names of launchers: DeepSpeed's of 2019, and that of nvidia-resiliency-ext, which takes torchrun's options."""
THROUGH = (
    *("srun", "sbatch", "salloc", "qsub", "jsrun", "aprun", "mpirun", "mpiexec", "mpiexec.hydra", "horovodrun", "ray"),
    *("docker", "podman", "nvidia-docker", "singularity", "apptainer", "enroot", "numactl", "nsys", "sudo"),
    *("conda", "mamba", "micromamba", "uv", "poetry", "pixi"),
    *("taskset", "nice", "ionice", "timeout", "stdbuf", "chrt", "ncu"),
)
"""Programs that start another command; a stand-in runs that command here, where it meets the next stand-in."""
RUN_BESIDES = ("nice", "ionice", "timeout", "stdbuf", "chrt", "taskset")
"""Those of them that really run where they start no command that is known."""
HELD_BACK = (
    *("rm", "rmdir", "kill", "pkill", "killall", "scancel", "shutdown", "reboot"),
    *("ssh", "pdsh", "scp", "rsync", "wget", "curl", "git", "aws", "gsutil", "hf", "huggingface-cli", "wandb"),
    *("pip", "pip3", "conda", "mamba", "micromamba", "uv", "poetry", "pixi", "apt", "apt-get"),
    *("sleep", "squeue", "sinfo", "sacct", "module", "ml", "spack"),
)
"""Programs that delete, end processes, reach other machines, install, load or wait; only written down."""
ANSWERED = ("scontrol", "nvidia-smi")
"""Programs whose output scripts use to count hosts and devices; a stand-in prints it."""

ANY = "meshtune-any-command"
"""Stand-in for every name that the machine does not know."""

_SHELLS = ("bash", "sh", "zsh", "env")
_TAKE_NAMES = (
    *("-n", "--name", "-p", "--prefix", "-w", "--workdir", "-D", "--chdir", "--pwd", "-J", "--job-name", "--hostname"),
    *("--container-name", "--container-image", "--container-workdir", "--project", "--directory"),
)
"""Options of launchers with a name or a folder behind them, which people call after what they train with."""
_SUBCOMMANDS = {"megatron": ("sft", "pt", "rlhf", "export"), "nemo": ("llm", "vlm", "experiment")}
"""Words without which these are no programs: they name packages, images and folders too."""
_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "horovodrun")
_CONTAINERS = {
    "docker": ("run", "exec"),
    "podman": ("run", "exec"),
    "nvidia-docker": ("run", "exec"),
    "singularity": ("run", "exec"),
    "apptainer": ("run", "exec"),
    "enroot": ("start", "exec"),
    "ray": ("job",),
    **dict.fromkeys(("conda", "mamba", "micromamba", "uv", "poetry", "pixi"), ("run",)),
}
"""Programs that start a command only with one of these words behind them."""


def base_name(word: str) -> str:
    """Return the name of a program without its folders."""
    return word.rsplit("/", 1)[-1]


def is_python(name: str) -> bool:
    """Return whether a program is a Python interpreter."""
    return re.fullmatch(r"python[0-9.]*", name) is not None


def is_program(words: Sequence[str]) -> bool:
    """Return whether an interpreter is asked to run a file or a module, and not a short text."""
    rest = iter(words[1:])
    for word in rest:
        if word in ("-c", "-", "-V", "-VV", "--version", "-h", "--help"):
            return False
        if word in ("-W", "-X"):
            next(rest, None)
        elif word == "-m" or not word.startswith("-"):
            return True
    return False


def inner_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command that a launcher or a container starts, or nothing if it starts none that is known.

    It begins at the first word that is a shell, a script or a program with a stand-in. A launcher's options need no
    further list: those that take a name or a folder are known, and values of others are no such words.
    """
    name = base_name(words[0])
    if name == "sbatch":
        return _batch_command(words)
    if name in _CONTAINERS and not set(words[1:4]) & set(_CONTAINERS[name]):
        return ()
    for at, word in enumerate(words[1:], 1):
        inner = base_name(word)
        if word.startswith("-") or words[at - 1] in _TAKE_NAMES:
            continue
        if inner.endswith((".sh", ".bash", ".slurm", ".sbatch")):
            return ("bash", *words[at:])
        if inner.endswith(".py"):
            return ("python", *words[at:])
        if inner in _SUBCOMMANDS and not set(words[at + 1 : at + 2]) & set(_SUBCOMMANDS[inner]):
            continue
        if inner in (*_SHELLS, *TRAINING, *THROUGH) or is_python(inner):
            return tuple(words[at:])
    return ()


def _batch_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a job that sbatch submits: its script with arguments, or the text of `--wrap`."""
    for at, word in enumerate(words[1:], 1):
        if word.startswith("--wrap"):
            return ("bash", "-c", word.partition("=")[2] if "=" in word else "".join(words[at + 1 : at + 2]))
        if not word.startswith("-") and base_name(word).endswith((".sh", ".bash", ".slurm", ".sbatch", ".job")):
            return ("bash", *words[at:])
    return ()


def mpi_allocation(words: Sequence[str]) -> Allocation:
    """Return what the options of mpirun or mpiexec state about processes and hosts."""
    if base_name(words[0]) not in _MPI:
        return Allocation()
    counts = {
        name.lstrip("-"): int(value)
        for name, value in pairwise(words)
        if name.startswith("-") and re.fullmatch(r"[0-9]{1,6}", value)
    }
    total = next((counts[name] for name in ("np", "n", "c") if name in counts), None)
    per_host = next((counts[name] for name in ("N", "npernode", "ppn", "perhost") if name in counts), None)
    mapped = next((re.search(r"ppr:([0-9]{1,4}):node", word) for word in words if word.startswith("ppr:")), None)
    per_host = per_host or (int(mapped[1]) if mapped else None)
    hosts = total // per_host if total and per_host and total % per_host == 0 else None
    return Allocation(hosts=hosts, tasks_per_host=per_host)
