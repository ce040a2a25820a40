"""A step captured from a JAX function or a torch module as operators: coarsened, with times, memory and data.

- Time: the sum over the operators of a group (`coarsening.py`) of the roofline of `operator_times.py`, in the number
  format of each operator, with the traffic and the launches that remain where XLA fuses them.
- Memory: a group holds its parameters, moments and inputs from beginning to end, and while it runs the most that lives
  inside of it alone. Data between groups are released once they have been read.
- Data: a group hands another the tensors that it reads, each once; on a device that both must share, no states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from costmodels.sharding.frontends.factories import graph_of_factory, graph_of_torch_factory
from costmodels.sharding.fusion import lifetimes, traffic_of
from costmodels.sharding.graph import Graph
from hardware.arrays import FloatArray
from hardware.device import Device
from tuner.place.operators.coarsening import Coarse, coarsen
from tuner.place.operators.file_keys import GraphKeys
from tuner.place.operators.operator_times import roofline_s
from tuner.place.operators.pricing import Captured, PricedOperator, Site, check_room


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
    operators = tuple(_priced(graph, coarse, seconds))
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
    kinds = {device.name: device for device in site.devices}
    of_kind = {name: _seconds_on(graph, device, site.precision) for name, device in kinds.items()}
    return np.stack([of_kind[device.name] for device in site.devices], axis=1)


def _seconds_on(graph: Graph, device: Device, precision: str) -> FloatArray:
    """Return the time of each captured operator on a device [ops] [s]."""
    found = np.zeros(len(graph.ops))
    for number, (op, traffic) in enumerate(zip(graph.ops, traffic_of(graph), strict=True)):
        moved_bytes = sum((*traffic.reads, *traffic.writes))
        if op.is_free or not (op.flop or moved_bytes):
            continue
        launches = traffic.launches if graph.is_fused else 1
        one_s = roofline_s(device, op.precision or precision, op.flop, moved_bytes, launches=launches)
        found[number] = op.times * one_s
    return found


def _priced(graph: Graph, coarse: Coarse, seconds: FloatArray) -> Iterator[PricedOperator]:
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
    for at, ops in enumerate(coarse.groups):
        sources = [result for op in ops if graph.ops[op].begins for result in graph.ops[op].results]
        yield PricedOperator(
            name=names[at],
            exec_s=tuple(seconds[list(ops)].sum(axis=0).tolist()),
            memory_bytes=sum(graph.tensors[tensor].num_bytes for tensor in sources),
            inputs=tuple(inputs[at]),
            working_bytes=working_bytes[at],
            same_device_as=mate_of.get(at),
        )


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
