"""A step captured from a JAX function or a torch module as operators: coarsened, with times, memory and data.

- Time: the sum over the operators of a group (`coarsening.py`) of the roofline of `operator_times.py`, in the number
  format of each operator, with the traffic and the launches that remain where XLA fuses them.
- Memory: a group holds its parameters, moments and inputs from beginning to end, and while it runs the most that lives
  inside of it alone. Data between groups are released once they have been read.
- Splits: `program_splits.py`.
- Data: a group hands another the tensors that it reads, each once; on a device that both must share, no states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from costmodels.sharding.frontends.factories import graph_of_factory, graph_of_torch_factory
from costmodels.sharding.fusion import lifetimes, traffic_of
from costmodels.sharding.graph import Graph
from hardware.arrays import FloatArray
from tuner.place.operators.coarsening import Coarse, coarsen, copied_tensors
from tuner.place.operators.file_keys import GraphKeys
from tuner.place.operators.operator_times import roofline_s
from tuner.place.operators.pricing import UNKNOWN, Captured, PricedOperator, Site, check_room
from tuner.place.operators.program_splits import Sharing, sharings
from tuner.planners.scheduling.problem import Split, ways_over

LEAST_SHARE = 0.3
"""Least time of an operator that may be split, as a share of an equal part of all time (assumed)."""

LEAST_GAIN = 0.1
"""Least share of an operator's time that a split into more parts must save (assumed)."""

MOST_CHOICES = 40
"""Most choices of the devices beside the home for a split that is tried: each is one of the search in every step."""


class CoarseProgram(NamedTuple):
    """Operators of a captured step, each after those whose results it takes, and what was captured."""

    operators: tuple[PricedOperator, ...]
    captured: Captured


def operators_of_program(name: str, own: GraphKeys, site: Site) -> CoarseProgram:
    """Return the operators of the step that a graph's factory makes; its module is imported, which runs its code.

    Raises:
        ConfigError: The factory or its program can't work, or needs more memory than any device has.
    """
    if own.jax is not None:
        factory, graph = own.jax, graph_of_factory(own.jax, option="jax")
    else:
        assert own.torch is not None, "one of the two is given"
        factory, graph = own.torch, graph_of_torch_factory(own.torch, option="torch")
    return operators_of_graph(name, factory, graph, own.most_operators, site)


def operators_of_graph(name: str, factory: str, graph: Graph, most: int, site: Site) -> CoarseProgram:
    """Return the operators of a captured step.

    Args:
        name: Name of the graph in the file.
        factory: Factory that made it.
        graph: Captured step.
        most: Largest number of operators.
        site: Devices and links.

    Raises:
        ConfigError: An operator fits on no device.
    """
    seconds = seconds_of(graph, site)
    coarse = coarsen(graph, seconds.mean(axis=1).tolist(), most)
    operators = tuple(_priced(graph, coarse, seconds, site))
    for one in operators:
        nearest = "more operators, or a smaller program"
        check_room(
            one.memory_bytes + one.working_bytes, site, one.exec_s, key="most_operators", value=most, nearest=nearest
        )
    captured = Captured(
        graph=name,
        factory=factory,
        captured=len(graph.ops),
        operators=len(operators),
        homes=len(coarse.homes),
        flop=sum(op.flop * op.times for op in graph.ops),
        state_bytes=sum(one.memory_bytes for one in operators),
        cut_bytes=sum(size for one in operators for _, size in one.inputs),
        working_bytes=max((one.working_bytes for one in operators), default=0.0),
        unknown=graph.unknown,
    )
    return CoarseProgram(operators, captured)


def seconds_of(graph: Graph, site: Site) -> FloatArray:
    """Return the time of each captured operator on every device [ops, D] [s]."""
    return np.stack([_seconds(graph, number, site) for number in range(len(graph.ops))])


def _seconds(graph: Graph, number: int, site: Site, factor: int | None = None, parts: int = 1) -> FloatArray:
    """Return the time of a captured operator on every device [D] [s].

    Args:
        graph: Captured step.
        number: Number of the operator.
        site: Devices and links.
        factor: Factor of its rule of which it runs over one part; None to run over all.
        parts: Number of equal parts.
    """
    op, traffic = graph.ops[number], traffic_of(graph)[number]
    sizes = (*traffic.reads, *traffic.writes)
    if op.is_free or not (op.flop or sum(sizes)):
        return np.zeros(len(site.devices))
    if factor is not None:
        dims = (*op.rule.operand_dims, *op.rule.result_dims)
        sizes = tuple(size if dim[factor] is None else size / parts for size, dim in zip(sizes, dims, strict=True))
    flop = op.flop if factor is None else op.flop / parts
    launches = traffic.launches if graph.is_fused else 1
    one_s = {
        device: roofline_s(device, op.precision or site.precision, flop, sum(sizes), launches=launches)
        for device in set(site.devices)
    }
    return op.times * np.array([one_s[device] for device in site.devices])


def _priced(graph: Graph, coarse: Coarse, seconds: FloatArray, site: Site) -> Iterator[PricedOperator]:
    """Yield the operators of a coarsened graph."""
    names = [_name(graph, ops, seconds) for ops in coarse.groups]
    inputs: list[list[tuple[str, float]]] = [[] for _ in names]
    home_of = {group: at for at, home in enumerate(coarse.homes) for group in home}
    for (source, target), tensors in coarse.cuts.items():
        is_one_home = source in home_of and home_of[source] == home_of.get(target)
        # what a group holds on the device of both is counted with the group
        handed = [one for one in tensors if not (is_one_home and graph.ops[graph.maker[one][0]].begins)]
        inputs[target].append((names[source], sum(graph.tensors[tensor].num_bytes for tensor in handed)))
    mate_of = {group: names[home[0]] for home in coarse.homes for group in home[1:]}
    working_bytes = working_bytes_of(graph, coarse)
    equal_s = float(seconds.sum(axis=0).mean()) / len(coarse.groups)
    for at, ops in enumerate(coarse.groups):
        sources = [result for op in ops if graph.ops[op].begins for result in graph.ops[op].results]
        yield PricedOperator(
            name=names[at],
            exec_s=tuple(seconds[list(ops)].sum(axis=0).tolist()),
            memory_bytes=sum(graph.tensors[tensor].num_bytes for tensor in sources),
            inputs=tuple(inputs[at]),
            working_bytes=working_bytes[at],
            splits=tuple(_splits(graph, ops, seconds, site, equal_s=equal_s)),
            same_device_as=mate_of.get(at),
        )


def _splits(graph: Graph, ops: Sequence[int], seconds: FloatArray, site: Site, *, equal_s: float) -> Iterator[Split]:
    """Yield the splits of a group that are worth it, each by so much faster than any into fewer parts.

    Args:
        graph: Captured step.
        ops: Operators of the group.
        seconds: Time of each captured operator on every device [ops, D] [s].
        site: Devices and links.
        equal_s: Equal part of all time for each group [s].
    """
    best_s = float(seconds[list(ops)].sum(axis=0).mean())
    if best_s < LEAST_SHARE * equal_s:
        return
    copied, num_devices, parts = copied_tensors(graph), len(site.devices), 2
    while parts <= num_devices:
        if math.comb(num_devices - 1, parts - 1) <= MOST_CHOICES:
            tried = (_split(graph, ops, seconds, site, one, parts) for one in sharings(graph, ops, parts, copied))
            own_s, split = min(tried, key=lambda pair: pair[0], default=(math.inf, None))
            if split is not None and own_s <= (1 - LEAST_GAIN) * best_s:
                best_s = own_s
                yield split
        parts *= 2


def _split(
    graph: Graph, ops: Sequence[int], seconds: FloatArray, site: Site, sharing: Sharing, parts: int
) -> tuple[float, Split]:
    """Return the mean time of a group that is shared over the devices [s], and the split."""
    part_s = sum(
        (_seconds(graph, op, site, sharing.colour[op], parts) if op in sharing.colour else seconds[op] for op in ops),
        np.zeros(len(site.devices)),
    )
    gather_s = np.full((len(site.devices),) * 2, np.inf)
    np.fill_diagonal(gather_s, 0.0)
    for pair, ways in ways_over(site.links).items():
        gather_s[pair] = min(
            sharing.meetings * way.latency_s + sharing.exchanged_bytes / way.bandwidth_bytes_per_s for way in ways
        )
    split = Split(
        op=UNKNOWN,
        parts=parts,
        part_s=tuple(part_s.tolist()),
        gather_s=tuple(map(tuple, gather_s.tolist())),
        received_bytes=sharing.received_bytes,
    )
    nearest_s = np.where(np.eye(len(site.devices), dtype=np.bool_), np.inf, gather_s).min(axis=1)
    return float((part_s + nearest_s).mean()), split


def _name(graph: Graph, ops: Sequence[int], seconds: FloatArray) -> str:
    """Return the name of a group: that of the operator that takes most of its time, and the number of the others."""
    longest = max(ops, key=lambda op: (float(seconds[op].sum()), -op))
    others = f" +{len(ops) - 1}" if len(ops) > 1 else ""
    return f"{graph.ops[longest].name}{others}"


def working_bytes_of(graph: Graph, coarse: Coarse) -> list[float]:
    """Return the most memory that each group takes for tensors which live inside of it alone [G] [bytes]."""
    group_of = {op: at for at, ops in enumerate(coarse.groups) for op in ops}
    change: list[dict[int, float]] = [{} for _ in coarse.groups]
    cut = {tensor for tensors in coarse.cuts.values() for tensor in tensors}
    for tensor, lifetime in enumerate(lifetimes(graph)):
        maker, _ = graph.maker[tensor]
        if lifetime is None or tensor in cut or maker not in group_of or graph.ops[maker].begins:
            continue
        own, size = change[group_of[maker]], graph.tensors[tensor].num_bytes
        own[lifetime.first] = own.get(lifetime.first, 0.0) + size
        own[lifetime.last + 1] = own.get(lifetime.last + 1, 0.0) - size
    return [max(np.cumsum([one[at] for at in sorted(one)]).tolist(), default=0.0) for one in change]
