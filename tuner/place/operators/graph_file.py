"""Read a placement file of operators: check every key, price every operator, and build the scheduling problem."""

from __future__ import annotations

import graphlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hardware.cluster import Cluster, read_described_cluster
from hardware.device import Device
from hardware.io.config_file import validate_mapping
from hardware.io.errors import ConfigError, did_you_mean
from tuner.place.operators.device_links import device_links
from tuner.place.operators.file_keys import MOST_OPERATORS, FusionKeys, GraphKeys, OperatorKeys, OperatorPlacementKeys
from tuner.place.operators.operator_times import measured_s, roofline_s
from tuner.planners.scheduling.problem import DeviceLink, Fusion, Split, Workload, ways_over

MOST_DEVICES = 16
"""Most devices of a cluster; the search tries every operator on each of them."""

MOST_LINKS = 5
"""Most links between two devices; the search tries every set of them."""

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorPlacement:
    """The scheduling problem of a placement file, with the names of what it numbers.

    Attributes:
        name: Name in reports.
        cluster: Cluster that the models share.
        headroom: Share of each device's memory that stays free.
        graphs: Name of each model [n].
        operators: Name of each operator [V].
        host_of: Host of each device [D].
        kind_of: Name of each device in the catalog [D].
        workload: Scheduling problem.
    """

    name: str
    cluster: Cluster
    headroom: float
    graphs: tuple[str, ...]
    operators: tuple[str, ...]
    host_of: tuple[int, ...]
    kind_of: tuple[str, ...]
    workload: Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Site:
    """Devices and links on which operators are priced.

    Attributes:
        devices: Every device [D].
        links: Links between them.
        precision: Number format of the arithmetic.
    """

    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...]
    precision: str


def read_operator_placement(mapping: Mapping[str, Any], path: Path) -> OperatorPlacement:
    """Read the scheduling problem that the mapping of a placement file describes.

    Raises:
        ConfigError: A key or value can't work; it names the file.
    """
    file = str(path)
    keys = validate_mapping(OperatorPlacementKeys, mapping, file=file)
    try:
        try:
            cluster = read_described_cluster(keys.cluster, path.parent).cluster
        except ConfigError as error:
            raise (error if error.file else error.under("cluster")) from None
        return _placement(keys, cluster)
    except ConfigError as error:
        raise error.in_file(file) from None


def _placement(keys: OperatorPlacementKeys, cluster: Cluster) -> OperatorPlacement:
    _check_sizes(keys, cluster)
    site = _Site(
        devices=tuple(cluster.devices[at] for at in cluster.rank_device_index().tolist()),
        links=device_links(cluster, _stated_links(keys, cluster.num_devices)),
        precision=keys.precision,
    )
    _check_links(site.links)
    names: list[tuple[str, str]] = []
    for graph, own in keys.graphs.items():
        names += [(graph, name) for name in _in_order(graph, own)]
    number = {name: at for at, name in enumerate(names)}
    operators = [keys.graphs[graph].operators[name] for graph, name in names]
    edges = [
        (number[graph, source], number[graph, name], gib * GIB)
        for (graph, name), operator in zip(names, operators, strict=True)
        for source, gib in operator.inputs_gib.items()
    ]
    capacity_bytes = np.array([device.memory_bytes * (1 - keys.memory_headroom) for device in site.devices])
    exec_s, splits, fusions = [], list[Split](), list[Fusion]()
    for at, ((graph, name), operator) in enumerate(zip(names, operators, strict=True)):
        try:
            exec_s.append(_times_s(operator, site))
            splits += _splits(at, operator, site)
            _check_memory(operator, capacity_bytes, exec_s[-1])
        except ConfigError as error:
            raise error.under(f"graphs.{graph}.operators.{name}") from None
    for graph, own in keys.graphs.items():
        for at, fusion in enumerate(own.fusions):
            try:
                fusions.append(_fusion(fusion, own, {name: number[graph, name] for name in own.operators}, site))
            except ConfigError as error:
                raise error.under(f"graphs.{graph}.fusions.{at}") from None
    order = {name: at for at, name in enumerate(keys.graphs)}
    workload = Workload(
        model_of=np.array([order[graph] for graph, _ in names], dtype=np.int64),
        weights=np.array([own.weight for own in keys.graphs.values()]),
        exec_s=np.array(exec_s),
        memory_bytes=np.array([operator.memory_gib * GIB for operator in operators]),
        edges=np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2),
        data_bytes=np.array([size for _, _, size in edges]),
        capacity_bytes=capacity_bytes,
        links=site.links,
        splits=tuple(splits),
        fusions=tuple(fusions),
    )
    return OperatorPlacement(
        name=keys.name,
        cluster=cluster,
        headroom=keys.memory_headroom,
        graphs=tuple(keys.graphs),
        operators=tuple(name for _, name in names),
        host_of=tuple(cluster.rank_host().tolist()),
        kind_of=tuple(device.name for device in site.devices),
        workload=workload,
    )


def _check_sizes(keys: OperatorPlacementKeys, cluster: Cluster) -> None:
    """Check that the problem is not too large, and that nothing of the cluster is ignored."""
    if cluster.num_devices > MOST_DEVICES:
        rule = f"has {cluster.num_devices:,} devices; operators can be placed on at most {MOST_DEVICES}"
        raise ConfigError(rule, key="cluster", nearest="devices_per_host takes some of each host")
    if cluster.switches:
        raise ConfigError("operators are not placed under leaf switches", key="cluster.switch", nearest="leave it out")
    count = sum(len(own.operators) for own in keys.graphs.values())
    if count > MOST_OPERATORS:
        rule = f"have {count} operators together; at most {MOST_OPERATORS} can be placed"
        raise ConfigError(rule, key="graphs", nearest="take several operators as one")


def _check_links(links: tuple[DeviceLink, ...]) -> None:
    """Check that no two devices have more links than the search can combine."""
    pair, count = Counter((link.source, link.target) for link in links).most_common(1)[0] if links else ((0, 0), 0)
    if count > MOST_LINKS:
        rule = f"devices {pair[0]} and {pair[1]} have {count} links; at most {MOST_LINKS} can be told apart"
        raise ConfigError(rule, key="links", nearest="add up the bandwidths of those that always work together")


def _stated_links(keys: OperatorPlacementKeys, num_devices: int) -> list[tuple[tuple[int, int], Any]]:
    """Return the file's links between single devices."""
    found = []
    for at, own in enumerate(keys.links):
        first, second = own.devices
        for device in (first, second):
            if device >= num_devices:
                rule = "is no device of the cluster"
                nearest = f"0 to {num_devices - 1}"
                raise ConfigError(rule, key=f"links.{at}.devices", value=device, nearest=nearest)
        if first == second:
            raise ConfigError("a link joins two devices", key=f"links.{at}.devices", value=own.devices)
        found.append(((first, second), own.link()))
    return found


def _in_order(graph: str, own: GraphKeys) -> tuple[str, ...]:
    """Return the names of a graph's operators, each after those whose results it takes."""
    names = list(own.operators)
    for name, operator in own.operators.items():
        for source in operator.inputs_gib:
            if source not in own.operators:
                key = f"graphs.{graph}.operators.{name}.inputs_gib"
                raise ConfigError("is no operator", key=key, value=source, nearest=did_you_mean(source, names))
    try:
        waits = {name: tuple(own.operators[name].inputs_gib) for name in names}
        return tuple(graphlib.TopologicalSorter(waits).static_order())
    except graphlib.CycleError as error:
        round_ = " -> ".join(error.args[1])
        raise ConfigError(f"operators wait for each other: {round_}", key=f"graphs.{graph}.operators") from None


def _times_s(own: OperatorKeys, site: _Site, parts: int = 1) -> tuple[float, ...]:
    """Return the time of an operator, or of one of equal parts, on every device [D]."""
    if own.seconds is not None:
        for key in ("tflop", "moved_gib"):
            if getattr(own, key) is not None:
                rule = "is not used where `seconds` are measured"
                raise ConfigError(rule, key=key, value=getattr(own, key), nearest="leave out one of the two")
        return measured_s(site.devices, _measured(own.seconds, site), parts)
    if not own.tflop and not own.moved_gib:
        nearest = "give `tflop`, `moved_gib` or `seconds`"
        raise ConfigError("takes no time: it neither computes nor moves data", nearest=nearest)
    return _rooflines_s(site, (own.tflop or 0.0) / parts, (own.moved_gib or 0.0) / parts)


def _rooflines_s(site: _Site, tflop: float, moved_gib: float) -> tuple[float, ...]:
    return tuple(roofline_s(device, site.precision, tflop * 1e12, moved_gib * GIB) for device in site.devices)


def _measured(seconds: Mapping[str, float], site: _Site) -> Mapping[str, float]:
    """Return measured times by the catalog's names of the devices."""
    kinds = list(dict.fromkeys(device.name for device in site.devices))
    for kind in seconds:
        if kind not in kinds:
            nearest = did_you_mean(kind, kinds) or f"one of {', '.join(kinds)}"
            raise ConfigError("is no device of the cluster", key="seconds", value=kind, nearest=nearest)
    return seconds


def _splits(op: int, own: OperatorKeys, site: _Site) -> Iterator[Split]:
    """Yield the splits of an operator."""
    seen = set()
    for at, split in enumerate(own.splits):
        key = f"splits.{at}.parts"
        if split.parts > len(site.devices):
            nearest = f"at most {len(site.devices)}" if len(site.devices) > 1 else "a cluster of several devices"
            raise ConfigError("are more than there are devices", key=key, value=split.parts, nearest=nearest)
        if split.parts in seen:
            raise ConfigError("is a second split into as many parts", key=key, value=split.parts)
        seen.add(split.parts)
        gather_s = _exchange_s(site, split.gather_gib * GIB)
        yield Split(op=op, parts=split.parts, part_s=_times_s(own, site, split.parts), gather_s=gather_s)


def _exchange_s(site: _Site, size_bytes: float) -> tuple[tuple[float, ...], ...]:
    """Return the least time of data between every two devices [D, D]; inf where no link joins them."""
    number = range(len(site.devices))
    least = {
        pair: min(way.transfer_s(size_bytes) for way in ways) if size_bytes else 0.0
        for pair, ways in ways_over(site.links).items()
    }
    return tuple(
        tuple(0.0 if home == other else least.get((home, other), math.inf) for other in number) for home in number
    )


def _check_memory(own: OperatorKeys, capacity_bytes: np.ndarray, exec_s: tuple[float, ...]) -> None:
    """Check that an operator alone fits on some device that can run it, unless it may be split."""
    room_bytes = max(float(size) for size, time_s in zip(capacity_bytes, exec_s, strict=True) if math.isfinite(time_s))
    parts = max((split.parts for split in own.splits), default=1)
    if own.memory_gib * GIB / parts > room_bytes:
        nearest = f"at most {room_bytes / GIB:.4g} are free on a device"
        raise ConfigError("fits on no device", key="memory_gib", value=own.memory_gib, nearest=nearest)


def _fusion(own: FusionKeys, graph: GraphKeys, number: Mapping[str, int], site: _Site) -> Fusion:
    """Return a fusion of two operators of a graph."""
    for key in ("first", "second"):
        name = getattr(own, key)
        if name not in graph.operators:
            raise ConfigError("is no operator", key=key, value=name, nearest=did_you_mean(name, list(graph.operators)))
    first, second = graph.operators[own.first], graph.operators[own.second]
    if own.first not in second.inputs_gib:
        raise ConfigError(f"does not take the results of {own.first}", key="second", value=own.second)
    around = _path_around(graph, own.first, own.second)
    if around is not None:
        rule = f"also waits for {own.first} by way of {around}, which could then never run"
        raise ConfigError(rule, key="second", value=own.second)
    if own.seconds is not None:
        if own.moved_gib is not None:
            rule = "is not used where `seconds` are measured"
            raise ConfigError(rule, key="moved_gib", value=own.moved_gib, nearest="leave out one of the two")
        both_s = measured_s(site.devices, _measured(own.seconds, site))
    elif first.seconds is not None or second.seconds is not None:
        raise ConfigError("is required, because one of the two operators has measured seconds", key="seconds")
    else:
        kept = 2 * second.inputs_gib[own.first]
        moved_gib = max(0.0, (first.moved_gib or 0.0) + (second.moved_gib or 0.0) - kept)
        tflop = (first.tflop or 0.0) + (second.tflop or 0.0)
        both_s = _rooflines_s(site, tflop, moved_gib if own.moved_gib is None else own.moved_gib)
    memory_gib = first.memory_gib + second.memory_gib if own.memory_gib is None else own.memory_gib
    return Fusion(first=number[own.first], second=number[own.second], exec_s=both_s, memory_bytes=memory_gib * GIB)


def _path_around(graph: GraphKeys, first: str, second: str) -> str | None:
    """Return an operator between two that take results directly, if a longer path leads through it; else None."""
    after: set[str] = {first}
    for name, operator in itertools.chain.from_iterable([graph.operators.items()] * len(graph.operators)):
        if name != second and after & set(operator.inputs_gib):
            after.add(name)
    return next((source for source in graph.operators[second].inputs_gib if source in after - {first}), None)
