"""Runtime, hosts and conventions of each source of measured runs (catalog/sources.yaml).

A measured row states a configuration, but not the behaviour of its runtime. The table names the runtime of each known
source. A name that contains a known one between dashes is that source (`amp-neurips22` is `amp`). The runtime of an
unknown source is FALLBACK_RUNTIME, or FSDP_RUNTIME if its rows show plain FSDP. What a row states itself
(stated_setup.py) overrides both.

Mixed devices (`mixed:12xV100-SXM-16+4xT4-16`) are grouped by kind and host, in the order of the source's hosts if it is
known, else in the order of the row; ranks are numbered in that order. Hosts are those that the source states for the
device, else its usual ones. If a number of mixed devices fills no whole hosts, hosts of the largest size that divides
both are assumed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.stated_setup import NOTHING, StatedSetup
from costmodels.job.facts import FactValue, facts, profile_fields
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import CONSTANTS, RuntimeProfile, find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import PRECISIONS, TrainingJob
from costmodels.step.memory.peak import MemoryEstimate, MemoryMeaning, WhichStage, estimate_memory
from hardware.arrays import FloatArray
from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping
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
"""Words in the remarks of an unknown source that name its runtime; the first one found counts."""

NO_FACTS = {
    "name",
    *CONSTANTS,
    "device_speed",
    "residuals",
    "layer_changes",
    "offload_modes",
    "log_errors",
    "step_error",
    "memory_error",
    "knows_cluster",
    "knows_memory",
    "stated",
}
"""Fields of a profile that are no facts: its name, values from measurements, and a choice that each run states itself.
All others are facts."""


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
    """Hosts of a source: for all its devices, or by the catalog's device name, in the order of their ranks."""

    of: dict[str, _HostsOf] = Field(default_factory=dict)

    def of_device(self, name: str) -> _HostsOf:
        """Return the hosts of one kind of device."""
        return self.of.get(name, self)

    def in_order(self, counts: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
        """Sort device counts by the order of the source's hosts; keep them as given if it does not list all."""
        order = list(self.of)
        is_known = all(name in order for _, name in counts)
        return tuple(sorted(counts, key=lambda each: order.index(each[1]))) if is_known else counts


class Source(StrictModel):
    """Properties of a source that its rows do not state."""

    runtime: str
    memory: MemoryMeaning
    stage: WhichStage = "fullest"
    first_step: bool = False
    """Whether its peaks are those of the first step alone, whose passes run before the optimizer makes its moments."""
    flags: Literal["listed"] | None = None
    timed: bool = True
    """Whether its step times are usable; in test suites of tiny models they are launch-bound."""
    hosts: _Hosts = _Hosts()
    precision: str | None = None
    tied: bool | None = None
    """Whether head and embedding share one table, if that is known although the rows do not state it."""
    facts: dict[str, FactValue] = Field(default_factory=dict)
    inferred: list[str] = Field(default_factory=list)
    """Those of the facts that were concluded from the source's own measurements."""
    tuned_by: Literal["user", "vendor"] = "user"
    """Who chose the software and the flags of its runs: a vendor of devices or frameworks, or a user of them."""
    publisher: str | None = None
    """Name that sources of one cluster share, where there are several."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSetting:
    """Setting of measured runs, with the meaning of their memory figures.

    Attributes:
        setting: Job, cluster and runtime that predict the runs.
        memory: Meaning of a measured peak: allocated, reserved, or seen by the device.
        stage: Pipeline stage whose memory was measured.
        first_step: Whether only the first step was measured.
    """

    setting: Setting
    memory: MemoryMeaning
    stage: WhichStage
    first_step: bool = False

    def peak_bytes(self, grid: ConfigGrid, memory: MemoryEstimate) -> FloatArray:
        """Return the predicted peaks as the runs measure them, on the stage that they observe [bytes], [n].

        Args:
            grid: Configurations [n].
            memory: Their memory on the fullest stage.
        """
        if self.stage != "fullest":
            memory = estimate_memory(self.setting, grid, stage=self.stage)
        if not self.first_step:
            return memory.peak_as(self.memory)
        # PyTorch's optimizers make their moments in their first step, when the activations of its passes are gone
        runtime = replace(self.setting.runtime, first_moment_bytes=0, second_moment_bytes=0)
        passes = estimate_memory(replace(self.setting, runtime=runtime), grid, stage=self.stage)
        states = np.sum([memory.parts_bytes[part] for part in ("weights", "gradients", "optimizer")], axis=0)
        return np.asarray(np.maximum(passes.peak_as(self.memory), states))


@cache
def _load_sources() -> dict[str, Source]:
    path = Path(__file__).parents[1] / "catalog" / "sources.yaml"
    return TypeAdapter(dict[str, Source]).validate_python(read_mapping(path))


def is_known_source(name: str) -> bool:
    """Return whether the table has the source, so that none of its properties is guessed."""
    return _find_known_source(name) is not None


def _find_known_source(name: str) -> Source | None:
    """Return the table's source with the longest name that occurs in `name` between dashes; None if there is none."""
    inside = [known for known in _load_sources() if f"-{known}-".lower() in f"-{name}-".lower()]
    return _load_sources()[max(inside, key=len)] if inside else None


def source_of(run: MeasuredRun) -> Source:
    """Return the properties of the run's source: stated by the row, from the table, or guessed from its remarks."""
    source = _find_known_source(run.source) or _guess_source(run)
    return source if run.stated == NOTHING else _with_stated(source, run.stated)


def is_runtime_known(run: MeasuredRun) -> bool:
    """Return whether the row or the table names the run's runtime, so that it is no guess."""
    return run.stated.runtime is not None or is_known_source(run.source)


def _guess_source(run: MeasuredRun) -> Source:
    # plain FSDP without tensor or pipeline parallelism is torchtitan's usual way
    lowered = f"{run.source} {run.notes}".lower()
    named = next((runtime for word, runtime in RUNTIME_WORDS.items() if word in lowered), None)
    is_fsdp = run.config.zero_stage == 3 and run.config.tp == run.config.pp == 1
    runtime = named or (FSDP_RUNTIME if is_fsdp else FALLBACK_RUNTIME)
    return Source(runtime=runtime, memory="reserved", reason="not in the table of sources")


def _with_stated(source: Source, stated: StatedSetup) -> Source:
    """Return the source with the runtime, facts and meaning of memory that a row states."""
    facts = dict(stated.facts)
    return source.model_copy(
        update={
            "runtime": stated.runtime or source.runtime,
            "memory": stated.memory or source.memory,
            "facts": source.facts | facts,
            "inferred": [name for name in source.inferred if name not in facts],
        }
    )


def _hosts_of(run: MeasuredRun) -> _Hosts:
    """Return the hosts of a run: its source's, with what the row states in place of their properties.

    Raises:
        ConfigError: the device is unknown.
    """
    hosts, stated = source_of(run).hosts, run.stated
    if not (stated.devices_per_host or stated.link or stated.nic_gb_per_s):
        return hosts
    named = [kind.name for _, kind in find_devices(run.device)]
    # the source's order of hosts holds only if it lists all of them
    order = list(hosts.of) if all(name in hosts.of for name in named) else named
    of = {}
    for name in order:
        own = hosts.of_device(name)
        nic = _stated_nic(own.nic, stated, name) if stated.link or stated.nic_gb_per_s else own.nic
        of[name] = _HostsOf(devices=stated.devices_per_host or own.devices, nic=nic, intra=own.intra)
    return _Hosts(of=of)


def _stated_nic(own: _Nic | None, stated: StatedSetup, device: str) -> _Nic:
    """Return the network that a row states; what it leaves open is the source's, or else the device's usual one."""
    usual = find_device(device).scale_out
    kind = own.kind if own else usual.kind
    bandwidth_gb_per_s = own.bandwidth_gb_per_s if own else usual.bandwidth_bytes_per_s / 1e9
    sharers = own.sharers if own else usual.sharers
    return _Nic(
        kind=stated.link or kind,
        bandwidth_gb_per_s=stated.nic_gb_per_s or bandwidth_gb_per_s,
        latency_us=own.latency_us if own else usual.latency_s * 1e6,
        efficiency=own.efficiency if own and not stated.link else None,
        sharers=1 if stated.nic_gb_per_s else sharers,
    )


def publisher_of(source: str) -> str:
    """Return the name that all sources of one cluster share: the table's `publisher`, or the source's own name."""
    known = _find_known_source(source)
    return known.publisher if known and known.publisher else source


def setting_of(run: MeasuredRun, runtimes: Mapping[str, RuntimeProfile], runtime: str | None = None) -> MeasuredSetting:
    """Return the setting that predicts a measured run.

    Args:
        run: Measured run.
        runtimes: Profiles that replace those of the same name in the catalog.
        runtime: Name of the profile to use for any source; None uses the table.

    Raises:
        ConfigError: the device is unknown, or the run has other numbers of it.
    """
    source = source_of(run)
    name = runtime or source.runtime
    profile = runtimes.get(name) or find_runtime(name)
    cluster = cluster_of(run.device, run.devices, _hosts_of(run))
    model = run.model if source.tied is None else run.model.changed(tied_embeddings=source.tied)
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
        shared_master_weights="reuse-fp32-param" in run.notes,
    )
    return MeasuredSetting(
        setting=Setting(job=job, cluster=cluster, runtime=replace(profile, **facts_of(run))),
        memory=source.memory,
        stage=source.stage,
        first_step=source.first_step,
    )


def facts_of(run: MeasuredRun) -> dict[str, Any]:
    """Return the facts of its runtime's profile that this run overrides."""
    source = source_of(run)
    rows = facts().values()
    # a source that lists all its flags has switched off those that it does not list
    listed = [fact for fact in rows if fact.listed and source.flags == "listed"]
    levels: tuple[Mapping[str, FactValue], ...] = (
        source.facts,
        {fact.name: re.search(fact.listed, run.notes) is not None for fact in listed},
        {fact.name: value for fact in rows for pattern, value in fact.remarks if re.search(pattern, run.notes)},
        dict(run.stated.facts),
    )
    return {name: value for level in levels for name, value in profile_fields(level.items()).items()}


def cluster_of(device: str, devices: int, hosts: _Hosts) -> Cluster:
    """Return the cluster of a measured run.

    Args:
        device: Kind of device, or a mixture, as the measured file spells it.
        devices: Number of devices.
        hosts: Hosts of the source.

    Raises:
        ConfigError: a device is unknown, or the counts of mixed devices do not add up to `devices`.
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
    return _build_cluster(tuple((count or devices, kind.name) for count, kind in pairs), hosts.model_dump_json())


@cache
def _build_cluster(counts: tuple[tuple[int, str], ...], hosts_json: str) -> Cluster:
    """Build the cluster from the number of devices of each name, group by group."""
    hosts = _Hosts.model_validate_json(hosts_json)
    groups = []
    for count, name in hosts.in_order(counts):
        own = hosts.of_device(name)
        in_host = own.devices or find_device(name).devices_per_host
        # mixed devices on several hosts: the largest host size that divides both numbers
        is_cut = len(counts) > 1 and count > in_host
        per_host = math.gcd(count, in_host) if is_cut else _devices_per_host(count, in_host)
        group: dict[str, Any] = {"device": name, "hosts": count // per_host, "devices_per_host": per_host}
        links = {"nic_links": own.nic, "intra_links": own.intra}
        groups.append(group | {key: [link.model_dump()] for key, link in links.items() if link})
    return cluster_from_mapping(groups[0] if len(groups) == 1 else {"groups": groups}, Path())


def _devices_per_host(devices: int, in_host: int) -> int:
    """Return the devices per host of a job: the most that a host has and that divide the job evenly."""
    return next(size for size in range(min(devices, in_host), 0, -1) if devices % size == 0)
