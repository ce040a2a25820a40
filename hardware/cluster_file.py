"""Clusters as files and the catalog describe them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from hardware.cluster import Cluster
from hardware.device import (
    CATALOG,
    Device,
    LinkEntry,
    broken_devices,
    check_sources,
    device_names,
    find_device,
    hosts_per_domain,
)
from hardware.host_group import HostGroup
from hardware.io.catalogs import BrokenFile, CatalogFile, added_files, or_in_broken, read_entries
from hardware.io.config_file import DocumentedModel, SourcedCount, StrictModel, read_mapping, validate_mapping
from hardware.io.errors import ConfigError, UnknownNameError, did_you_mean
from hardware.link import Link, is_misspelt_kind, link_spellings, spelling_key

CLUSTERS = CATALOG / "clusters.yaml"
MAX_DEVICES = 1_000_000


LEAST_GB_PER_S = 1e-9
"""Lowest bandwidth of a link: a byte in a second."""


class LinkForm(DocumentedModel):
    """A link."""

    kind: str
    """Kind of link in the catalog, such as `nvlink`, `pcie` or `infiniband`; sets the efficiency of collectives."""

    bandwidth_gb_per_s: float = Field(ge=LEAST_GB_PER_S, le=1e6)
    """Bandwidth per device and direction [GB/s]."""

    latency_us: float = Field(ge=0, le=1e6)
    """Latency of one message [µs]."""

    exclusive_group: str | None = None
    """Name of a set of links that cannot carry one transfer together."""

    mesh_peers: int | None = Field(default=None, ge=1)
    """Number of peers of a full mesh over which the bandwidth is divided by wire.

    Default: none, a switch: any group gets all of it
    """

    efficiency: float | None = Field(default=None, gt=0, le=1.5)
    """Share of the bandwidth that collectives reach.

    Default: the kind's
    """

    sharers: int = Field(default=1, ge=1, le=MAX_DEVICES)
    """Devices of a host that share one adapter, of which `bandwidth_gb_per_s` is the part of each."""

    def link(self) -> Link:
        """Return the link in SI units.

        Raises:
            ConfigError: its kind is spelled almost like one of the catalog.
        """
        if is_misspelt_kind(self.kind):
            nearest = f"{did_you_mean(self.kind, link_spellings())}; a kind of your own needs another name"
            raise ConfigError("is almost a kind of link that is known", key="kind", value=self.kind, nearest=nearest)
        return Link(
            sharers=self.sharers,
            kind=self.kind,
            bandwidth_bytes_per_s=self.bandwidth_gb_per_s * 1e9,
            latency_s=self.latency_us * 1e-6,
            exclusive_group=self.exclusive_group,
            mesh_peers=self.mesh_peers,
            efficiency=self.efficiency,
        )


class _GroupForm(DocumentedModel):
    """Group of equal hosts, one of `cluster.groups:`."""

    name: str | None = None
    """A cluster of the catalog, or else a device of it; beside `device` only a label."""

    device: str | None = None
    """A device of the catalog.

    Default: that of `name`
    """

    hosts: int = Field(default=1, ge=1, le=MAX_DEVICES)
    """Number of hosts."""

    devices_per_host: int | None = Field(default=None, ge=1, le=MAX_DEVICES)
    """Devices of each host that the job may use.

    Default: the catalog's; of a rack that is one NVLink domain, all of the rack, which then counts as a host
    """

    hosts_per_domain: int | None = Field(default=None, ge=1, le=MAX_DEVICES)
    """Neighbouring hosts that `intra_links` join, such as 18 hosts of four devices in an NVL72 rack, or 16 of them.

    Default: the catalog's where `devices_per_host` are those of one host, and otherwise 1
    """

    intra_links: list[LinkForm] | None = Field(default=None, min_length=1)
    """Parallel links of one device to the others of its host or, with `hosts_per_domain`, of its domain.

    Default: the catalog's
    """

    nic_links: list[LinkForm] | None = Field(default=None, min_length=1)
    """Parallel links of one device to other hosts or domains: its own share of the host's network.

    Default: the catalog's
    """


class _SwitchForm(DocumentedModel):
    """`cluster.switch:`."""

    hosts: int = Field(ge=1, le=MAX_DEVICES)
    """Neighbouring hosts under each leaf switch."""

    uplink_gb_per_s: float = Field(ge=LEAST_GB_PER_S, le=1e9)
    """Bandwidth that these hosts share to the other switches, per direction [GB/s]."""


class _OneGroupForm(_GroupForm):
    """A cluster of equal hosts."""

    switch: _SwitchForm | None = None
    """Leaf switches."""

    trace: str | None = None
    """A CSV file that tells how the cluster changes over time; see [traces](../configs/traces/README.md)."""


class _GroupsForm(DocumentedModel):
    """A cluster of unlike groups of hosts."""

    name: str = "mixed"
    """Name of the cluster in reports."""

    groups: list[_GroupForm] = Field(min_length=1)
    """Groups of equal hosts, in the order of the ranks."""

    inter_group_links: list[LinkForm] = Field(default_factory=list)
    """Parallel links of one device to hosts of other groups, on top of the NICs of both.

    Default: none, so that the NICs alone decide
    """

    switch: _SwitchForm | None = None
    """Leaf switches."""

    trace: str | None = None
    """A CSV file that tells how the cluster changes over time; see [traces](../configs/traces/README.md)."""


class _FileForm(DocumentedModel):
    """A cluster that a file describes."""

    file: str
    """A YAML file that holds one of the other forms, relative to this one."""

    trace: str | None = None
    """A CSV file that tells how the cluster changes over time; it wins over a trace that `file` names."""


CLUSTER_FORMS: tuple[type[DocumentedModel], ...] = (_OneGroupForm, _GroupsForm, _FileForm)
"""Forms in which a configuration may describe a cluster."""


class _CatalogEntry(StrictModel):
    device: str
    description: str
    devices_per_host: SourcedCount | None = None
    intra_links: list[LinkEntry] | None = None
    nic_links: list[LinkEntry] | None = None


class _ClusterFile(_CatalogEntry):
    """File of one cluster in a catalog beside Meshtune's own."""

    sources: dict[str, str] = Field(default_factory=dict)


class _Catalog(StrictModel):
    sources: dict[str, str]
    clusters: dict[str, _CatalogEntry]


def cluster_names() -> tuple[str, ...]:
    """Return the catalog's names of clusters."""
    return tuple(_entries())


def broken_clusters() -> tuple[BrokenFile, ...]:
    """Return the files of clusters that cannot work."""
    return _read()[1]


def find_cluster_name(text: str) -> str | None:
    """Return the catalog's name of the cluster that a text names in any spelling; None if it names none.

    Raises:
        ConfigError: the file of this cluster cannot work.
    """
    key = spelling_key(text)
    mistake = next((each.mistake for each in broken_clusters() if spelling_key(each.file.name) == key), None)
    if mistake is not None:
        raise mistake
    return next((name for name in cluster_names() if spelling_key(name) == key), None)


def nearest_cluster_or_device(name: str) -> str:
    """Return the nearest choices for a name that is neither a cluster nor a device."""
    nearest = did_you_mean(name, [*cluster_names(), *device_names()])
    return or_in_broken(nearest, (*broken_clusters(), *broken_devices()))


def shipped_clusters() -> tuple[str, ...]:
    """Return the names of the clusters that Meshtune ships, in the order of its catalog."""
    return tuple(_catalog().clusters)


def find_cluster(name: str, hosts: int = 1) -> Cluster:
    """Return the catalog's cluster of this name with a number of hosts.

    Raises:
        ConfigError: no cluster has this name, or there are no hosts.
    """
    return cluster_from_mapping({"name": name, "hosts": hosts}, Path())


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedCluster:
    """Cluster as a configuration describes it.

    Attributes:
        cluster: Nominal cluster, before any event of its trace.
        trace: Path of the file that tells how it changes over time, for `hardware.trace_file`; None without one.
    """

    cluster: Cluster
    trace: Path | None


def cluster_from_mapping(mapping: Mapping[str, Any], base_dir: Path, file: str | None = None) -> Cluster:
    """Return the nominal cluster of `read_described_cluster`, without its trace."""
    return read_described_cluster(mapping, base_dir, file).cluster


def read_described_cluster(mapping: Mapping[str, Any], base_dir: Path, file: str | None = None) -> DescribedCluster:
    """Read the cluster that a configuration describes.

    It names a cluster of the catalog (`{name: dgx-h100, hosts: 8}`), a device (`{device: H100-SXM-80, hosts: 8}`),
    unlike groups of both (`{groups: [...], inter_group_links: [...]}`), or a file that holds one of these
    (`{file: cluster.yaml}`). `devices_per_host`, `hosts_per_domain`, `intra_links` and `nic_links` replace the
    catalog's values; beside `device`, `name` is only a label. `switch: {hosts: 4, uplink_gb_per_s: 200}` puts four
    neighbouring hosts under each leaf switch, whose uplink they share, in each direction. `trace` names a file; one
    beside `file` wins over one inside that file.

    Args:
        mapping: Keys and values of the configuration.
        base_dir: Folder that a relative `file` or `trace` is relative to.
        file: Name of the file that holds the mapping, for messages.

    Raises:
        ConfigError: a key or value can't work.
    """
    try:
        if "file" in mapping:
            outer = validate_mapping(_FileForm, mapping)
            path = base_dir / outer.file
            inner = read_mapping(path)
            if "file" in inner:
                raise ConfigError("a cluster file can't name another file", key="file", value=inner["file"]).in_file(
                    str(path)
                )
            described = read_described_cluster(inner, path.parent, str(path))
            return replace(described, trace=_resolve_path(base_dir, outer.trace) or described.trace)
        if "groups" in mapping:
            mixed = validate_mapping(_GroupsForm, mapping)
            cluster = _add_switches(_mixed_cluster(mixed), mixed.switch)
            return DescribedCluster(cluster=cluster, trace=_resolve_path(base_dir, mixed.trace))
        form = validate_mapping(_OneGroupForm, mapping)
        group = _host_group(form)
        _check_total((group,), key="hosts")
        cluster = _add_switches(Cluster(name=group.name, groups=(group,)), form.switch)
        return DescribedCluster(cluster=cluster, trace=_resolve_path(base_dir, form.trace))
    except ConfigError as error:
        raise (error.in_file(file) if file else error) from None


def _add_switches(cluster: Cluster, form: _SwitchForm | None) -> Cluster:
    """Put the neighbouring hosts of a cluster under leaf switches."""
    if form is None:
        return cluster
    switches = tuple(host // form.hosts for host in range(cluster.num_hosts))
    return replace(cluster, switches=switches, uplink_bytes_per_s=form.uplink_gb_per_s * 1e9)


def _resolve_path(base_dir: Path, name: str | None) -> Path | None:
    return None if name is None else base_dir / name


def _mixed_cluster(form: _GroupsForm) -> Cluster:
    groups = []
    for index, group in enumerate(form.groups):
        try:
            groups.append(_host_group(group))
        except ConfigError as error:
            raise error.under(f"groups.{index}") from None
    _check_total(tuple(groups), key="groups")
    links = _links(form.inter_group_links, "inter_group_links")
    return Cluster(name=form.name, groups=tuple(groups), inter_group_links=links)


def _links(forms: Sequence[LinkForm] | None, key: str) -> tuple[Link, ...]:
    """Return the links that a key lists."""
    found = []
    for index, form in enumerate(forms or ()):
        try:
            found.append(form.link())
        except ConfigError as error:
            raise error.under(f"{key}.{index}") from None
    return tuple(found)


def _host_group(form: _GroupForm) -> HostGroup:
    if form.device is not None:
        group = _device_group(find_device(form.device), form)
    elif form.name is not None:
        group = _catalog_group(form.name, form)
    else:
        raise ConfigError("needs `name`, `device`, `groups` or `file`", nearest=did_you_mean("", cluster_names()))
    intra_links = _links(form.intra_links, "intra_links") or group.intra_links
    nic_links = _links(form.nic_links, "nic_links") or group.nic_links
    return replace(group, intra_links=intra_links, nic_links=nic_links)


def _places(form: _GroupForm, device: Device, most: int) -> tuple[int, int]:
    """Return the devices of each host, and the hosts of each domain.

    Args:
        form: Group of hosts.
        device: Their device.
        most: Devices of one host or, of a rack that is one domain, of the rack.
    """
    rack_hosts = hosts_per_domain(device)
    of_one = most // rack_hosts
    if form.hosts_per_domain is not None:
        return form.devices_per_host or of_one, form.hosts_per_domain
    # as in studies from before there was the key: more devices than an operating system sees are a part of a rack
    if form.devices_per_host is None or form.devices_per_host > of_one:
        return form.devices_per_host or most, 1
    return form.devices_per_host, rack_hosts


def _device_group(device: Device, form: _GroupForm) -> HostGroup:
    in_host, in_domain = _places(form, device, device.devices_per_host)
    return HostGroup(
        name=(form.device and form.name) or device.name,
        device=device,
        hosts=form.hosts,
        devices_per_host=in_host,
        hosts_per_domain=in_domain,
        intra_links=(device.scale_up,),
        nic_links=(device.scale_out,),
    )


def _catalog_group(name: str, form: _GroupForm) -> HostGroup:
    known = find_cluster_name(name)
    if known is None:
        try:
            device = find_device(name)
        except UnknownNameError:
            nearest = or_in_broken(did_you_mean(name, cluster_names()), (*broken_clusters(), *broken_devices()))
            raise UnknownNameError("is not a known cluster", key="name", value=name, nearest=nearest) from None
        return _device_group(device, form)
    entry = _entries()[known]
    device = find_device(entry.device)
    most = entry.devices_per_host.value if entry.devices_per_host else device.devices_per_host
    in_host, in_domain = _places(form, device, most)
    if in_host > most:
        raise ConfigError(
            f"a {known} host has {most} devices",
            key="devices_per_host",
            value=in_host,
            nearest=f"use at most {most}, or describe the host with `device: {device.name}`",
        )
    if hosts_per_domain(device) > 1 and in_host * in_domain > most:
        raise ConfigError(
            f"of {in_host} devices each are {in_host * in_domain}, and a {known} domain has {most}",
            key="hosts_per_domain",
            value=in_domain,
            nearest=f"use at most {most // in_host}, or describe the domain with `device: {device.name}`",
        )
    return HostGroup(
        name=known,
        device=device,
        hosts=form.hosts,
        devices_per_host=in_host,
        hosts_per_domain=in_domain,
        intra_links=tuple(link.link() for link in entry.intra_links or ()) or (device.scale_up,),
        nic_links=tuple(link.link() for link in entry.nic_links or ()) or (device.scale_out,),
    )


def _check_total(groups: tuple[HostGroup, ...], key: str) -> None:
    total = sum(group.num_devices for group in groups)
    if total > MAX_DEVICES:
        raise ConfigError(f"makes {total} devices; at most {MAX_DEVICES} are supported", key=key)


@functools.cache
def clusters_table() -> dict[str, Any]:
    """Return the content of the table of the clusters that Meshtune ships."""
    return read_mapping(CLUSTERS)


@functools.cache
def _catalog() -> _Catalog:
    return validate_mapping(_Catalog, clusters_table(), file=str(CLUSTERS))


@functools.cache
def _entries() -> dict[str, _CatalogEntry]:
    """Return the clusters of all catalogs by name, Meshtune's own first, without those that the user's stand for."""
    shipped = _catalog().clusters
    added, broken = _read()
    replaced = {spelling_key(name) for name in (*added, *(each.file.name for each in broken))}
    return {**{name: entry for name, entry in shipped.items() if spelling_key(name) not in replaced}, **added}


@functools.cache
def _read() -> tuple[dict[str, _ClusterFile], tuple[BrokenFile, ...]]:
    return read_entries(added_files("clusters", _catalog().clusters, spelling_key), _read_cluster)


def _read_cluster(file: CatalogFile) -> _ClusterFile:
    entry = validate_mapping(_ClusterFile, read_mapping(file.path), file=str(file.path))
    check_sources(entry, entry.sources, file=str(file.path))
    find_device(entry.device)
    return entry
