"""What exporters of flags share: flags by concern, comments, and the bash array that a user pastes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.uneven_work import numbers_in_words
from costmodels.step.schedules import assign_layers
from tuner.export.exporter import Export

Environment = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Flags of one concern, each with its values as bash reads them, and what they cannot say."""

    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def comments(notes: Iterable[str]) -> list[str]:
    """Notes as lines of comment for bash, YAML and Python; a note stays one line whatever names it holds."""
    return [f"# {' '.join(note.split())}" for note in notes]


def export_flags(
    target: str,
    parts: Sequence[Part],
    *,
    array: str,
    head: Sequence[str],
    usage: str,
    environment: Environment = (),
    notes: tuple[str, ...] = (),
) -> Export:
    """The parts as a bash array, to stand before a command and be handed to it.

    Args:
        target: The exporter's name.
        parts: Flags and notes in their order.
        array: Name of the bash array.
        head: What the text says first, as comments.
        usage: A command that takes the array.
        environment: Variables that belong to the flags; None removes one.
        notes: What to note after the parts' notes.
    """
    told = (*(note for part in parts for note in part.notes), *notes)
    flags = [flag for part in parts for flag in part.flags]
    lines = [
        *comments((*head, *told)),
        *(f"unset {name}" if value is None else f"export {name}={value}" for name, value in environment),
        f"{array}=(",
        *(f"    {flag}" for flag in flags),
        ")",
        *comments([usage]),
    ]
    return Export(
        target=target,
        text="\n".join(lines) + "\n",
        notes=told,
        arguments=tuple(word for flag in flags for word in shlex.split(flag)),
        environment=environment,
    )


def layers_of_parts(setting: Setting, config: ParallelConfig) -> tuple[int, ...]:
    """Layers of each virtual stage as they were planned [pp * vpp], no-op layers left out."""
    if config.assignment.layers:
        return config.assignment.layers
    held = assign_layers(setting.job.model, setting.runtime, config.pp * config.vpp, 1)
    return tuple(int(count) for count in held.dense + held.moe)


def runtime_note(setting: Setting, framework: str, runtimes: tuple[str, ...]) -> tuple[str, ...]:
    """That the study is about another runtime, where it is."""
    if setting.runtime.name in runtimes:
        return ()
    return (
        f"runtime: the study is about {setting.runtime.name}; this is for {framework}, which may rank configurations "
        "otherwise",
    )


def uneven(setting: Setting, config: ParallelConfig, *, framework: str, recomputed: str) -> Part:
    """What no flag tells of uneven work: the order of hosts, and what the framework cannot do.

    Args:
        setting: What is trained, and where.
        config: The configuration.
        framework: Its name.
        recomputed: What it does where stages recompute unlike numbers of layers; `{most}` is the largest.
    """
    given, cluster = config.assignment, setting.cluster
    notes = []
    if given.hosts:
        kinds = [group.name for group in cluster.groups for _ in range(group.hosts)]
        order = [f"{len(list(run))} x {kind}" for kind, run in groupby(kinds[host] for host in given.hosts)]
        notes.append(f"hosts: give node ranks in the order {numbers_in_words(given.hosts)} ({', then '.join(order)})")
    if given.recomputed:
        notes.append(f"recomputed: {framework} {recomputed.format(most=max(given.recomputed))}")
    if given.micro_batches:
        notes.append(
            f"micro_batches: {framework} gives every replica as many; {numbers_in_words(given.micro_batches)} needs a "
            "sampler of your own"
        )
    return Part(notes=tuple(notes))
