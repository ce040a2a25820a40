"""Best prediction for each size of a cluster: how far a job scales, and how few hosts hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodels.job.parallel_config import ParallelConfig
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import MAX_DEVICES
from hardware.io.errors import ConfigError
from tuner.answers.candidates import tokens_per_s_per_device
from tuner.answers.planned_candidates import plan_study
from tuner.space.enumeration import Space, build_space
from tuner.study_file.config import StudyConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Prediction of a study's job on a number of hosts.

    Attributes:
        hosts: Number of hosts.
        devices: Number of devices of all hosts.
        config: Configuration with the shortest predicted step; None if none fits.
        step_time_s: Predicted step time of it [s]; inf without one.
        tokens_per_s_per_device: Predicted throughput of one device; 0 without one.
        peak_memory_bytes: Predicted peak of memory [bytes]; 0 without one.
        reason: Reason why there is no configuration; empty otherwise.
    """

    hosts: int
    devices: int
    config: ParallelConfig | None = None
    step_time_s: float = np.inf
    tokens_per_s_per_device: float = 0.0
    peak_memory_bytes: int = 0
    reason: str = ""

    def as_json(self, dimensions: Sequence[str]) -> dict[str, Any]:
        """Return the size as an object; null stands for values that were not predicted."""
        found = self.config is not None
        return {
            "hosts": self.hosts,
            "devices": self.devices,
            "config": self.config.values(dimensions) if self.config is not None else None,
            "step_time_s": self.step_time_s if found else None,
            "tokens_per_s_per_device": self.tokens_per_s_per_device if found else None,
            "peak_memory_bytes": self.peak_memory_bytes if found else None,
            "reason": self.reason or None,
        }


def parse_sizes(config: StudyConfig, text: str) -> tuple[int, ...]:
    """Return the numbers of hosts that `--hosts 2,4,8` lists, in its order.

    Raises:
        ConfigError: An entry is no possible number of hosts, or comes twice, or the study's cluster has no one number.
    """
    if config.measured is not None:
        raise ConfigError(
            f"needs predictions of other sizes, and the measured rows ran on {config.measured.devices} devices",
            file=config.file,
            key="--hosts",
            value=text,
            nearest="use a study with a model and a job",
        )
    groups = config.setting.cluster.groups
    if len(groups) > 1:
        raise ConfigError(
            f"needs a cluster of equal hosts, and this one has {len(groups)} groups",
            file=config.file,
            key="--hosts",
            value=text,
        )
    most = MAX_DEVICES // groups[0].devices_per_host
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        is_number = entry.isascii() and entry.isdigit() and len(entry) <= len(str(most))
        if not is_number or not 1 <= int(entry) <= most:
            raise ConfigError(
                f"must list numbers of hosts from 1 to {most}", key="--hosts", value=entry, nearest="for example 2,4,8"
            )
    hosts = tuple(map(int, entries))
    if len(set(hosts)) < len(hosts):
        raise ConfigError("must list each number of hosts once", key="--hosts", value=text)
    return hosts


def best_by_size(config: StudyConfig, sizes: Sequence[int]) -> list[Size]:
    """Return the best prediction on each number of hosts, with everything else as the study says.

    Raises:
        ConfigError: A size has too many configurations to predict.
    """
    return [_predict_best(config, hosts) for hosts in sizes]


def _predict_best(config: StudyConfig, hosts: int) -> Size:
    setting = replace(config.setting, cluster=config.setting.cluster.with_hosts(hosts))
    devices = setting.cluster.num_devices
    current = config.current if config.current is not None and config.current.num_devices == devices else None
    try:
        space = build_space(setting, config.options, current=current)
    except ConfigError as error:
        raise error.in_file(config.file) from None
    # layers are planned for candidates that fit only, because planning takes long
    fitting = np.flatnonzero(space.memory.fits(config.options.memory_headroom))
    if not len(fitting):
        return Size(hosts=hosts, devices=devices, reason=_explain_none(space))
    if config.planning.name != "megatron" and not config.planning.is_auto:
        planned = plan_study(replace(config, setting=setting), space.grid.take(fitting))
        setting = planned.setting
        space = build_space(setting, planned.options, current=current)
        fitting = np.flatnonzero(space.memory.fits(config.options.memory_headroom))
    estimate = estimate_step(setting, space.grid, memory=space.memory)
    # the space may hold configurations that do not fit, such as the current one
    best = int(fitting[np.argmin(estimate.step_time_s[fitting])])
    step_time_s = float(estimate.step_time_s[best])
    return Size(
        hosts=hosts,
        devices=devices,
        config=space.grid.config(best),
        step_time_s=step_time_s,
        tokens_per_s_per_device=tokens_per_s_per_device(setting, step_time_s),
        peak_memory_bytes=int(space.memory.peak_bytes[best]),
    )


def _explain_none(space: Space) -> str:
    """Return the reason why no configuration fits."""
    if space.num_before_memory:
        return f"none of the {space.num_before_memory:,} configurations that obey every rule fits in memory"
    rule = max(space.removed, key=lambda name: space.removed[name], default=None)
    return "no configuration obeys every rule" + (f"; {rule} removed the most" if rule else "")
