"""Keys of a new study's `cluster:`, from what its user says of the devices and what a script says of the hosts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping, cluster_names
from hardware.io.config_file import read_mapping
from hardware.io.errors import ConfigError
from hardware.named_cluster import NamedCluster, name_cluster
from trials.command.own_words import segments_of
from tuner.imports import Imported

_RECIPE = "--fp8-recipe"


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedHosts:
    """Hosts as a script or options state them; None is unknown.

    Attributes:
        hosts: Number of hosts.
        devices_per_host: Devices of each host that are used.
        devices: Number of devices that the current configuration occupies at least.
        segment: Hosts that `sbatch --segment` keeps in one domain.
    """

    hosts: int | None = None
    devices_per_host: int | None = None
    devices: int | None = None
    segment: int | None = None


def hosts_of(imported: Imported) -> StatedHosts:
    """Return the hosts of a current configuration."""
    return StatedHosts(
        hosts=imported.hosts,
        devices_per_host=imported.devices_per_host,
        devices=math.prod(imported.degrees.get(name, 1) for name in ("pp", "tp", "dp", "cp", "up")),
        segment=_segment(imported),
    )


def cluster_keys(words: str, stated: StatedHosts, folder: Path) -> dict[str, Any]:
    """Return the keys, with as many hosts as the configuration needs if nobody gives their number.

    Args:
        words: Answer to `--cluster`: words of `name_cluster`, or the path of a file that describes a cluster.
        stated: Hosts that are known.
        folder: Folder of the study, to which a file is relative.

    Raises:
        ConfigError: No cluster has this name, or it contradicts the hosts.
    """
    try:
        if re.search(r"\.ya?ml$", words, re.IGNORECASE) or Path(words).is_file():
            return _of_file(Path(words), stated, folder)
        return _of_words(name_cluster(words), stated)
    except ConfigError as error:
        if error.file:
            raise
        raise ConfigError(error.rule, key="--cluster", value=words, nearest=error.nearest) from None


def _of_words(named: NamedCluster, stated: StatedHosts) -> dict[str, Any]:
    in_host = named.with_hosts().devices_per_host
    per_host = stated.devices_per_host or in_host
    if per_host > in_host:
        others = [name for name in cluster_names() if name_cluster(name).with_hosts().devices_per_host >= per_host]
        raise ConfigError(
            f"has hosts of {in_host} devices, but today's configuration starts {per_host} processes on each",
            nearest=f"hosts of so many: {', '.join(others)}, or --devices-per-host" if others else None,
        )
    named_devices = named.devices or (named.hosts * per_host if named.hosts else None)
    hosts = stated.hosts
    if hosts is None:
        wanted = named_devices or stated.devices or per_host
        per_host = min(per_host, wanted)
        hosts = max(1, wanted // per_host)
    if named_devices and hosts * per_host != named_devices:
        begun = f"{hosts} x {per_host}" if stated.hosts else f"{per_host} on each host"
        raise ConfigError(
            f"states {named_devices} devices, but the configuration starts {begun}",
            nearest=f"name the device alone, or a multiple of {per_host} devices and --hosts",
        )
    keys = {key: value for key, value in named.keys.items() if key in ("name", "device")} | {"hosts": hosts}
    if "hosts_per_domain" in named.keys:
        domain = stated.segment or named.keys["hosts_per_domain"]
        return keys | {"devices_per_host": per_host, "hosts_per_domain": domain}
    return keys if per_host == in_host else keys | {"devices_per_host": per_host}


def _of_file(file: Path, stated: StatedHosts, folder: Path) -> dict[str, Any]:
    """Return the file, or its keys with the number of hosts and devices that are used of them."""
    mapping = read_mapping(file)
    described = cluster_from_mapping(mapping, file.parent, str(file))
    own = {"hosts": described.num_hosts, "devices_per_host": described.devices_per_host}
    wanted = {"hosts": stated.hosts, "devices_per_host": stated.devices_per_host}
    others = {key: number for key, number in wanted.items() if number is not None and number != own[key]}
    if not others:
        return {"file": relative_path(file, folder)}
    if "groups" in mapping or "file" in mapping:
        differing = ", ".join(f"{key} = {number} for {own[key]}" for key, number in others.items())
        raise ConfigError(
            f"describes other hosts than the configuration uses: {differing}",
            nearest="a file with the hosts of this job",
        )
    trace = mapping.get("trace")
    moved = {"trace": relative_path(file.parent / trace, folder)} if trace else {}
    return {**mapping, **moved, **others}


def notes_on_domains(imported: Imported, cluster: Cluster) -> tuple[str, ...]:
    """Return the sentence on hosts that must share a domain, where Slurm was not told which."""
    sizes = sorted(np.bincount(cluster.host_domain()).tolist())
    if cluster.num_domains in (1, cluster.num_hosts) or _segment(imported):
        return ()
    each = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} or {sizes[-1]}"
    keeps = f"; Slurm keeps them together by --segment={sizes[0]}" if sizes[0] == sizes[-1] else ""
    return (f"cluster: {cluster.num_hosts} hosts are taken as {len(sizes)} domains of {each}{keeps}",)


def check_formats(imported: Imported, cluster: Cluster) -> None:
    """Check that the devices have the number formats that a script's flags name.

    Source: Transformer Engine's `check_mxfp8_support`, which asks for compute capability 10.0 (Blackwell).

    Raises:
        ConfigError: They have not, so that every trial would die.
    """
    words = imported.command.words if imported.command else ()
    recipe = next((one.values for one in segments_of(words) if one.name == _RECIPE), ())
    # AMD's Transformer Engine has it on devices whose fp4 rate the catalog lacks
    devices = (device for device in cluster.devices if not device.name.startswith("MI"))
    older = next((device for device in devices if not device.fp4_flop_per_s), None)
    if recipe == ("mxfp8",) and older is not None:
        raise ConfigError(
            f"needs devices from Blackwell on, and the cluster has {older.name}",
            key=_RECIPE,
            value="mxfp8",
            nearest="--cluster gb200-nvl72 or dgx-b200, or a script with another recipe",
        )


def _segment(imported: Imported) -> int | None:
    """Return the hosts that a script's `sbatch --segment` keeps in one domain; None if it does not say.

    Source: the manual page of sbatch of Slurm 24.05, topology/block.
    """
    slurm = imported.command.slurm if imported.command else None
    found = re.findall(r"(?<= --segment=)[1-9]\d*(?= )", f" {' '.join(slurm.sbatch if slurm else ())} ")
    return int(found[-1]) if found else None


def relative_path(path: Path, folder: Path) -> str:
    """Return a path relative to `folder`, in a form that is not mistaken for a name of the catalog."""
    target, base = path.resolve(), folder.resolve()
    common = next((parent for parent in (base, *base.parents) if target.is_relative_to(parent)), None)
    if common is None or len(common.parts) == 1:
        return str(target)
    up = len(base.parts) - len(common.parts)
    relative = Path(*[".."] * up) / target.relative_to(common)
    return str(relative) if "/" in str(relative) else f"./{relative}"
