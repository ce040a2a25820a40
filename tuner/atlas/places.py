"""Places of the atlas: models on sizes of clusters, each with its study file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from costmodels.job.model_catalog import model_names, read_models
from hardware.cluster_file import cluster_names, find_cluster
from hardware.device import Device, hosts_per_domain
from hardware.io.errors import ConfigError, did_you_mean
from tuner.atlas.page_names import page_name
from tuner.study_file.text import scalar

RUNTIMES = (("Ascend", "mindspeed"), ("TPU", "maxtext"), ("Trainium", "unknown"), ("Gaudi", "unknown"))
"""Runtime profiles by the first letters of a device's name. All other devices have Megatron-LM's; devices whose
frameworks have no profile have the one of no framework in particular."""
USUAL_RUNTIME = "megatron-core"
NOT_FOR_TRAINING = ("cpu-host",)
"""Clusters of the catalog that are there to rehearse on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtlasJob:
    """Job that the whole atlas is about, but for the model.

    Attributes:
        sequence_length: Tokens of a sequence.
        global_batch_size: Sequences of a step.
        tokens: Tokens of a whole training.
    """

    sequence_length: int
    global_batch_size: int
    tokens: float

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.sequence_length * self.global_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One model on one size of one cluster.

    Attributes:
        model: Name of the model in the catalog.
        cluster: Name of the cluster in the catalog.
        hosts: Number of hosts.
        devices: Number of devices of all hosts.
        devices_per_host: Number of devices of a host.
        hosts_per_domain: Hosts of a rack that is one domain, as many of them as a power of two; 1 elsewhere.
        runtime: Name of the runtime profile.
        precision: Precision of the matrix products.
    """

    model: str
    cluster: str
    hosts: int
    devices: int
    devices_per_host: int
    hosts_per_domain: int
    runtime: str
    precision: str

    @property
    def name(self) -> str:
        """Name of the place, and of its study, which has nothing but letters, digits, dots, dashes and underscores."""
        named = f"{page_name('models', self.model)}-{page_name('clusters', self.cluster)}-{self.devices}"
        return re.sub(r"[^A-Za-z0-9._-]+", "-", named).lstrip("-._")

    def study_text(self, job: AtlasJob) -> str:
        """Return the study file of the place: what to copy, and what the answer is computed from."""
        rack = f", devices_per_host: {self.devices_per_host}, hosts_per_domain: {self.hosts_per_domain}"
        cluster = f"name: {scalar(self.cluster)}, hosts: {self.hosts}{rack if self.hosts_per_domain > 1 else ''}"
        sizes = f"sequence_length: {job.sequence_length}, global_batch_size: {job.global_batch_size}"
        return (
            f"name: {self.name}\n"
            f"model: {scalar(self.model)}\n"
            f"cluster: {{{cluster}}}\n"
            f"job: {{{sizes}, precision: {self.precision}}}\n"
            f"runtime: {self.runtime}\n"
        )


def runtime_of(device: Device) -> str:
    """Return the runtime profile that the atlas takes on a device."""
    return next((name for prefix, name in RUNTIMES if device.name.startswith(prefix)), USUAL_RUNTIME)


def precision_of(device: Device) -> str:
    """Return bf16, or fp16 for devices that lack it."""
    return "bf16" if device.bf16_flop_per_s else "fp16"


def places(models: Sequence[str], clusters: Sequence[str], sizes: Sequence[int]) -> Iterator[Place]:
    """Yield every model on every size of every cluster whose hosts make up that number of devices.

    Args:
        models: Names of models of the catalog.
        clusters: Names of clusters of the catalog.
        sizes: Numbers of devices.
    """
    kinds = [find_cluster(name) for name in clusters]
    for model in models:
        for kind in kinds:
            device = kind.devices[0]
            per_host = devices_of_host(kind.name)
            for devices in sizes:
                hosts, rest = divmod(devices, per_host)
                if hosts and not rest:
                    yield Place(
                        model=model,
                        cluster=kind.name,
                        hosts=hosts,
                        devices=devices,
                        devices_per_host=per_host,
                        # batches and layers divide by powers of two, and not by the 18 hosts of a rack
                        hosts_per_domain=1 << (hosts_per_domain(device).bit_length() - 1),
                        runtime=runtime_of(device),
                        precision=precision_of(device),
                    )


def devices_of_host(cluster: str) -> int:
    """Return the number of devices of a host; a rack that is one domain has several hosts."""
    kind = find_cluster(cluster)
    return kind.devices_per_host // hosts_per_domain(kind.devices[0])


def named_models(text: str | None) -> tuple[str, ...]:
    """Return the models that `--models a,b` lists; without it all of the catalog whose files can be read.

    Raises:
        ConfigError: The catalog does not have one of them, or one comes twice.
    """
    if text is None:
        return tuple(read_models()[0])
    return _named("--models", text, model_names())


def named_clusters(text: str | None) -> tuple[str, ...]:
    """Return the clusters that `--clusters a,b` lists; without it all of the catalog but those to rehearse on.

    Raises:
        ConfigError: The catalog does not have one of them, or one comes twice.
    """
    if text is None:
        return tuple(name for name in cluster_names() if name not in NOT_FOR_TRAINING)
    return _named("--clusters", text, cluster_names())


def _named(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    if text is None:
        return tuple(known)
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(
                "is not in the catalog", key=option, value=name, nearest=did_you_mean(name, known) or ", ".join(known)
            )
    if len(set(names)) < len(names):
        raise ConfigError("must list each once", key=option, value=text)
    return names
