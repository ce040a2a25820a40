"""Building blocks of the exporters: groups of flags, comments, and the bash array that a user pastes."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from costmodels.job.fact_words import has_words, written_words
from costmodels.job.facts import Told, shown
from costmodels.job.parallel_config import DIMENSIONS, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import numbers_in_words
from costmodels.optimizers.registry import DEFAULT_OPTIMIZER, OPTIMIZERS, optimizers_of
from costmodels.step.pipeline.schedules import assign_layers
from hardware.io.config_file import parse_yaml
from hardware.launched_hosts import launched, launched_numbers
from tuner.export.exporter import Export

Environment = tuple[tuple[str, str | None], ...]

HOST_MEMORY = (
    "host memory: offloaded states need 16 bytes of pinned memory for each parameter that a rank updates (weights, "
    "gradients and moments in fp32); the study does not check that the hosts have them"
)
"""Note on the memory of hosts, which no catalog states."""


def num_micro_batches(setting: Setting, config: ParallelConfig) -> int:
    """Return the number of micro-batches of a step on each replica."""
    return max(setting.job.global_batch_size // (config.dp * config.mbs), 1)


def without_experts(config: ParallelConfig) -> str:
    """Return the note on expert parallelism of a model without experts."""
    return f"ep: {config.ep} has no effect, because the model has no experts"


def optimizer_in(framework: str, job: TrainingJob) -> str | None:
    """Return a framework's name of the job's optimizer; None if it has none."""
    return next(iter(OPTIMIZERS[job.optimizer].spellings.get(framework, ())), None)


def without_optimizer(framework: str, title: str, job: TrainingJob) -> str:
    """Return the note on an optimizer that a framework lacks."""
    offered = ", ".join(dict.fromkeys(optimizers_of(framework).values()))
    return f"optimizer: {title} has no {job.optimizer}; it offers {offered}"


def set_optimizer(framework: str, title: str, job: TrainingJob, how: str) -> list[str]:
    """Return the note on an optimizer that is not the framework's default; `how` says where {name} is set."""
    if job.optimizer == DEFAULT_OPTIMIZER:
        return []
    name = optimizer_in(framework, job)
    return [f"optimizer: {how.format(name=name)}" if name else without_optimizer(framework, title, job)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Group of flags for one concern.

    Attributes:
        flags: Flags with their values, quoted for bash.
        notes: Sentences about what the flags cannot express.
    """

    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def format_comments(notes: Iterable[str]) -> list[str]:
    """Format notes as comment lines for bash, YAML and Python.

    Whitespace is collapsed, so that a line break in a name cannot end the comment.
    """
    return [f"# {' '.join(note.split())}" for note in notes]


def export_flags(
    target: str,
    parts: Sequence[Part],
    *,
    array: str,
    head: Sequence[str],
    usage: str,
    environment: Environment = (),
    stated: Told = (),
    notes: tuple[str, ...] = (),
) -> Export:
    """Format the parts as a bash array named `array`, between comments: `head` and all notes, then `usage`.

    The environment holds the variables that the flags require; the value None removes a variable. Variables of facts
    that the study states stand in the text alone: a trial has the environment of its study.
    """
    all_notes = (*(note for part in parts for note in part.notes), *notes)
    flags = list(dict.fromkeys(flag for part in parts for flag in part.flags))
    lines = [
        *format_comments((*head, *all_notes)),
        *(f"unset {name}" if value is None else f"export {name}={value}" for name, value in environment),
        *(f"export {words}" for words in written_words("environment", stated)),
        f"{array}=(",
        *(f"    {flag}" for flag in flags),
        ")",
        *format_comments([usage]),
    ]
    return Export(
        target=target,
        text="\n".join(lines) + "\n",
        notes=all_notes,
        arguments=tuple(word for flag in flags for word in shlex.split(flag)),
        environment=environment,
    )


def stated_facts(setting: Setting, framework: str, *, elsewhere: Collection[str] = ()) -> Part:
    """Return the words of the facts that the study states, and notes on those that the framework has none for.

    Args:
        setting: Job, cluster and runtime of the study.
        framework: Framework whose words they are.
        elsewhere: Facts that other parts write.
    """
    told = [(name, value) for name, value in setting.runtime.stated if name not in elsewhere]
    lacking = [
        (name, value)
        for name, value in told
        if not has_words(framework, name, value) and not has_words("environment", name, value)
    ]
    notes = tuple(f"{name}: no flag says {shown(value)}; check that your program does it" for name, value in lacking)
    return Part(flags=written_words(framework, [one for one in told if one not in lacking]), notes=notes)


def with_facts_as_keys(content: dict[str, Any], setting: Setting, framework: str) -> tuple[str, ...]:
    """Set the keys of the facts that the study states in a configuration, and return notes on those without a key."""
    part = stated_facts(setting, framework)
    for words in part.flags:
        path, _, text = words.partition("=")
        *sections, key = path.split(".")
        inner = content
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = parse_yaml(text)
    return part.notes


def layers_of_parts(setting: Setting, config: ParallelConfig) -> tuple[int, ...]:
    """Return the planned number of layers of each virtual stage [pp * vpp], without no-op layers."""
    if config.assignment.layers:
        return config.assignment.layers
    held = assign_layers(setting.job.model, setting.runtime, config.pp, config.vpp, by_chunk=True)
    return tuple(held.layers.tolist())


def closing_notes(
    setting: Setting, config: ParallelConfig, framework: str, *, rule_sets: tuple[str, ...], named: Collection[str]
) -> tuple[str, ...]:
    """Return notes on dimensions that an exporter lacks, and on a study of another runtime than its framework's.

    Args:
        setting: Job, cluster and runtime of the study.
        config: Configuration to export.
        framework: Name of the framework.
        rule_sets: Rule sets of the framework's runtimes; a profile fitted to a user's own steps keeps its rule set.
        named: Dimensions of DIMENSIONS that the exporter writes, or has notes of its own on.
    """
    usual = ParallelConfig().values(DIMENSIONS)
    values = {name: value for name, value in config.values(DIMENSIONS).items() if name not in named}
    # these values change nothing: experts split as the rest is, and shards of states that are not sharded
    if config.expert_tp == config.tp:
        values.pop("expert_tp", None)
    if not config.zero_stage:
        values.pop("dp_shard", None)
    notes = [
        f"{name}: {framework} has no setting for it; {value} is not exported"
        for name, value in values.items()
        if value != usual[name]
    ]
    if setting.runtime.rule_set not in rule_sets:
        notes.append(
            f"runtime: the study models {setting.runtime.name}; this export is for {framework}, where another "
            "configuration may be the fastest"
        )
    return tuple(notes)


def describe_uneven_work(setting: Setting, config: ParallelConfig, *, framework: str, recomputed: str) -> Part:
    """Return notes about uneven work that no flag can express.

    The clause `recomputed` is about stages that recompute different numbers of layers; `{most}` stands for the largest.
    It is empty where flags say what the stages do.
    """
    work, cluster = config.assignment, setting.cluster
    notes = []
    if work.hosts:
        started, hosts = launched(cluster), launched_numbers(cluster, work.hosts)
        kinds = [group.name for group in started.groups for _ in range(group.hosts)]
        order = [f"{len(list(run))} x {kind}" for kind, run in groupby(kinds[host] for host in hosts)]
        idle = started.num_hosts - len(hosts)
        nodes = f"{len(hosts)} node{'s' if len(hosts) > 1 else ''}"
        launch = f"launch on {nodes}, without the other {idle}; " if idle else ""
        listed = f"{numbers_in_words(hosts)} ({', then '.join(order)})"
        notes.append(f"hosts: {launch}assign node ranks in the order {listed}")
    if work.recomputed and recomputed:
        notes.append(f"recomputed: {framework} {recomputed.format(most=max(work.recomputed))}")
    if work.micro_batches:
        notes.append(
            f"micro_batches: {framework} gives every replica the same number; {numbers_in_words(work.micro_batches)} "
            "requires a custom data sampler"
        )
    return Part(notes=tuple(notes))
