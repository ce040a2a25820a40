"""Keys of a new study's `cluster:`, from what its user says of the devices and what a script says of the hosts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardware.cluster_file import cluster_from_mapping, cluster_names
from hardware.io.config_file import read_mapping
from hardware.io.errors import ConfigError
from hardware.named_cluster import NamedCluster, name_cluster
from tuner.imports import Imported


def cluster_keys(imported: Imported, words: str, folder: Path) -> dict[str, Any]:
    """Return the keys, with as many hosts as the configuration needs if nobody gives their number.

    Args:
        imported: Current configuration, with the hosts that its script states.
        words: Answer to `--cluster`: words of `name_cluster`, or the path of a file that describes a cluster.
        folder: Folder of the study, to which a file is relative.

    Raises:
        ConfigError: No cluster has this name, or it contradicts the script.
    """
    try:
        if re.search(r"\.ya?ml$", words, re.IGNORECASE) or Path(words).is_file():
            return _of_file(imported, Path(words), folder)
        return _of_words(imported, name_cluster(words))
    except ConfigError as error:
        error = ConfigError(error.rule, key="--cluster", value=words, nearest=error.nearest)
        raise error from None


def _of_words(imported: Imported, named: NamedCluster) -> dict[str, Any]:
    in_host = named.with_hosts().devices_per_host
    per_host = imported.devices_per_host or in_host
    if per_host > in_host:
        others = [name for name in cluster_names() if name_cluster(name).with_hosts().devices_per_host >= per_host]
        raise ConfigError(
            f"has hosts of {in_host} devices, but today's configuration starts {per_host} processes on each",
            nearest=f"hosts of so many: {', '.join(others)}, or --devices-per-host" if others else None,
        )
    needed = math.prod(imported.degrees.get(name, 1) for name in ("pp", "tp", "dp", "cp", "up"))
    stated = named.devices or (named.hosts * per_host if named.hosts else None)
    wanted = stated or needed
    hosts = imported.hosts
    if hosts is None:
        per_host = min(per_host, wanted)
        hosts = max(1, wanted // per_host)
    if stated and hosts * per_host != stated:
        begun = f"starts {hosts} x {per_host}" if imported.hosts else f"starts {per_host} on each host"
        raise ConfigError(
            f"states {stated} devices, but today's configuration {begun}",
            nearest=f"name the device alone, or a multiple of {per_host} devices and --hosts",
        )
    kept = {key: value for key, value in named.keys.items() if key in ("name", "device")}
    keys = kept | {"hosts": hosts}
    if "hosts_per_domain" in named.keys:
        domain = _segment(imported) or named.keys["hosts_per_domain"]
        return keys | {"devices_per_host": per_host, "hosts_per_domain": domain}
    return keys if per_host == in_host else keys | {"devices_per_host": per_host}


def _segment(imported: Imported) -> int | None:
    """Return the hosts that a script's `sbatch --segment` keeps in one domain; None if it does not say.

    Source: the manual page of sbatch of Slurm 24.05, topology/block.
    """
    slurm = imported.command.slurm if imported.command else None
    found = re.findall(r"(?<= --segment=)[1-9]\d*(?= )", f" {' '.join(slurm.sbatch if slurm else ())} ")
    return int(found[-1]) if found else None


def _of_file(imported: Imported, file: Path, folder: Path) -> dict[str, Any]:
    """Return the file, or its keys with the number of hosts and devices that a script uses of them."""
    mapping = read_mapping(file)
    described = cluster_from_mapping(mapping, file.parent, str(file))
    stated = {"hosts": imported.hosts, "devices_per_host": imported.devices_per_host}
    own = {"hosts": described.num_hosts, "devices_per_host": described.devices_per_host}
    others = {key: number for key, number in stated.items() if number is not None and number != own[key]}
    if not others:
        return {"file": relative_path(file, folder)}
    if "groups" in mapping or "file" in mapping:
        differing = ", ".join(f"{key} = {number} for {own[key]}" for key, number in others.items())
        raise ConfigError(
            f"describes other hosts than today's configuration uses: {differing}",
            nearest="a file with the hosts of this job",
        )
    return _from_folder(mapping, file.parent, folder) | others


def _from_folder(mapping: Mapping[str, Any], at: Path, folder: Path) -> dict[str, Any]:
    """Return the keys of a cluster with the path of their trace relative to another folder."""
    trace = mapping.get("trace")
    return {**mapping, "trace": relative_path(at / trace, folder)} if trace else dict(mapping)


def relative_path(path: Path, folder: Path) -> str:
    """Return a path relative to `folder`, in a form that is not mistaken for a name of the catalog."""
    target, base = path.resolve(), folder.resolve()
    common = next((parent for parent in (base, *base.parents) if target.is_relative_to(parent)), None)
    if common is None or len(common.parts) == 1:
        return str(target)
    up = len(base.parts) - len(common.parts)
    relative = Path(*[".."] * up) / target.relative_to(common)
    return str(relative) if "/" in str(relative) else f"./{relative}"
