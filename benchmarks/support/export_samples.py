"""Random configurations that a framework can run, the expected content of their exports, and rule-breaking mutations.

Configurations are drawn from the spaces that our rules leave each framework, on three models and clusters, with further
dimensions opened, and with uneven layers if the framework accepts them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import Assignment
from hardware.cluster_file import find_cluster
from tests.oracles.frameworks import deepspeed, gpt_neox, megatron, mindspeed, nanotron, torchtitan
from tests.oracles.frameworks.published_rules import Facts, facts_of
from tuner.export import Export
from tuner.export.bridge import BRIDGE
from tuner.export.flag_table import Values
from tuner.export.megatron_flags import underscored
from tuner.export.nemo import FIELDS
from tuner.export.parts import layers_of_parts
from tuner.export.swift import SWIFT
from tuner.export.torchtitan_main import recipe_lines
from tuner.export.verl import VERL
from tuner.space.enumeration import SpaceOptions, enumerate_space, setting_for

RUNTIMES: dict[str, tuple[str, ...]] = {
    "bridge": ("megatron-core",),
    "deepspeed": ("megatron-deepspeed", "gpt-neox", "llm-foundry", "paddle"),
    "flagscale": ("megatron-core",),
    "gpt-neox": ("gpt-neox",),
    "maxtext": ("maxtext",),
    "megatron": ("megatron-core",),
    "mindspeed": ("mindspeed",),
    "nanotron": ("nanotron",),
    "nemo": ("megatron-core",),
    "swift": ("megatron-core",),
    "torchtitan": ("torchtitan",),
    "torchtitan-main": ("torchtitan",),
    "verl": ("megatron-core",),
}
"""Runtimes from whose spaces a framework's configurations are drawn; DeepSpeed runs the programs of several."""

JOBS = (("llama3-8b", 8, 8192, 512), ("qwen2.5-7b", 4, 4096, 128), ("mixtral-8x7b", 2, 4096, 64))
"""Model, number of hosts with eight H100, sequence length and global batch size."""

OPENED = ("recompute", "offload", "zero_stage", "sequence_parallel", "expert_tp", "dp_shard")
RENAMED = ("bridge", "swift", "verl")
"""Programs that run megatron-core with keys of their own."""
WITH_LAYERS = (*RENAMED, "flagscale", "megatron", "mindspeed", "nemo", "torchtitan", "torchtitan-main")
"""Frameworks that accept the number of layers of each stage."""
WITH_BLOCKS = (*RENAMED, "flagscale", "megatron", "mindspeed", "nemo")
"""Frameworks that recompute some layers of each virtual stage."""
WHOLE_OPTIMIZERS = ("muon", "lion")
"""Optimizers whose states Megatron-LM shards by whole weights, in bf16 and with one instance of its optimizer."""


@cache
def _space(runtime: str, job: int) -> tuple[Setting, ConfigGrid]:
    model, hosts, length, batch = JOBS[job]
    training = TrainingJob(model=load_model(model, Path()), sequence_length=length, global_batch_size=batch)
    options = SpaceOptions(opened=OPENED)
    setting = setting_for(training, find_cluster("dgx-h100", hosts), find_runtime(runtime), options)
    return setting, enumerate_space(setting, options)[0]


def samples(target: str, count: int, seed: int) -> Iterator[tuple[Setting, ParallelConfig]]:
    """Draw `count` pairs of a setting and a configuration."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        runtime = RUNTIMES[target][rng.integers(len(RUNTIMES[target]))]
        setting, grid = _space(runtime, int(rng.integers(len(JOBS))))
        config = _draw_config(grid, rng)
        while target == "torchtitan-main" and setting.job.model.is_moe and config.ep < config.tp:
            config = _draw_config(grid, rng)  # it requires ep of at least tp; the exporter notes others
        if target in ("bridge", "flagscale", "megatron", "nemo", "swift") and config.zero_stage:
            config = replace(config, zero_stage=int(rng.integers(1, 4)))
        if target in WITH_LAYERS and config.pp > 1 and rng.random() < 0.4:
            config = replace(config, assignment=Assignment(layers=_move_layers(setting, config, rng)))
        if target in WITH_BLOCKS and config.recompute == "none" and rng.random() < 0.4:
            config = replace(config, recompute_layers=int(rng.integers(1, 3)))
        precision = "bf16" if config.ep > 1 else str(rng.choice(["bf16", "bf16", "fp16", "fp32"]))
        optimizer = "adam"
        is_alike = config.zero_stage <= 1 and not config.dp_shard and config.offload == "none" and precision == "bf16"
        if target == "megatron" and is_alike and rng.random() < 0.3:
            optimizer = str(rng.choice(WHOLE_OPTIMIZERS))
        yield replace(setting, job=replace(setting.job, precision=precision, optimizer=optimizer)), config


def _draw_config(grid: ConfigGrid, rng: np.random.Generator) -> ParallelConfig:
    """Draw a configuration: first a dimension, then one of its values, so that rare values are frequent too."""
    name = rng.choice(
        ["pp", "tp", "cp", "up", "vpp", "ep", "dp_shard", "expert_tp", "zero_stage", "recompute", "offload"]
    )
    # Uniform draws from the grid would give mostly configurations of a few common degrees.
    column = getattr(grid, name)
    kept = np.flatnonzero(column == rng.choice(np.unique(column)))
    return grid.config(int(rng.choice(kept)))


def _move_layers(setting: Setting, config: ParallelConfig, rng: np.random.Generator) -> tuple[int, ...]:
    """Move a few layers from part to part, leaving none empty."""
    held = list(layers_of_parts(setting, config))
    for _ in range(int(rng.integers(1, 4))):
        giver, taker = (int(at) for at in rng.choice(len(held), 2, replace=False))
        if held[giver] > 1:
            held[giver] -= 1
            held[taker] += 1
    return tuple(held)


def expected(setting: Setting, config: ParallelConfig) -> dict[str, Any]:
    """Return the values that a framework with all features would state for the configuration."""
    planned = layers_of_parts(setting, config)
    model = setting.job.model
    return {
        **{name: getattr(config, name) for name in ("pp", "tp", "dp", "cp", "up", "vpp", "ep", "mbs", "recompute")},
        "recompute_layers": config.recompute_layers,
        "offload": config.offload,
        "zero_stage": config.zero_stage,
        "sequence_parallel": config.sequence_parallel and config.tp > 1,
        "expert_tp": 0 if config.expert_tp == config.tp or not model.is_moe else config.expert_tp,
        "dp_shard": 0 if config.dp_shard == config.dp or not config.zero_stage else config.dp_shard,
        "layers": None if len(set(planned)) == 1 else planned,
        "global_batch_size": setting.job.global_batch_size,
        "sequence_length": setting.job.sequence_length,
    }


def differences(said: Values, setting: Setting, config: ParallelConfig, export: Export) -> dict[str, tuple[Any, Any]]:
    """Return the dimensions whose exported value differs from the expected one without a note.

    Each maps to the exported and the expected value.
    """
    noted = {note.partition(":")[0] for note in export.notes}
    wanted = expected(setting, config)
    if "beside" in said:
        inside = config.dp * int(said["tp"]) * int(said["up"])  # type: ignore[arg-type] # both are degrees
        wanted["beside"] = config.num_devices // inside
    if "up" in noted and said.get("up") == 1:  # ring attention takes the place of Ulysses
        wanted["cp"] = config.cp * config.up
    if config.tp == 1:
        wanted["sequence_parallel"] = said.get("sequence_parallel")
    layers = said.get("layers")
    told = dict(said)
    if isinstance(layers, tuple) and len(set(layers)) == 1:
        told["layers"] = None
    return {name: (value, wanted[name]) for name, value in told.items() if value != wanted[name] and name not in noted}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One change to the values of an export that its framework would refuse.

    Attributes:
        name: Short description of the change.
        change: Function that returns the changed values, or None where the change does not apply.
    """

    name: str
    change: Callable[[dict[str, Any], Facts], dict[str, Any] | None]


def _set(key: str, value: Any, when: Callable[[Values, Facts], bool] = lambda *_: True) -> Mutation:
    def change(values: dict[str, Any], facts: Facts) -> dict[str, Any] | None:
        return values | {key: value} if when(values, facts) and values.get(key) != value else None

    return Mutation(name=f"{key} = {value}", change=change)


def _times(key: str, factor: int) -> Mutation:
    def change(values: dict[str, Any], _: Facts) -> dict[str, Any] | None:
        value = values.get(key)
        return values | {key: value * factor} if type(value) is int else None

    return Mutation(name=f"{key} * {factor}", change=change)


def _without(key: str, when: Callable[[Values, Facts], bool] = lambda *_: True) -> Mutation:
    def change(values: dict[str, Any], facts: Facts) -> dict[str, Any] | None:
        if key not in values or not when(values, facts):
            return None
        return {name: value for name, value in values.items() if name != key}

    return Mutation(name=f"no {key}", change=change)


def _misspell(key: str) -> Mutation:
    def change(values: dict[str, Any], _: Facts) -> dict[str, Any] | None:
        return {f"{name}s" if name == key else name: value for name, value in values.items()} if key in values else None

    return Mutation(name=f"{key} misspelt", change=change)


def _numbers(positive: tuple[str, ...], *, thrice: tuple[str, ...], seven: tuple[str, ...]) -> list[Mutation]:
    """Make mutations of numeric keys.

    Args:
        positive: Keys that must be whole numbers of at least 1, each set to invalid values and misspelt.
        thrice: Keys that divide the devices, each multiplied by 3.
        seven: Keys that divide the batch, each multiplied by 7.
    """
    return [
        *(_set(key, value, lambda v, _, key=key: key in v) for key in positive for value in (0, -2, "many")),
        *(_times(key, 3) for key in thrice),
        *(_times(key, 7) for key in seven),
        *(_misspell(key) for key in positive),
    ]


def _is_moe(_: Values, facts: Facts) -> bool:
    return facts.num_experts > 0


def _one_stage(values: Values, _: Facts) -> bool:
    return values.get(megatron.PP) == 1


_MEGATRON_COMMON = [
    *_numbers(
        (megatron.TP, megatron.PP, megatron.CP, megatron.MICRO, megatron.GLOBAL, megatron.SEQUENCE, megatron.EP),
        thrice=(megatron.TP, megatron.PP, megatron.CP),
        seven=(megatron.MICRO,),
    ),
    _without(megatron.MICRO),
    _set(megatron.EP, 5),
    _set(megatron.EP, 2, lambda _, f: f.num_experts == 0),
    _set("--sequence-parallel", True, lambda v, _: v[megatron.TP] == 1),
    _without("--sequence-parallel", _is_moe),
    _set("--fp16", True, lambda v, _: "--bf16" in v),
    _set("--optimizer", "sgd", lambda v, _: "--use-distributed-optimizer" in v),
    _set("--optimizer", "adamw"),
    _without(
        "--use-distributed-optimizer", lambda v, _: "--overlap-param-gather" in v and "--use-megatron-fsdp" not in v
    ),
    _without("--overlap-grad-reduce", lambda v, _: "--overlap-param-gather" in v),
    _set("--recompute-method", "uniform", lambda v, _: v.get(megatron.GRANULARITY) != "full"),
    _without("--recompute-method", lambda v, _: v.get(megatron.GRANULARITY) == "full"),
    _without("--recompute-num-layers", lambda v, _: v.get(megatron.GRANULARITY) == "full"),
    _set(megatron.GRANULARITY, "some"),
    _set(megatron.SEQUENCE, 8191, lambda v, _: v[megatron.CP] > 1 or "--sequence-parallel" in v),
]
_HYBRID = "a2a+p2p"
_MEGATRON = [
    *_MEGATRON_COMMON,
    _set(megatron.VPP, 2, _one_stage),
    _set(megatron.VPP, 2, lambda v, _: megatron.LAYOUT in v),
    _set(megatron.LAYOUT, "Et*3|t*5L", lambda v, _: megatron.VPP not in v),
    _set(megatron.LAYOUT, "Et*x|L", lambda v, _: megatron.VPP not in v),
    _set(megatron.VPP, 5, lambda v, _: megatron.LAYOUT not in v),
    _set(megatron.COMM, ("ring",), lambda v, _: v[megatron.CP] > 1),
    _set(megatron.COMM, (_HYBRID,), lambda v, _: v[megatron.CP] > 1 and megatron.LEVELS not in v),
    _set(megatron.LEVELS, (3, 5), lambda v, _: megatron.LEVELS in v),
    _set(megatron.INSTANCES, 7, lambda v, _: "--use-distributed-optimizer" in v),
    _without("--use-precision-aware-optimizer"),
    _without("--use-distributed-optimizer", lambda v, _: "--use-precision-aware-optimizer" in v),
    _without("--ckpt-format"),
    _set("--ckpt-format", "fsdp_dtensor", lambda v, _: "--use-megatron-fsdp" not in v),
    _set("--recompute-modules", ("core_attn",), lambda v, _: v.get(megatron.GRANULARITY) != "selective"),
    _set("--recompute-modules", ("attention",), lambda v, _: v.get(megatron.GRANULARITY) == "selective"),
    _set(megatron.SHARDING, "everything", lambda v, _: megatron.SHARDING in v),
]
_MINDSPEED = [
    *_MEGATRON_COMMON,
    _set(mindspeed.ALGORITHM, "ring_cp_algo", lambda v, _: v[megatron.CP] > 1),
    _set(mindspeed.ULYSSES, 1, lambda v, _: mindspeed.ULYSSES in v),
    _times(mindspeed.ULYSSES, 3),
    _without(mindspeed.ULYSSES),
    _set(mindspeed.PER_CHUNK, 11, lambda v, _: mindspeed.PER_CHUNK in v),
    _set(mindspeed.PER_CHUNK, 1, _one_stage),
    _without(mindspeed.NOOP),
    _without(mindspeed.LAYERS),
    _set(mindspeed.NOOP, "5,6x", lambda v, _: mindspeed.NOOP in v),
    _set(mindspeed.NOOP, "5,999", lambda v, _: mindspeed.NOOP in v),
    _set(mindspeed.NOOP, "0", lambda v, _: mindspeed.NOOP not in v),
]


def _interleaved(values: Values, _: Facts) -> bool:
    return values.get(torchtitan.SCHEDULE) == "Interleaved1F1B"


_TORCHTITAN = [
    *_numbers(
        (
            *(torchtitan.REPLICATE, torchtitan.SHARD, torchtitan.TP, torchtitan.PP, torchtitan.CP, torchtitan.EP),
            *(torchtitan.LOCAL, torchtitan.GLOBAL, torchtitan.LENGTH, torchtitan.MICRO, torchtitan.PER_STAGE),
        ),
        thrice=(torchtitan.REPLICATE, torchtitan.SHARD, torchtitan.TP, torchtitan.PP, torchtitan.CP),
        seven=(torchtitan.LOCAL, torchtitan.MICRO),
    ),
    _set(torchtitan.EP, 5),
    _set(torchtitan.LENGTH, 8191),
    _without(torchtitan.NO_GRAPHS, lambda v, _: v[torchtitan.PP] > 1),
    _set(torchtitan.WHOLE_NORMS, True, lambda v, _: torchtitan.SEQUENCE_PARALLEL in v),
    _set(torchtitan.SCHEDULE, "1F1B", _interleaved),
    _set(torchtitan.SCHEDULE, "Interleaved1F1B", lambda v, _: v.get(torchtitan.SCHEDULE) == "1F1B"),
    _set(torchtitan.SCHEDULE, "DualPipe", lambda v, _: torchtitan.SCHEDULE in v),
    _set(torchtitan.FIRST, 1000, lambda v, _: torchtitan.FIRST in v),
    _set(torchtitan.MODULES, ("tok_embeddings", "norm,lm_head"), lambda v, _: torchtitan.MODULES in v),
    _set(torchtitan.RESHARD, "sometimes"),
    _set(torchtitan.POLICY, "some"),
]
_TORCHTITAN_MAIN = [
    *_numbers(
        (
            *(torchtitan.REPLICATE, torchtitan.SHARD, torchtitan.TP, torchtitan.PP, torchtitan.CP, torchtitan.EP),
            *(torchtitan.TOKENS, torchtitan.STEP_TOKENS, torchtitan.CONTEXT, torchtitan.ROUNDS, torchtitan.PER_STAGE),
        ),
        thrice=(torchtitan.REPLICATE, torchtitan.SHARD, torchtitan.TP, torchtitan.PP, torchtitan.CP),
        seven=(torchtitan.TOKENS,),
    ),
    *(_without(key) for key in (torchtitan.TOKENS, torchtitan.STEP_TOKENS, torchtitan.CONTEXT)),
    _set(torchtitan.EP, 5),
    _set(torchtitan.EP, 1, lambda v, f: f.num_experts > 0 and v[torchtitan.TP] > 1),
    _set(torchtitan.CONTEXT, 8191),
    _set(torchtitan.ROUNDS, 7, lambda v, _: v[torchtitan.PP] > 1),
    _set(torchtitan.WHOLE_NORMS, True, lambda v, _: torchtitan.SEQUENCE_PARALLEL in v),
    _set(torchtitan.SCHEDULE, "1F1B", _interleaved),
    _set(torchtitan.MAIN_MODULES, ("tok_embeddings", "norm,lm_head"), lambda v, _: torchtitan.MAIN_MODULES in v),
    _set(torchtitan.PER_STAGE, 1, lambda v, _: torchtitan.MAIN_MODULES in v),
    _set(torchtitan.RESHARD, "sometimes"),
    _set(torchtitan.POLICY, "some"),
]
_DEEPSPEED = [
    *_numbers(
        (deepspeed.BATCH, deepspeed.MICRO, deepspeed.ACCUMULATION, deepspeed.TP, deepspeed.UP, deepspeed.EP),
        thrice=(deepspeed.TP, deepspeed.UP),
        seven=(deepspeed.MICRO, deepspeed.ACCUMULATION),
    ),
    *(_without(key) for key in (deepspeed.BATCH, deepspeed.MICRO, deepspeed.ACCUMULATION, deepspeed.STAGE)),
    _times(deepspeed.BATCH, 3),
    _set(deepspeed.STAGE, 4),
    _set(deepspeed.STAGE, "two"),
    _set(deepspeed.OFFLOAD, "disk", lambda v, _: deepspeed.OFFLOAD in v),
    _set(deepspeed.STAGE, 2, lambda v, _: deepspeed.INTERVAL in v),
    _set(deepspeed.EP, 5),
    _set(deepspeed.UP, 2, lambda v, _: deepspeed.UP not in v),
    _without(deepspeed.DP),
    _times(deepspeed.DP, 2),
    _set("fp16.enabled", True, lambda v, _: "bf16.enabled" in v),
    _set("zero_optimization.mics_shard_size", 2),
]
_NANOTRON = [
    *_numbers(
        (
            *(nanotron.DP, nanotron.PP, nanotron.TP, nanotron.CP, nanotron.EP),
            *(nanotron.LENGTH, nanotron.MICRO, nanotron.ACCUMULATION),
        ),
        thrice=(nanotron.DP, nanotron.PP, nanotron.TP, nanotron.CP),
        seven=(),
    ),
    *(_without(key) for key in (nanotron.DP, nanotron.PP, nanotron.TP, nanotron.LENGTH, nanotron.MICRO)),
    _set(nanotron.ENGINE, "interleaved"),
    _set(nanotron.MODE, "SCATTER"),
    _set(nanotron.ASYNC, True, lambda v, _: v[nanotron.MODE] == "ALL_REDUCE"),
    _set(nanotron.STAGE, 3),
    _set(nanotron.EP, 2),
    _set(nanotron.LENGTH, 8191, lambda v, _: v[nanotron.MODE] == "REDUCE_SCATTER"),
    _set(nanotron.RECOMPUTE, "full"),
]
_GPT_NEOX = [
    *_numbers(
        (gpt_neox.TP, gpt_neox.LENGTH, deepspeed.BATCH, deepspeed.MICRO, deepspeed.ACCUMULATION),
        thrice=(gpt_neox.TP, deepspeed.BATCH),
        seven=(deepspeed.MICRO, deepspeed.ACCUMULATION),
    ),
    *(_without(key) for key in (gpt_neox.PP, gpt_neox.TP, gpt_neox.LENGTH, deepspeed.BATCH, deepspeed.STAGE)),
    _set(gpt_neox.PP, -1),
    _set(gpt_neox.PP, 3),
    _set(gpt_neox.EP, 0, _is_moe),
    _set(gpt_neox.EP, 5, _is_moe),
    _set(gpt_neox.EP, 2, lambda _, f: f.num_experts == 0),
    _set(deepspeed.STAGE, 4),
    _set(deepspeed.STAGE, "two"),
    _set(deepspeed.STAGE, 2, lambda v, _: v[gpt_neox.PP] != 0),
    _set(gpt_neox.SEQUENCE_PARALLEL, True, lambda v, _: v[gpt_neox.TP] == 1),
    _set(gpt_neox.PRECISION, "bf16"),
    _set(gpt_neox.RECOMPUTE, "full"),
    _set("fp16.enabled", True, lambda v, _: "bf16.enabled" in v),
]
# a recipe states the number of nodes, and its precision in another place
_NEMO = [
    *(
        each
        for each in _MEGATRON
        if not each.name.startswith(("--fp16", "--optimizer", "no --ckpt", "--ckpt", megatron.LEVELS))
    ),
    _set("trainer.num_nodes", 3),
    _set("trainer.strategy.fsdp", "torch"),
    _set("trainer.strategy.pipeline_dtype", None, lambda v, _: v[megatron.PP] > 1),
]
_RENAMED = [
    each
    for each in _MEGATRON
    if not each.name.startswith(("--fp16", "--optimizer", "--ckpt", "no --ckpt", "no --use-precision", megatron.LEVELS))
]
_MAXTEXT = [
    *_numbers(
        (*(f"ici_{axis}_parallelism" for axis in ("fsdp", "tensor", "pipeline", "expert")), "max_target_length"),
        thrice=("ici_fsdp_parallelism", "dcn_data_parallelism", "ici_tensor_parallelism"),
        seven=(),
    ),
    _set("per_device_batch_size", "0.01"),
    _without("per_device_batch_size"),
    _without("max_target_length"),
    _set("remat_policy", "some"),
    _set("num_pipeline_microbatches", 1, lambda v, _: "num_pipeline_microbatches" in v),
    _times("num_layers_per_pipeline_stage", 7),
]
MUTATIONS: dict[str, list[Mutation]] = {
    "bridge": _RENAMED,
    "deepspeed": _DEEPSPEED,
    "flagscale": _MEGATRON,
    "gpt-neox": _GPT_NEOX,
    "maxtext": _MAXTEXT,
    "megatron": _MEGATRON,
    "mindspeed": _MINDSPEED,
    "nanotron": _NANOTRON,
    "nemo": _NEMO,
    "swift": _RENAMED,
    "torchtitan": _TORCHTITAN,
    "torchtitan-main": _TORCHTITAN_MAIN,
    "verl": [each for each in _RENAMED if not each.name.startswith((megatron.GLOBAL, megatron.SEQUENCE))],
}


def mutants(target: str, export: Export, values: Values, setting: Setting) -> Iterator[tuple[str, Export]]:
    """Yield the export with each mutation that applies to it."""
    facts = facts_of(setting)
    # a recipe also sets options that are off, for which flags have no words
    said = {key: value for key, value in values.items() if value is not None and value is not False}
    for mutation in MUTATIONS[target]:
        changed = mutation.change(said, facts)
        if changed is not None:
            yield mutation.name, _write_export(target, export, changed)


def _write_export(target: str, export: Export, values: Mapping[str, Any]) -> Export:
    """Write values in the format of the target's exports."""
    if target in (*RENAMED, "maxtext"):
        return replace(export, arguments=tuple(_renamed_words(target, values)))
    if target == "flagscale":
        keys = {underscored(key): list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return replace(export, text=yaml.safe_dump({"system": keys}))
    if target in ("deepspeed", "gpt-neox", "nanotron"):
        # Dotted keys become nested mappings, as the JSON and YAML files have them.
        content: dict[str, Any] = {}
        for key, value in values.items():
            *path, name = key.split(".")
            inner = content
            for part in path:
                inner = inner.setdefault(part, {})
            inner[name] = value
        return replace(export, text=json.dumps(content) if target == "deepspeed" else yaml.safe_dump(content))
    if target == "nemo":
        fields = {
            FIELDS.get(key, f"model.config.{key.strip('-')}" if "--" in key else key): value
            for key, value in values.items()
        }
        comm = FIELDS[megatron.COMM]  # one word in a recipe, a list of words as a flag
        if isinstance(fields.get(comm), tuple):
            fields[comm] = fields[comm][0]
        lines = [f"recipe.{path} = {_as_python(value)}" for path, value in fields.items()]
        return replace(export, text="\n".join(lines) + "\n")
    if target == "torchtitan-main":
        return replace(export, text="\n".join(recipe_lines(values)) + "\n")
    words: list[str] = []
    policy = values.get(torchtitan.POLICY)
    for key, value in values.items():
        if key == torchtitan.POLICY:
            continue
        words += [key] if value is True else [key, *map(str, value if isinstance(value, tuple) else (value,))]
    words += [f"{torchtitan.POLICY}:{policy}"] if policy is not None else []
    return replace(export, arguments=tuple(words), text=shlex.join(words))


def _as_python(value: Any) -> str:
    if isinstance(value, str) and value.startswith("torch."):
        return value
    return repr(list(value) if isinstance(value, tuple) else value)


def _renamed_words(target: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield values as the words of a program's settings; a flag that it lacks keeps its name."""
    if target == "maxtext":
        yield from (f"{key}={value}" for key, value in values.items())
        return
    program = {"bridge": BRIDGE, "swift": SWIFT, "verl": VERL}[target]
    for flag, value in values.items():
        for key in program.keys.get(flag, () if flag in ("--bf16", "--optimizer") else (underscored(flag),)):
            yield from program.words(key, value)
