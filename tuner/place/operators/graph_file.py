"""Read a placement file of operators: check every key, price every operator, and build the scheduling problem."""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hardware.cluster import Cluster
from hardware.cluster_file import read_described_cluster
from hardware.io.config_file import validate_mapping
from hardware.io.errors import ConfigError, did_you_mean
from hardware.link import Link
from tuner.place.operators.catalog_graph import operators_of_model
from tuner.place.operators.device_links import device_links
from tuner.place.operators.file_keys import MOST_CAPTURED, MOST_OPERATORS, GraphKeys, OperatorPlacementKeys
from tuner.place.operators.pricing import Captured, PricedOperator, Site, priced, priced_fusion
from tuner.planners.scheduling.problem import DeviceLink, Fusion, Workload

if TYPE_CHECKING:  # this loads all rules of sharding
    from tuner.place.operators.program_graph import CoarseProgram

MOST_DEVICES = 16
"""Most devices of a cluster; the search tries every operator on each of them."""

PROGRAMS = ("jax", "torch")
"""Keys of a graph that name the factory of a program."""

MOST_LINKS = 5
"""Most links between two devices; the search tries every set of them."""


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
        captured: What was captured from programs, and coarsened.
    """

    name: str
    cluster: Cluster
    headroom: float
    graphs: tuple[str, ...]
    operators: tuple[str, ...]
    host_of: tuple[int, ...]
    kind_of: tuple[str, ...]
    workload: Workload
    captured: tuple[Captured, ...] = ()


def read_operator_placement(mapping: Mapping[str, Any], path: Path | None) -> OperatorPlacement:
    """Read the scheduling problem that the mapping of a placement file describes.

    Args:
        mapping: Contents of the file.
        path: Path of the file; None for a mapping that stands in none, whose paths begin in the working directory.

    Raises:
        ConfigError: A key or value can't work; it names the file.
    """
    file, base_dir = (None, Path()) if path is None else (str(path), path.parent)
    keys = validate_mapping(OperatorPlacementKeys, mapping, file=file)
    try:
        try:
            cluster = read_described_cluster(keys.cluster, base_dir).cluster
        except ConfigError as error:
            raise (error if error.file else error.under("cluster")) from None
        return _placement(keys, cluster, base_dir)
    except ConfigError as error:
        raise (error if file is None else error.in_file(file)) from None


def _placement(keys: OperatorPlacementKeys, cluster: Cluster, base_dir: Path) -> OperatorPlacement:
    _check_cluster(cluster)
    devices = tuple(cluster.devices[at] for at in cluster.rank_device_index().tolist())
    site = Site(
        devices=devices,
        links=device_links(cluster, _stated_links(keys, cluster.num_devices)),
        precision=keys.precision,
        capacity_bytes=np.array([device.memory_bytes * (1 - keys.memory_headroom) for device in devices]),
    )
    _check_links(site.links)
    graphs, captured = {}, []
    for name, own in keys.graphs.items():
        if _source(name, own) in PROGRAMS:
            program = _captured(name, own, site)
            captured.append(program.captured)
            graphs[name] = program.operators
        else:
            graphs[name] = _operators(name, own, site, base_dir)
    operators = [(graph, one) for graph, members in graphs.items() for one in members]
    most = MOST_CAPTURED if captured else MOST_OPERATORS
    if len(operators) > most:
        rule = f"have {len(operators)} operators together; at most {most} can be placed"
        raise ConfigError(rule, key="graphs", nearest="take several operators as one")
    number = {(graph, one.name): at for at, (graph, one) in enumerate(operators)}
    edges = [
        (number[graph, source], number[graph, one.name], size)
        for graph, one in operators
        for source, size in one.inputs
    ]
    order = {name: at for at, name in enumerate(graphs)}
    working_bytes = np.array([one.working_bytes for _, one in operators])
    workload = Workload(
        model_of=np.array([order[graph] for graph, _ in operators], dtype=np.int64),
        weights=np.array([own.weight for own in keys.graphs.values()]),
        exec_s=np.array([one.exec_s for _, one in operators]),
        memory_bytes=np.array([one.memory_bytes for _, one in operators])
        + (0.0 if keys.release_memory else working_bytes),
        working_bytes=working_bytes if keys.release_memory else None,
        edges=np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2),
        data_bytes=np.array([size for _, _, size in edges]),
        capacity_bytes=site.capacity_bytes,
        links=site.links,
        splits=tuple(replace(split, op=at) for at, (_, one) in enumerate(operators) for split in one.splits),
        fusions=tuple(_fusions(keys, number, site)),
        mates=_mates(operators, number),
    )
    return OperatorPlacement(
        name=keys.name,
        cluster=cluster,
        headroom=keys.memory_headroom,
        graphs=tuple(graphs),
        operators=tuple(one.name for _, one in operators),
        host_of=tuple(cluster.rank_host().tolist()),
        kind_of=tuple(device.name for device in site.devices),
        workload=workload,
        captured=tuple(captured),
    )


def _source(graph: str, own: GraphKeys) -> str:
    """Return the one key that says what the operators of a graph are."""
    given = [key for key in ("operators", "model", *PROGRAMS) if getattr(own, key)]
    if not given:
        raise ConfigError("has none of `operators`, `model`, `jax` and `torch`", key=f"graphs.{graph}")
    if own.fusions and given == ["operators"]:
        return given[0]
    first, *others = [*given, *(["fusions"] if own.fusions else [])]
    if others:
        key, has = (others[0], first) if first != "operators" else (first, others[0])
        rule = f"cannot be combined with `{has}`, which has operators of its own"
        raise ConfigError(rule, key=f"graphs.{graph}.{key}", nearest="leave out one of the two")
    return first


def _captured(graph: str, own: GraphKeys, site: Site) -> CoarseProgram:
    """Return the operators of a program that a factory makes."""
    from tuner.place.operators.program_graph import operators_of_program  # noqa: PLC0415 # loads all rules of sharding

    try:
        return operators_of_program(graph, own, site)
    except ConfigError as error:
        raise (error if error.file else error.under(f"graphs.{graph}")) from None


def _operators(graph: str, own: GraphKeys, site: Site, base_dir: Path) -> tuple[PricedOperator, ...]:
    """Return the operators of a graph with their prices, each after those whose results it takes."""
    if own.model is not None:
        try:
            return operators_of_model(own.model, site, base_dir)
        except ConfigError as error:
            raise (error if error.file else error.under(f"graphs.{graph}.model")) from None
    found = []
    for name in _in_order(graph, own):
        try:
            found.append(priced(name, own.operators[name], site))
        except ConfigError as error:
            raise error.under(f"graphs.{graph}.operators.{name}") from None
    return tuple(found)


def _mates(
    operators: list[tuple[str, PricedOperator]], number: Mapping[tuple[str, str], int]
) -> tuple[tuple[int, ...], ...]:
    """Return the sets of operators that share a device, joined over all that name each other."""
    set_of = {at: {at} for at in range(len(operators))}
    for at, (graph, one) in enumerate(operators):
        if one.same_device_as is not None:
            joined = set_of[at] | set_of[number[graph, one.same_device_as]]
            set_of |= dict.fromkeys(joined, joined)
    return tuple(sorted({tuple(sorted(one)) for one in set_of.values() if len(one) > 1}))


def _fusions(keys: OperatorPlacementKeys, number: Mapping[tuple[str, str], int], site: Site) -> Iterator[Fusion]:
    """Yield the fusions of all graphs."""
    for graph, own in keys.graphs.items():
        for at, fusion in enumerate(own.fusions):
            try:
                yield priced_fusion(fusion, own, {name: number[graph, name] for name in own.operators}, site)
            except ConfigError as error:
                raise error.under(f"graphs.{graph}.fusions.{at}") from None


def _check_cluster(cluster: Cluster) -> None:
    """Check that the problem is not too large, and that nothing of the cluster is ignored."""
    if cluster.num_devices > MOST_DEVICES:
        rule = f"has {cluster.num_devices:,} devices; operators can be placed on at most {MOST_DEVICES}"
        raise ConfigError(rule, key="cluster", nearest="devices_per_host takes some of each host")
    if cluster.switches:
        raise ConfigError("operators are not placed under leaf switches", key="cluster.switch", nearest="leave it out")


def _check_links(links: tuple[DeviceLink, ...]) -> None:
    """Check that no two devices have more links than the search can combine."""
    pair, count = Counter((link.source, link.target) for link in links).most_common(1)[0] if links else ((0, 0), 0)
    if count > MOST_LINKS:
        rule = f"devices {pair[0]} and {pair[1]} have {count} links; at most {MOST_LINKS} can be told apart"
        raise ConfigError(rule, key="links", nearest="add up the bandwidths of those that always work together")


def _stated_links(keys: OperatorPlacementKeys, num_devices: int) -> list[tuple[tuple[int, int], Link, str | None]]:
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
        try:
            found.append(((first, second), own.link(), own.port))
        except ConfigError as error:
            raise error.under(f"links.{at}") from None
    return found


def _in_order(graph: str, own: GraphKeys) -> tuple[str, ...]:
    """Return the names of a graph's operators, each after those whose results it takes."""
    names = list(own.operators)
    for name, operator in own.operators.items():
        for source in operator.inputs_gib:
            if source not in own.operators:
                key = f"graphs.{graph}.operators.{name}.inputs_gib"
                raise ConfigError("is no operator", key=key, value=source, nearest=did_you_mean(source, names))
        mate = operator.same_device_as
        if mate is not None and (mate == name or mate not in own.operators):
            nearest = did_you_mean(mate, [other for other in names if other != name])
            key = f"graphs.{graph}.operators.{name}.same_device_as"
            raise ConfigError("is no other operator", key=key, value=mate, nearest=nearest)
    try:
        waits = {name: tuple(own.operators[name].inputs_gib) for name in names}
        return tuple(graphlib.TopologicalSorter(waits).static_order())
    except graphlib.CycleError as error:
        round_ = " -> ".join(error.args[1])
        raise ConfigError(f"operators wait for each other: {round_}", key=f"graphs.{graph}.operators") from None
