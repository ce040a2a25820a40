"""Placeholders such as `{tp}` in the arguments and the environment of a command, and their values.

An argument with a placeholder stays one argument whatever the value holds, because no shell reads it. `{{` and `}}` are
braces. Only `{flags}` and `{knobs}` are arguments by themselves, and become as many arguments as there are flags.
`{env:NAME}` is a variable of the environment of `meshtune run`, so that a study can name a secret and not hold it.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence

from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, ParallelConfig
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError, did_you_mean
from hardware.launched_hosts import launched, launched_numbers
from trials.command.training_folder import TRAINING

FLAGS = "flags"
"""Placeholder of the flags of a framework, one argument each."""

KNOBS = "knobs"
"""Placeholder of the flags of a study's knobs, one argument each."""

PLAN = "plan"
"""Placeholder of the path of the file with the candidate's sharding plan."""

PROFILE = "profile"
"""Placeholder of the path of traces, if the study names one."""

ON_HOST = ("host_rank", "master_address", "master_port", PROFILE)
"""Placeholders whose values are known only on the host when the command starts."""

OF_CONFIG = (
    *DEGREES,
    *(name for name in FURTHER_DIMENSIONS if name != PLAN),  # it is a file
    "context_parallel",
    "num_devices",
    "world_size",
    "num_hosts",
    "hosts",
    "devices_per_host",
    "num_micro_batches",
    "global_batch_size",
    "sequence_length",
    "num_layers",
    "trial",
    "warmup_steps",
    "steps",
    "total_steps",
)

OF_JOB = ("num_micro_batches", "global_batch_size", "sequence_length", "num_layers")
"""Those among them that a training job of a model has, and a step of the user's own has not."""

SIZES_ELSEWHERE = {
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines", "nodes"), "num_hosts"),
    **dict.fromkeys(("nproc_per_node", "gpus_per_node", "ntasks_per_node", "num_gpus"), "devices_per_host"),
    **dict.fromkeys(("num_processes", "nproc", "np", "ntasks"), "num_devices"),
    **dict.fromkeys(("node_rank", "machine_rank"), "host_rank"),
    **dict.fromkeys(("master_addr", "main_process_ip"), "master_address"),
    **dict.fromkeys(("main_process_port",), "master_port"),
    **dict.fromkeys(("gradient_accumulation_steps",), "num_micro_batches"),
}
"""Names of the sizes of a job in launchers (torchrun, mpirun, srun, accelerate, DeepSpeed), and our placeholders."""

VARIABLE = "env:"
"""Beginning of a placeholder of a variable of the environment of `meshtune run`."""

PLACEHOLDERS = (*OF_CONFIG, *TRAINING, *ON_HOST)
"""Names of all placeholders except `flags`, `knobs` and those of variables."""


def check_text(text: str, *, flags: bool, knobs: Sequence[str] = (), variables: bool = True) -> None:
    """Check that all placeholders of an argument are known; with `flags` it may be `{flags}` or `{knobs}`.

    Args:
        text: Argument, variable or path.
        flags: Whether it may be a placeholder of several arguments.
        knobs: Names of the study's knobs and files, which are placeholders too.
        variables: Whether it may hold `{env:NAME}`.

    Raises:
        ConfigError: A placeholder is unknown, or a brace has no partner.
    """
    several = {
        FLAGS: f'"{{{FLAGS}}}" in the command, and trial.flags: megatron',
        KNOBS: f'"{{{KNOBS}}}" in the command',
    }
    if flags and text in (f"{{{name}}}" for name in several):
        return
    for name in names_in(text):
        if name in several:
            raise ConfigError(
                "must be an argument of its own, because it expands to several", value=text, nearest=several[name]
            )
        if name.startswith(VARIABLE) and variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name.removeprefix(VARIABLE)):
                raise ConfigError("names no environment variable", value=text, nearest="{env:NAME}")
        elif name not in PLACEHOLDERS and name not in knobs:
            known = (*PLACEHOLDERS, *knobs, *(several if flags else ()))
            ours = SIZES_ELSEWHERE.get(name.lower())
            nearest = f"{{{ours}}}, which is the same" if ours else did_you_mean(name, known)
            raise ConfigError(f"has no value for {{{name}}}", value=text, nearest=nearest)


def values_of(
    job: TrainingJob | None,
    cluster: Cluster,
    config: ParallelConfig,
    *,
    trial_number: int,
    warmup_steps: int,
    steps: int,
) -> dict[str, str]:
    """Return the values of a configuration's placeholders, except for those that only a host knows.

    Without a job, of a step of the user's own, those of OF_JOB have none.
    """
    further = config.values(name for name in OF_CONFIG if name in DEGREES + FURTHER_DIMENSIONS)
    found: dict[str, object] = {
        **further,
        "context_parallel": config.cp * config.up,
        "num_devices": config.num_devices,
        "world_size": config.num_devices,
        "num_hosts": len(hosts_of(cluster, config)),
        "hosts": ",".join(map(str, hosts_of(cluster, config))),
        "devices_per_host": launched(cluster).devices_per_host,
        "trial": trial_number,
        "warmup_steps": warmup_steps,
        "steps": steps,
        "total_steps": warmup_steps + steps,
    }
    if job is not None:
        found |= {
            "num_micro_batches": job.global_batch_size // (config.dp * config.mbs),
            "global_batch_size": job.global_batch_size,
            "sequence_length": job.sequence_length,
            "num_layers": job.model.num_layers,
        }
    assert set(found) == set(OF_CONFIG) - (set(OF_JOB) if job is None else set()), "what is promised is given"
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in found.items()}


def hosts_of(cluster: Cluster, config: ParallelConfig) -> Sequence[int]:
    """Return the numbers of the launched hosts that a configuration uses, in the order of its node ranks."""
    return launched_numbers(cluster, config.assignment.hosts)


def fill_text(text: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of an argument by their values."""
    return "".join(literal + ("" if name is None else values[name]) for literal, name in parts_of(text))


def fill_all(arguments: Sequence[str], values: Mapping[str, str], several: Mapping[str, Sequence[str]]) -> list[str]:
    """Replace the placeholders of all arguments, and those of several, such as `{flags}`, by their words."""
    found: list[str] = []
    for argument in arguments:
        words = several.get(argument[1:-1]) if argument.startswith("{") and argument.endswith("}") else None
        if words is not None:
            found += words
        else:
            found.append(fill_text(argument, values))
    return found


def without_wildcards(path: str) -> str:
    """Return the folder of all files that a pattern names; a path without wildcards is returned as it is."""
    parts = path.split("/")
    plain = list(itertools.takewhile(lambda part: not set(part) & set("*?["), parts))
    return "/".join(plain)


def escape_braces(text: str) -> str:
    """Return a text with its braces escaped, so that it contains no placeholder."""
    return text.replace("{", "{{").replace("}", "}}")


def variables_in(texts: Iterable[str]) -> list[str]:
    """Return the distinct names of the environment variables that texts refer to, in their order."""
    names = [name for text in texts for name in names_in(text)]
    return list(dict.fromkeys(name.removeprefix(VARIABLE) for name in names if name.startswith(VARIABLE)))


def values_of_variables(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the values of environment variables by their placeholders."""
    return {VARIABLE + name: value for name, value in variables}


def names_in(text: str) -> list[str]:
    """Return the names of a text's placeholders, in their order.

    Raises:
        ConfigError: A brace has no partner, or there is more than a name between two braces.
    """
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError:
        raise ConfigError("has an unmatched brace", value=text, nearest="{{ and }} for braces") from None
    for _, name, spec, conversion in fields:
        if name is not None and ((spec and name + ":" != VARIABLE) or conversion):
            raise ConfigError("allows only names between braces", value=text, nearest=f"{{{name}}}")
    return [name for _, name in parts_of(text) if name is not None]


def parts_of(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the plain parts of a text that `names_in` accepts, each with the name of the placeholder behind it."""
    for literal, name, spec, _ in string.Formatter().parse(text):
        yield literal, f"{name}:{spec}" if spec else name
