"""Proxy trials: a smaller job that runs in place of a candidate, on a few hosts of the same cluster.

A proxy keeps the candidate's tp, cp, up, ep and mbs, its schedule, its ZeRO stage and recomputation, and with them the
shapes of all operators of a layer and of the collectives inside it. Stages, replicas, layers and micro-batches are
fewer:

    pp, dp      fill the devices, neither above the candidate's. A pipeline stays one (pp of at least 2); with `stage`,
                one stage runs alone where there is no room for two, without its chunks and its neighbours' messages.
                Replicas stay replicas where there is room, so that the reduction of gradients shows too. Of the rest pp
                is largest.
    layers      `auto` keeps those of each stage and chunk, so that a device does the same work; fewer where ZeRO's
                larger shares of few replicas may not fit.
    batch       as many micro-batches per stage as the candidate has, so that the bubble's share is comparable, and at
                most MAX_ROUNDS of them, so that a step is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, ConfigGrid, ParallelConfig
from costmodels.job.proxy_job import Reduction, least_layers
from costmodels.job.setting import Setting
from costmodels.job.uneven_work import EVEN
from costmodels.step.error_models import memory_error_of
from costmodels.step.memory.peak import estimate_memory
from trials.trial_keys import ProxyOptions
from tuner.space.dimensions import divisors
from tuner.space.enumeration import SpaceOptions, broken_rules, launchable

PROXY = "proxy"
"""Trial attribute with the proxy that ran in place of the candidate, as `Proxy.as_json`; full-size trials have none."""

MAX_ROUNDS = 4
"""Largest number of micro-batches per stage that a proxy runs."""

LIKELY_FIT = 0.9
"""Probability with which a proxy must fit: with fewer layers its peak tells as much, and its steps tell more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proxy:
    """Job that runs in place of a candidate.

    Attributes:
        reduction: Sizes of the smaller job.
        config: Configuration of the smaller job.
    """

    reduction: Reduction
    config: ParallelConfig

    @property
    def in_words(self) -> str:
        """Smaller job in words."""
        sizes, layout = self.reduction, self.config
        hosts = f"{sizes.hosts} hosts" if sizes.hosts > 1 else "1 host"
        return (
            f"a smaller job on {hosts}: {sizes.layers} layers, pp={layout.pp}, dp={layout.dp}, global batch "
            f"{sizes.global_batch_size}"
        )

    def setting(self, setting: Setting) -> Setting:
        """Return the setting that the proxy runs in."""
        return replace(setting, job=self.reduction.job(setting.job), cluster=self.reduction.cluster(setting.cluster))

    def as_json(self) -> dict[str, Any]:
        """Return the proxy as a trial keeps it."""
        values = self.config.values(DEGREES + FURTHER_DIMENSIONS)
        return {**asdict(self.reduction), "devices": self.config.num_devices, "config": values}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Proxy:
        """Return the proxy that `as_json` wrote."""
        sizes = {name: int(entry[name]) for name in ("hosts", "layers", "global_batch_size")}
        return cls(reduction=Reduction(**sizes), config=ParallelConfig(**entry["config"]))


def proxy_of(
    config: ParallelConfig, setting: Setting, options: ProxyOptions, space: SpaceOptions | None = None
) -> Proxy | None:
    """Return the largest smaller job that runs what a device of the candidate runs; None if there is none that fits.

    Args:
        config: Configuration of the candidate.
        setting: Setting of the full job, on a cluster of equal hosts.
        options: Options of the study on its proxies.
        space: Options of the study on its space. A proxy obeys the rules in force, but no tightened degrees.
    """
    space = space or SpaceOptions()
    rules = replace(space, allowed=(), opened=())
    for hosts in range(options.hosts, 0, -1):
        for smaller in _enumerate_degrees(config, hosts * setting.cluster.devices_per_host, stage=options.stage):
            for layers in _enumerate_layers(config, smaller, setting, options):
                batch = smaller.dp * smaller.mbs * smaller.pp * _num_rounds(config, setting)
                reduction = Reduction(hosts=hosts, layers=layers, global_batch_size=batch)
                found = Proxy(reduction=reduction, config=smaller)
                if _is_valid(found, config, setting, rules) and probably_fits(found, setting, space):
                    return found
    return None


def _enumerate_degrees(config: ParallelConfig, devices: int, *, stage: bool) -> Iterator[ParallelConfig]:
    """Enumerate configurations that fill the devices with fewer stages and replicas, the most telling first."""
    # ranks of one stage of one replica, which a proxy keeps
    inner = config.tp * config.cp * config.up
    if devices % inner:
        return
    pairs = [(pp, devices // inner // pp) for pp in divisors(devices // inner)]
    least_pp = 1 if stage and devices == inner else min(config.pp, 2)
    kept = [(pp, dp) for pp, dp in pairs if least_pp <= pp <= config.pp and dp <= config.dp]
    # replicas stay replicas first, then the deepest pipeline
    for pp, dp in sorted(kept, key=lambda pair: (min(config.dp, 2) > pair[1], -pair[0])):
        shards = config.dp_shard if config.dp_shard and dp % config.dp_shard == 0 else 0
        # proxies have equal hosts, whose order is of no account, and one stage has neither chunks nor others beside it
        work = EVEN if pp == 1 < config.pp else replace(config.assignment, hosts=())
        yield replace(config, pp=pp, dp=dp, vpp=config.vpp if pp > 1 else 1, dp_shard=shards, assignment=work)


def _enumerate_layers(
    config: ParallelConfig, smaller: ParallelConfig, setting: Setting, options: ProxyOptions
) -> Iterator[int]:
    """Enumerate numbers of layers to try, the largest first, each once."""
    model = setting.job.model
    if isinstance(options.layers, int):
        yield options.layers
        return
    chunks = smaller.pp * smaller.vpp
    # layers of the largest chunk, rounded up
    of_chunk = -(-setting.padded_layers // (config.pp * smaller.vpp))
    sizes = (min(layers * chunks, model.num_layers) for layers in range(of_chunk, 0, -1))
    yield from (layers for layers in dict.fromkeys(sizes) if layers >= least_layers(model))


def _num_rounds(config: ParallelConfig, setting: Setting) -> int:
    num_micro_batches = setting.job.global_batch_size // (config.dp * config.mbs)
    return max(1, min(MAX_ROUNDS, round(num_micro_batches / config.pp)))


def _is_valid(found: Proxy, config: ParallelConfig, setting: Setting, rules: SpaceOptions) -> bool:
    """Return whether the proxy can be launched, and breaks no rule but those that the candidate breaks too."""
    smaller = found.setting(setting)
    if not launchable(smaller, found.config):
        return False
    broken = set(broken_rules(smaller, rules, found.config))
    return not broken or broken <= set(broken_rules(setting, rules, config))


def probably_fits(found: Proxy, setting: Setting, space: SpaceOptions) -> bool:
    """Return whether the proxy probably leaves the headroom free, given the error of predicted memory."""
    smaller = found.setting(setting)
    grid = ConfigGrid.from_configs([found.config])
    memory = estimate_memory(smaller, grid)
    return bool(memory.probability_of_fit(space.memory_headroom, memory_error_of(smaller.runtime))[0] >= LIKELY_FIT)
