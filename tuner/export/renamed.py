"""Exports for programs that run megatron-core and take its settings under keys of their own.

A recipe or the program's defaults have values of their own, so that settings which a configuration leaves off are
written too. What no configuration decides, such as the number format, stays as the program has it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export.exporter import Export
from tuner.export.flag_table import FlagValue, read_flags
from tuner.export.megatron import NAMED, environment, head_comments, megatron_parts
from tuner.export.megatron_flags import (
    COMM,
    EP,
    FSDP2,
    GLOBAL,
    GRANULARITY,
    INSTANCES,
    KEEPS_WEIGHTS,
    LAYOUT,
    LEVELS,
    MEGATRON_FLAGS,
    PATTERN,
    PP,
    SEQUENCE,
    SHARDING,
    VPP,
)
from tuner.export.parts import Part, closing_notes, export_flags
from tuner.export.sequences import script_notes

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
COUNTS_EMBEDDING, COUNTS_LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"

OFF: Mapping[str, FlagValue] = {
    FIRST: None,
    LAST: None,
    COUNTS_EMBEDDING: False,
    COUNTS_LOSS: False,
    "--sequence-parallel": False,
    VPP: None,
    EP: 1,
    GRANULARITY: None,
    "--recompute-method": None,
    "--recompute-num-layers": None,
    "--use-distributed-optimizer": False,
}
"""Values of flags that a configuration leaves off. Stages of unequal length are written as a layout instead."""

_KEPT = frozenset(
    {
        *("--bf16", "--fp16", "--fp8-format", "--fp4-format", "--fp4-recipe", "--optimizer"),
        *("--moe-token-dispatcher-type", "--moe-grouped-gemm", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--no-gradient-accumulation-fusion", "--ckpt-format", "--sft", "--outer-dp-sharding-strategy"),
    }
)
"""Flags of Megatron-LM that these exports leave to the program: no candidate decides them."""


_DIMENSION_OF = {
    LEVELS: "up",
    INSTANCES: "dp_shard",
    SHARDING: "zero_stage",
    "--use-megatron-fsdp": "zero_stage",
    FSDP2: "sharding",
    KEEPS_WEIGHTS: "weights",
    "--optimizer-cpu-offload": "offload",
    "--optimizer-offload-fraction": "offload",
    "--overlap-cpu-optimizer-d2h-h2d": "host memory",
    "--use-precision-aware-optimizer": "offload",
    GLOBAL: "global_batch_size",
    SEQUENCE: "sequence_length",
}
"""Dimension or key of the job that a flag states."""
_INSTEAD = {
    "up": "; ring attention over cp*up ranks replaces all-to-all and ring",
    "zero_stage": "; the optimizer's states alone are sharded",
    "sharding": "; nothing is sharded",
    "weights": "; they are gathered again in the backward pass (ZeRO 3)",
    "host memory": "; transfers of offloaded states do not overlap",
    "global_batch_size": "; it follows from mini-batches and answers",
    "sequence_length": "; it follows from the data",
}
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Program that takes Megatron-LM's settings under other names.

    Attributes:
        target: Name of the exporter.
        title: Name of the program.
        versions: Versions of the program that take the settings.
        keys: Names of each flag of Megatron-LM there.
        words: Function that returns the words of one setting.
        usage: Command that takes the settings, for a comment.
        off: Values of flags that a configuration leaves off, besides those of OFF.
        connections: Value of CUDA_DEVICE_MAX_CONNECTIONS with sharded weights; None removes the variable.
        notes: Notes for every configuration.
    """

    target: str
    title: str
    versions: str
    keys: Mapping[str, tuple[str, ...]]
    words: Callable[[str, FlagValue], tuple[str, ...]]
    usage: str
    off: Mapping[str, FlagValue] = field(default_factory=dict)
    connections: str | None = None
    notes: tuple[str, ...] = ()


STAGES = (PP, VPP, LAYOUT, PATTERN, FIRST, LAST, COUNTS_EMBEDDING, COUNTS_LOSS)
"""Flags that divide the layers together, so that one of them changes with the others."""


def keys_of(program: Program, flags: Iterable[str]) -> tuple[str, ...]:
    """Return the keys of flags in a program, without the signs that add a key."""
    return tuple(key.lstrip("+") for flag in flags for key in program.keys.get(flag, ()))


def export_renamed(program: Program, setting: Setting, config: ParallelConfig) -> Export:
    """Return a bash array of the settings that the configuration determines."""
    parts = megatron_parts(replace(setting, job=setting.job.largest), config)
    given = read_flags([word for part in parts for flag in part.flags for word in shlex.split(flag)], MEGATRON_FLAGS)
    lost = {_DIMENSION_OF.get(flag, flag) for flag in given if flag not in {*program.keys, *_KEPT}}
    lost -= {"weights"} if "sharding" in lost else set()
    if LEVELS in given and LEVELS not in program.keys:
        given[COMM] = ("p2p",)
    if isinstance(comm := given.get(COMM), tuple):
        given[COMM] = comm[0]  # a list is one for each layer (megatron-core transformer_config.py)
    settings = [
        shlex.join(program.words(key, value))
        for flag, value in (dict(OFF) | dict(program.off) | given).items()
        for key in program.keys.get(flag, ())
    ]
    notes = [*(note for part in parts for note in part.notes), *script_notes(setting, program.title)]
    told = [f"{name}: {program.title} has no setting for it{_INSTEAD.get(name, '')}" for name in sorted(lost)]
    precision = setting.job.precision
    kept = (f"precision: {program.title} keeps its own number format; the study has {precision}",)
    return export_flags(
        program.target,
        [Part(flags=tuple(settings), notes=(*kept, *program.notes, *told, *notes))],
        array=f"{program.target.upper().replace('-', '_')}_SETTINGS",
        head=(*head_comments(config), f"Versions: {program.versions}"),
        usage=program.usage,
        environment=((_CONNECTIONS, program.connections),)
        if SHARDING in given and SHARDING in program.keys
        else environment(config, sharded=False),
        notes=closing_notes(setting, config, program.title, rule_sets=("megatron", "mindspeed"), named=NAMED),
    )


def hydra_words(key: str, value: FlagValue) -> tuple[str, ...]:
    """Return `key=value` as Hydra reads it; text with other signs than those of a name is quoted."""
    return (f"{key}={_in_hydra(value)}",)


def _in_hydra(value: FlagValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{','.join(map(_in_hydra, value))}]"
    if isinstance(value, str) and not value.replace("_", "").isalnum():
        return f"'{value}'"
    return str(value)
