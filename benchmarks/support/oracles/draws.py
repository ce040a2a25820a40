"""Layouts around the edges of a framework's rules: small models on few devices, that break none of the rules or one.

A layout that breaks many rules at once tells nothing of any of them. So each draw looks at a few random layouts and
takes the rarest kind so far: the rule that it breaks, or, of those that break none, the degrees that it uses. Every
tenth is taken as it comes, so that layouts which break several rules are asked about too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodels.job.facts import Told, with_facts
from costmodels.job.model_spec import ModelSpec, plain_model
from costmodels.job.parallel_config import DEGREES, DIMENSIONS, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.cluster_file import find_cluster
from tuner.space.dimensions import divisors
from tuner.space.enumeration import SpaceOptions, broken_rules, enumerate_space

LOOKED_AT = 30
"""Random layouts of which the rarest kind is taken."""

DEVICES = (2, 4, 6, 8, 12, 16, 24, 32)
HEADS = ((4, 2), (4, 4), (6, 3), (8, 1), (8, 2), (8, 8), (12, 2), (12, 4), (12, 6), (16, 8), (24, 4))
"""Attention heads and key-value heads."""
LAYERS = (2, 3, 4, 5, 6, 8, 9, 12)
WIDTHS = (48, 64, 72, 96)
"""Inner sizes of MLPs and of experts."""
LENGTHS = (16, 24, 32, 48, 64, 96, 128)
BATCHES = (4, 6, 8, 12, 16, 24, 32, 48)
EXPERTS = (0, 0, 2, 4, 6, 8, 12)
HEAD_DIM, VOCABULARY = 8, 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """What is drawn for a framework.

    Attributes:
        runtimes: Names of the profiles whose rules are asked.
        lengths: Sequence lengths [tokens].
        facts: Facts of the run, of which each draw has one choice.
        fixed: Values of dimensions that are not varied, by name.
        adapt: Function that changes a drawn model, for sizes that the framework doesn't look at.
    """

    runtimes: tuple[str, ...]
    lengths: tuple[int, ...] = LENGTHS
    facts: tuple[Told, ...] = ((),)
    fixed: tuple[tuple[str, Any], ...] = ()
    adapt: Callable[[ModelSpec], ModelSpec] = lambda model: model


def draws(edges: Edges, count: int, seed: int) -> Iterator[tuple[Setting, ParallelConfig, dict[str, str]]]:
    """Draw `count` settings, each with a layout and with the rules that it breaks, by name with their reasons."""
    rng, seen = np.random.default_rng(seed), Counter[tuple[object, ...]]()
    for number in range(count):
        found = [_draw(edges, rng) for _ in range(1 if number % 10 == 9 else LOOKED_AT)]
        wanted = [one for one in found if min(len(one[2]), 1) == number % 2 and len(one[2]) <= 1]
        chosen = min(wanted or found, key=lambda one: seen[_kind(one[1], one[2])])
        seen[_kind(chosen[1], chosen[2])] += 1
        yield chosen


def is_listed(setting: Setting, config: ParallelConfig) -> bool:
    """Return whether the enumeration of the space, narrowed to a layout's own values, has it."""
    return len(enumerate_space(setting, _own_values(config))[0]) > 0


def _own_values(config: ParallelConfig) -> SpaceOptions:
    """Return options that narrow a space to a layout's own values, so that no rule thins it out."""
    return SpaceOptions(allowed=tuple((name, (getattr(config, name),)) for name in DEGREES))


def _kind(config: ParallelConfig, broken: dict[str, str]) -> tuple[object, ...]:
    if broken:
        return tuple(sorted(broken))
    used = [name for name in DEGREES if getattr(config, name) > 1]
    return (*used, *(f"{name}={value}" for name, value in config.values(DIMENSIONS).items() if value))


def _draw(edges: Edges, rng: np.random.Generator) -> tuple[Setting, ParallelConfig, dict[str, str]]:
    runtime = with_facts(find_runtime(_pick(rng, edges.runtimes)), _pick(rng, edges.facts))
    cluster = _cluster(int(_pick(rng, DEVICES)))
    job = TrainingJob(
        model=edges.adapt(_model(rng)),
        sequence_length=int(_pick(rng, edges.lengths)),
        global_batch_size=int(_pick(rng, BATCHES)),
    )
    values = _degrees(rng, cluster.num_devices, job)
    values |= {
        "recompute": _pick(rng, runtime.recompute_modes),
        "zero_stage": int(_pick(rng, runtime.offered_stages)),
        "sequence_parallel": bool(rng.random() < 0.7),
        "expert_tp": int(_pick(rng, (0, 0, 0, 1, 2))) if job.model.is_moe else 0,
        "dp_shard": int(_pick(rng, divisors(values["dp"]))) if rng.random() < 0.3 else 0,
    }
    values |= dict(edges.fixed)
    if runtime.whole_experts or values["expert_tp"] == values["tp"]:
        values["expert_tp"] = int(runtime.whole_experts and job.model.is_moe)
    if not values["zero_stage"] or values["dp_shard"] == values["dp"]:
        values["dp_shard"] = 0
    config = ParallelConfig(**values)
    fixed = {
        name: value
        for name, value in config.values(DIMENSIONS).items()
        if name in job.fixed_values(sequence_parallel=True)
    }
    setting = Setting(job=replace(job, **fixed), cluster=cluster, runtime=runtime)
    return setting, config, broken_rules(setting, _own_values(config), config)


def _degrees(rng: np.random.Generator, devices: int, job: TrainingJob) -> dict[str, Any]:
    """Deal the prime factors of the devices out to degrees, and draw the degrees that multiply to nothing."""
    values = dict.fromkeys(DEGREES, 1)
    weights = rng.dirichlet(np.full(5, 0.7))
    rest = devices
    for prime in (2, 3):
        while rest % prime == 0:
            values[str(rng.choice(["pp", "tp", "dp", "cp", "up"], p=weights))] *= prime
            rest //= prime
    if values["pp"] > 1 and rng.random() < 0.5:
        values["vpp"] = int(rng.integers(2, 5))
    if job.model.is_moe:
        values["ep"] = int(_pick(rng, sorted({*divisors(devices), *divisors(job.model.num_experts)})))
    values["mbs"] = int(_pick(rng, (1, 1, 1, 2, 3, 4)))
    return values


def _model(rng: np.random.Generator) -> ModelSpec:
    heads, kv_heads = _pick(rng, HEADS)
    experts, width = int(_pick(rng, EXPERTS)), int(_pick(rng, WIDTHS))
    return plain_model(
        name="drawn",
        source="drawn at random",
        num_layers=int(_pick(rng, LAYERS)),
        hidden_size=heads * HEAD_DIM,
        vocab_size=VOCABULARY,
        tied_embeddings=bool(rng.random() < 0.1),
        norm="rms",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        ffn_size=width,
        gated_ffn=True,
        **({"num_experts": experts, "top_k": 2, "expert_ffn_size": width} if experts else {}),
    )


def _cluster(devices: int) -> Cluster:
    cluster = find_cluster("dgx-h100", 1)
    size = min(devices, 8) if devices % 8 == 0 or devices < 8 else devices // 2
    group = replace(cluster.groups[0], hosts=devices // size, devices_per_host=size)
    return replace(cluster, groups=(group,))


def _pick(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]
