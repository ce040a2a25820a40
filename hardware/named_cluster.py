"""Clusters that a user names in a few words: by the catalog, by a device, or by a number of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping, find_cluster_name, nearest_cluster_or_device
from hardware.device import find_device, hosts_per_domain
from hardware.io.errors import ConfigError, UnknownNameError

_COUNTED = re.compile(r"\s*(\d{1,7})\s*[x*\u00d7]\s*(\S.*?)\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCluster:
    """Hosts that a few words name.

    Attributes:
        keys: Keys of a study's `cluster:` without `hosts`: `name` or `device`, and the hosts of a domain with their
            devices where those are not one host.
        devices: Number of devices that the words state; None if they state none.
        hosts: Number of hosts that the words state; None if they state none.
    """

    keys: dict[str, Any]
    devices: int | None = None
    hosts: int | None = None

    def with_hosts(self, hosts: int = 1) -> Cluster:
        """Return so many of the hosts."""
        return cluster_from_mapping({**self.keys, "hosts": hosts}, Path())


def name_cluster(text: str) -> NamedCluster:
    """Read the words: `dgx-h100`, `H100`, `64x H100`, which are devices, or `8 x dgx-h100`, which are hosts.

    A host is what an operating system sees: of a GB200 rack, one of 18 with four devices.

    Raises:
        ConfigError: The words name no cluster and no device of the catalog, or none of them.
    """
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        return NamedCluster(keys=_keys_of(text))
    count, name = int(counted[1]), counted[2]
    if count == 0:
        raise ConfigError("names no devices", nearest=f"1x {name}")
    try:
        device = find_device(name)
    except UnknownNameError:
        return NamedCluster(keys=_keys_of(name), hosts=count)
    return NamedCluster(keys=_keys_of(device.name, "device"), devices=count)


def _keys_of(name: str, form: str = "") -> dict[str, Any]:
    """Return the keys of one host of this name, a cluster's rather than a device's if `form` does not say which."""
    form = form or ("name" if find_cluster_name(name) is not None else "device")
    try:
        (group,) = cluster_from_mapping({form: name}, Path()).groups
    except UnknownNameError:
        rule = "is no cluster and no device of the catalog"
        raise ConfigError(rule, nearest=nearest_cluster_or_device(name)) from None
    racks = hosts_per_domain(group.device)
    in_rack = {"devices_per_host": group.devices_per_host // racks, "hosts_per_domain": racks}
    return {form: group.name if form == "name" else group.device.name} | (in_rack if racks > 1 else {})
