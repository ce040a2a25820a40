"""Small jobs on small clusters and all combinations of their degrees, for the tests of rules and space."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import DEGREES, DIMENSIONS, FURTHER_DIMENSIONS, ConfigGrid
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from hardware.cluster_file import cluster_from_mapping
from tuner.space.dimensions import SEARCHED, divisors
from tuner.space.enumeration import SpaceOptions, active_rules, setting_for

RUNTIME_OF = {
    "flexparallel": "mindspeed",
    "fsdp": "llm-foundry",
    "gpt-neox": "gpt-neox",
    "internevo": "internevo",
    "jax-reference": "jax-reference",
    "maxtext": "maxtext",
    "megatron": "megatron-core",
    "megatron-2021": "megatron-lm-2021",
    "megatron-2022": "megatron-lm-2022",
    "megatron-deepspeed": "megatron-deepspeed",
    "mindformers": "mindformers",
    "mindspeed": "mindspeed",
    "nanotron": "nanotron",
    "paddle": "paddle",
    "torch-planned": "torch-planned",
    "torch-reference": "torch-reference",
    "torchtitan": "torchtitan",
    "unknown": "unknown",
}
"""A runtime for each rule set."""
OPENED = ("recompute", "zero_stage", "sequence_parallel")
"""The further dimensions that these tests open."""


def setting_of(
    rule_set, *, hosts=1, devices_per_host=8, sequence_length=4096, batch=16, job=None, runtime=None, **model
) -> tuple[Setting, SpaceOptions]:
    """Build a small job on a small cluster under `rule_set`; `model` replaces fields of llama3-8b."""
    cluster = cluster_from_mapping(
        {"device": "H100-SXM-80", "hosts": hosts, "devices_per_host": devices_per_host}, Path()
    )
    spec = find_model("llama3-8b").changed(**model)
    profile = find_runtime(RUNTIME_OF[rule_set])
    values = {"zero_stage": 1 if 1 in profile.zero_stages else min(profile.zero_stages), **(job or {})}
    training = TrainingJob(model=spec, sequence_length=sequence_length, global_batch_size=batch, **values)
    options = SpaceOptions(rule_set=rule_set)
    profile = replace(profile, **(runtime or {}))
    return setting_for(training, cluster, profile, options), options


def rows_of(grid) -> list[tuple]:
    """Return every configuration as a tuple, in the order of the grid."""
    return [tuple(row) for row in grid.matrix(DEGREES + OPENED).tolist()]


def raw_product(setting, options, opened=()) -> ConfigGrid:
    """Enumerate all combinations before any rule, with itertools."""
    rules = {rule.name for rule in active_rules(setting, options)}
    job, runtime = setting.job, setting.runtime
    meshes = [
        mesh
        for mesh in itertools.product(divisors(setting.cluster.num_devices), repeat=5)
        if math.prod(mesh) == setting.cluster.num_devices
    ]
    default_sp = runtime.sequence_parallel if job.sequence_parallel is None else job.sequence_parallel
    further = {
        "recompute": runtime.recompute_modes if "recompute" in opened else (job.recompute,),
        "zero_stage": runtime.zero_stages if "zero_stage" in opened else (job.zero_stage,),
        "sequence_parallel": (False, True) if "sequence_parallel" in opened else (default_sp,),
    }
    choices = [[DIMENSIONS[name].code_of(value) for value in values] for name, values in further.items()]
    rows = [
        (*mesh, mbs, vpp, ep, *choice)
        for mesh in meshes
        for mbs in divisors(job.global_batch_size)
        for vpp in SEARCHED["vpp"].codes(setting, rules)
        for ep in divisors(max(job.model.num_experts, 1))
        for choice in itertools.product(*choices)
    ]
    names = ("pp", "tp", "dp", "cp", "up", "mbs", "vpp", "ep", *further)
    codes = {name: np.zeros(len(rows), dtype=np.int64) for name in FURTHER_DIMENSIONS}
    return ConfigGrid.from_codes(codes | dict(zip(names, np.array(rows).T, strict=True)), opened=tuple(opened))


def rules_broken_by_row(setting, options, grid) -> list[frozenset]:
    """Return the names of the active rules that each row breaks."""
    columns = {name: grid.matrix([name])[:, 0] for name in DEGREES + FURTHER_DIMENSIONS}
    rules = active_rules(setting, options)
    broken = np.stack([np.broadcast_to(~rule.keep(setting, columns), len(grid)) for rule in rules], axis=1)
    codes = broken @ (1 << np.arange(len(rules)))
    names = {
        code: frozenset(rule.name for at, rule in enumerate(rules) if code >> at & 1)
        for code in np.unique(codes).tolist()
    }
    return [names[code] for code in codes.tolist()]
