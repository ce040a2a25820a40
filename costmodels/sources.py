"""Which runtime, hosts and habits stand behind each source of measured runs (catalog/sources.yaml).

A measured row says what was configured, not what its runtime does. The table gives each known source its runtime; an
unknown one falls to FALLBACK_RUNTIME or, where its rows show plain FSDP, to FSDP_RUNTIME.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from costmodels.job import PRECISIONS, TrainingJob
from costmodels.measured import MeasuredRun
from costmodels.memory import MemoryMeaning, WhichStage
from costmodels.runtime import CONSTANTS, RuntimeProfile, find_runtime
from hardware.cluster import Cluster, cluster_from_mapping
from hardware.config_file import StrictModel, read_mapping
from hardware.device import find_devices
from hardware.errors import ConfigError

FALLBACK_RUNTIME = "megatron-core"
FSDP_RUNTIME = "torchtitan"
RUNTIME_WORDS = {
    "nanotron": "nanotron",
    "torchtitan": "torchtitan",
    "llm-foundry": "llm-foundry",
    "maxtext": "maxtext",
    "neox": "gpt-neox",
    "deepspeed": "megatron-deepspeed",
    "mindspeed": "mindspeed",
    "mindformers": "mindformers",
    "internevo": "internevo",
    "paddle": "paddle",
    "megatron": "megatron-core",
}
"""Words in the remarks of an unknown source that name its runtime, the first that is found."""

FLAG_FACTS = {
    r"overlap-grad-reduce": "overlaps_gradients",
    r"overlap-param-gather": "overlaps_weight_gather",
    r"use-mc2|use-ascend-mc2|tp-comm-overlap": "overlaps_tensor",
    r"use-flash-attn|attention-backend=(?:flash|fused|auto)|transformer_engine": "fused_attention",
    r"cross-entropy-loss-fusion": "fused_cross_entropy",
}
"""Flags in the remarks of a source that lists them, and the fact that each switches on."""

NO_FACTS = {"name", *CONSTANTS, "device_speed", "residuals", "log_errors", "step_error", "memory_error"}
"""Fields of a profile that follow from measurements or name it; the others say what the runtime does."""

NOTE_FACTS: tuple[tuple[str, str, bool], ...] = (
    (r"attention-backend=(?:unfused|local)|unfused attention", "fused_attention", False),
    (r"flash_attention=(?:None|False)|no flash attention", "fused_attention", False),
    (r"no-gradient-accumulation-fusion", "fused_accumulation", False),
    (r"no comm overlap", "overlaps_gradients", False),
    (r"cuda_graph_impl=full_iteration", "captured_graph", True),
    (r"(?i)deepep|hybridep", "deduplicates_tokens", True),
    (r"moe_a2a_overlap=True", "overlaps_experts", True),
)
"""Remarks of any source, and the fact that each states."""


class _Nic(StrictModel):
    kind: str
    bandwidth_gb_per_s: float
    latency_us: float


class _Hosts(StrictModel):
    devices: Annotated[int, Field(ge=1)] | None = None
    nic: _Nic | None = None


class Source(StrictModel):
    """What is known of one source beyond its rows."""

    runtime: str
    memory: MemoryMeaning
    stage: WhichStage = "fullest"
    flags: Literal["listed"] | None = None
    timed: bool = True
    """Whether its step times mean anything; those of test suites of tiny models are launch-bound."""
    hosts: _Hosts = _Hosts()
    precision: str | None = None
    facts: dict[str, bool | int] = Field(default_factory=dict)
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSetting:
    """The job, cluster and runtime of a measured run, and what its memory counts on which stage."""

    job: TrainingJob
    cluster: Cluster
    runtime: RuntimeProfile
    memory: MemoryMeaning
    stage: WhichStage


@cache
def _sources() -> dict[str, Source]:
    path = Path(str(files("costmodels") / "catalog" / "sources.yaml"))
    return TypeAdapter(dict[str, Source]).validate_python(read_mapping(path))


def is_known_source(name: str) -> bool:
    """Whether the table has the source, so that nothing of it is guessed."""
    return name in _sources()


def source_of(run: MeasuredRun) -> Source:
    """What is known of the run's source, or guessed from its columns and remarks."""
    known = _sources().get(run.source)
    if known is not None:
        return known
    lowered = f"{run.source} {run.notes}".lower()
    named = next((runtime for word, runtime in RUNTIME_WORDS.items() if word in lowered), None)
    is_fsdp = run.config.zero_stage == 3 and run.config.tp == run.config.pp == 1
    runtime = named or (FSDP_RUNTIME if is_fsdp else FALLBACK_RUNTIME)
    return Source(runtime=runtime, memory="reserved", reason="not in the table of sources")


def setting_of(run: MeasuredRun, runtimes: Mapping[str, RuntimeProfile], runtime: str | None = None) -> MeasuredSetting:
    """What the cost model needs to predict a measured run.

    Args:
        run: The run.
        runtimes: Profiles that replace the catalog's of the same name.
        runtime: Name of the profile to use whatever the source; None asks the table.

    Raises:
        ConfigError: the device is unknown, or the run has other numbers of it.
    """
    source = source_of(run)
    name = runtime or source.runtime
    profile = runtimes.get(name) or find_runtime(name)
    cluster = cluster_of(run.device, run.devices, source.hosts)
    if cluster.num_devices != run.devices:
        raise ConfigError(f"names other devices than the {run.devices} of the run", key="device", value=run.device)
    precision = source.precision or run.precision
    if precision not in PRECISIONS:
        precision = "bf16"
    if precision == "tf32" and any(device.bf16_flop_per_s is None for device in cluster.devices):
        precision = "fp32"  # before Ampere
    return MeasuredSetting(
        job=TrainingJob(
            model=run.model,
            sequence_length=run.sequence_length,
            global_batch_size=run.global_batch_size,
            precision=precision,
            recompute_modules=run.recompute_modules,
        ),
        cluster=cluster,
        runtime=replace(profile, **facts_of(run)),
        memory=source.memory,
        stage=source.stage,
    )


def facts_of(run: MeasuredRun) -> dict[str, Any]:
    """The facts of its runtime's profile that this run contradicts."""
    source = source_of(run)
    facts: dict[str, Any] = dict(source.facts)
    if source.flags == "listed":
        facts |= {fact: re.search(pattern, run.notes) is not None for pattern, fact in FLAG_FACTS.items()}
    for pattern, fact, value in NOTE_FACTS:
        if re.search(pattern, run.notes):
            facts[fact] = value
    known = {field.name for field in fields(RuntimeProfile)} - NO_FACTS | set(CONSTANTS)
    assert set(facts) <= known, f"{sorted(set(facts) - known)} are no facts of a profile"
    return facts


@cache
def _cluster(device: str, devices: int, devices_per_host: int, nic: tuple[str, float, float] | None) -> Cluster:
    group: dict[str, Any] = {
        "device": device,
        "hosts": devices // devices_per_host,
        "devices_per_host": devices_per_host,
    }
    if nic is not None:
        kind, bandwidth, latency = nic
        group["nic_links"] = [{"kind": kind, "bandwidth_gb_per_s": bandwidth, "latency_us": latency}]
    return cluster_from_mapping(group, Path())


def cluster_of(device: str, devices: int, hosts: _Hosts) -> Cluster:
    """The cluster that so many devices of a measured file's kind make.

    Raises:
        ConfigError: the device is unknown.
    """
    pairs = find_devices(device)
    if len(pairs) > 1 or pairs[0][0]:
        groups = []
        for count, kind in pairs:
            per_host = _devices_per_host(count, hosts.devices or kind.devices_per_host)
            groups.append({"device": kind.name, "hosts": count // per_host, "devices_per_host": per_host})
        return cluster_from_mapping({"groups": groups}, Path())
    kind = pairs[0][1]
    per_host = _devices_per_host(devices, hosts.devices or kind.devices_per_host)
    nic = hosts.nic
    return _cluster(
        kind.name,
        devices,
        per_host,
        (nic.kind, nic.bandwidth_gb_per_s, nic.latency_us) if nic else None,
    )


def _devices_per_host(devices: int, in_host: int) -> int:
    """Devices that each host gives to a job: all of them, or the largest share that divides the job evenly."""
    return next(size for size in range(min(devices, in_host), 0, -1) if devices % size == 0)


__all__ = [
    "NO_FACTS",
    "ConfigError",
    "MeasuredSetting",
    "Source",
    "cluster_of",
    "facts_of",
    "is_known_source",
    "setting_of",
    "source_of",
]
