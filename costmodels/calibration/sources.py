"""Which runtime, hosts and habits stand behind each source of measured runs (catalog/sources.yaml).

A measured row says what was configured, not what its runtime does. The table gives each known source its runtime; a
name that has a known one between dashes is that source (`amp-neurips22` is `amp`). An unknown one falls to
FALLBACK_RUNTIME or, where its rows show plain FSDP, to FSDP_RUNTIME.

Unlike devices (`mixed:12xV100-SXM-16+4xT4-16`) stand kind by kind and host by host, in the order in which the source's
hosts are known to stand, else in that of the row; ranks count them so. Hosts are those that the source states for the
device, else its usual ones. Of unlike devices, a number that fills no whole hosts is taken to stand on hosts of the
largest size that divides both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.job.runtime import CONSTANTS, RuntimeProfile, find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import PRECISIONS, TrainingJob
from costmodels.step.memory import MemoryMeaning, WhichStage
from hardware.cluster import Cluster, cluster_from_mapping
from hardware.device import find_device, find_devices
from hardware.io.config_file import StrictModel, read_mapping
from hardware.io.errors import ConfigError

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

NO_FACTS = {
    "name",
    *CONSTANTS,
    "device_speed",
    "residuals",
    "layer_changes",
    "log_errors",
    "step_error",
    "memory_error",
}
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
    efficiency: float | None = None
    sharers: int = 1


class _HostsOf(StrictModel):
    devices: Annotated[int, Field(ge=1)] | None = None
    nic: _Nic | None = None
    intra: _Nic | None = None


class _Hosts(_HostsOf):
    """The hosts of a source: of all its devices, or by the catalog's name of one, in the order in which they stand."""

    of: dict[str, _HostsOf] = Field(default_factory=dict)

    def of_device(self, name: str) -> _HostsOf:
        """The hosts of one kind of device."""
        return self.of.get(name, self)

    def in_order(self, counts: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
        """Devices of each name in the order of their hosts; as given where the source does not tell it of each."""
        order = list(self.of)
        return tuple(sorted(counts, key=lambda each: order.index(each[1]))) if self._tells(counts) else counts

    def _tells(self, counts: tuple[tuple[int, str], ...]) -> bool:
        return all(name in self.of for _, name in counts)


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
    tied: bool | None = None
    """Whether the head is the embedding's table, where that is known and the rows don't tell."""
    facts: dict[str, bool | int | str] = Field(default_factory=dict)
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSetting:
    """Setting of measured runs, with the meaning of their memory figures.

    Attributes:
        setting: Job, cluster and runtime that predict the runs.
        memory: Meaning of a measured peak: allocated, reserved, or seen by the device.
        stage: Pipeline stage whose memory was measured.
    """

    setting: Setting
    memory: MemoryMeaning
    stage: WhichStage


@cache
def _sources() -> dict[str, Source]:
    path = Path(str(files("costmodels") / "catalog" / "sources.yaml"))
    return TypeAdapter(dict[str, Source]).validate_python(read_mapping(path))


def is_known_source(name: str) -> bool:
    """Whether the table has the source, so that nothing of it is guessed."""
    return _known_source(name) is not None


def _known_source(name: str) -> Source | None:
    """The table's source of that name, or else the longest that stands in it between dashes; None if there is none."""
    inside = [known for known in _sources() if f"-{known}-".lower() in f"-{name}-".lower()]
    return _sources()[max(inside, key=len)] if inside else None


def source_of(run: MeasuredRun) -> Source:
    """What is known of the run's source, or guessed from its columns and remarks."""
    known = _known_source(run.source)
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
    model = run.model if source.tied is None else replace(run.model, tied_embeddings=source.tied)
    precision = source.precision or run.precision
    if precision not in PRECISIONS:
        precision = "bf16"
    if precision == "tf32" and any(device.bf16_flop_per_s is None for device in cluster.devices):
        precision = "fp32"  # before Ampere
    job = TrainingJob(
        model=model,
        sequence_length=run.sequence_length,
        global_batch_size=run.global_batch_size,
        precision=precision,
        recompute_modules=run.recompute_modules,
    )
    return MeasuredSetting(
        setting=Setting(job=job, cluster=cluster, runtime=replace(profile, **facts_of(run))),
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


def cluster_of(device: str, devices: int, hosts: _Hosts) -> Cluster:
    """The cluster that so many devices of a measured file's kind make.

    Raises:
        ConfigError: a device is unknown, or unlike ones are others than so many.
    """
    pairs = find_devices(device)
    is_mixed = pairs[0][0] > 0
    named = sum(count for count, _ in pairs)
    if is_mixed and named != devices:
        raise ConfigError(
            f"names {named} devices, but the run has {devices}",
            key="device",
            value=device,
            nearest="the counts are devices, not hosts",
        )
    return _cluster(tuple((count or devices, kind.name) for count, kind in pairs), hosts.model_dump_json())


@cache
def _cluster(counts: tuple[tuple[int, str], ...], hosts_json: str) -> Cluster:
    """Hosts of so many devices of each name, group by group."""
    hosts = _Hosts.model_validate_json(hosts_json)
    groups = []
    for count, name in hosts.in_order(counts):
        own = hosts.of_device(name)
        in_host = own.devices or find_device(name).devices_per_host
        is_cut = len(counts) > 1 and count > in_host
        per_host = math.gcd(count, in_host) if is_cut else _devices_per_host(count, in_host)
        group: dict[str, Any] = {"device": name, "hosts": count // per_host, "devices_per_host": per_host}
        links = {"nic_links": own.nic, "intra_links": own.intra}
        groups.append(group | {key: [link.model_dump()] for key, link in links.items() if link})
    return cluster_from_mapping(groups[0] if len(groups) == 1 else {"groups": groups}, Path())


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
