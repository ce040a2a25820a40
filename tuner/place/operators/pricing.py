"""Prices of the operators of a placement file: times on every device, memory, splits and fusions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hardware.arrays import FloatArray
from hardware.device import GIB, Device
from hardware.io.errors import ConfigError, did_you_mean
from tuner.place.operators.file_keys import FusionKeys, GraphKeys, OperatorKeys
from tuner.place.operators.operator_times import measured_s, roofline_s
from tuner.planners.scheduling.problem import DeviceLink, Fusion, Split, ways_over

UNKNOWN = -1
"""Number of an operator before all are numbered."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Site:
    """Devices and links on which operators are priced.

    Attributes:
        devices: Every device [D].
        links: Links between them.
        precision: Number format of the arithmetic.
        capacity_bytes: Memory of each device that operators may take [D].
    """

    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...]
    precision: str
    capacity_bytes: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedOperator:
    """One operator with its prices.

    Attributes:
        name: Name of the operator.
        exec_s: Time on each device [D]; inf where it can't run.
        memory_bytes: Memory on its device from beginning to end.
        working_bytes: Memory that it takes only while it runs.
        inputs: Operators whose results it takes, with their sizes [bytes].
        splits: Ways to run it on several devices, whose `op` is not yet known.
        same_device_as: Operator on whose device it runs; None for any.
    """

    name: str
    exec_s: tuple[float, ...]
    memory_bytes: float
    inputs: tuple[tuple[str, float], ...]
    working_bytes: float = 0.0
    splits: tuple[Split, ...] = ()
    same_device_as: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What was captured from a program, and coarsened.

    Attributes:
        graph: Name of the graph.
        factory: Factory of the program.
        captured: Operators of the program.
        operators: Operators to which it was coarsened.
        homes: Sets of these that share a device, because they read or write the same parameters.
        flop: Floating-point operations of a step.
        state_bytes: Memory of parameters, moments and inputs.
        cut_bytes: Data that the coarse operators hand to each other.
        working_bytes: Most memory that a coarse operator takes for what lives inside of it alone.
        unknown: Captured operators without a known rule, with their counts.
    """

    graph: str
    factory: str
    captured: int
    operators: int
    homes: int
    flop: float
    state_bytes: float
    cut_bytes: float
    working_bytes: float
    unknown: tuple[tuple[str, int], ...]


def priced(name: str, own: OperatorKeys, site: Site) -> PricedOperator:
    """Return an operator of a file with its prices.

    Raises:
        ConfigError: A value can't work.
    """
    exec_s = _times_s(own, site)
    splits = tuple(_splits(own, site))
    _check_memory(own, site, exec_s)
    return PricedOperator(
        name=name,
        exec_s=exec_s,
        memory_bytes=own.memory_gib * GIB,
        working_bytes=own.working_gib * GIB,
        inputs=tuple((source, gib * GIB) for source, gib in own.inputs_gib.items()),
        splits=splits,
        same_device_as=own.same_device_as,
    )


def _times_s(own: OperatorKeys, site: Site, parts: int = 1) -> tuple[float, ...]:
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


def _rooflines_s(site: Site, tflop: float, moved_gib: float) -> tuple[float, ...]:
    return tuple(roofline_s(device, site.precision, tflop * 1e12, moved_gib * GIB) for device in site.devices)


def _measured(seconds: Mapping[str, float], site: Site) -> Mapping[str, float]:
    """Return measured times by the catalog's names of the devices."""
    kinds = list(dict.fromkeys(device.name for device in site.devices))
    for kind in seconds:
        if kind not in kinds:
            nearest = did_you_mean(kind, kinds) or f"one of {', '.join(kinds)}"
            raise ConfigError("is no device of the cluster", key="seconds", value=kind, nearest=nearest)
    return seconds


def _splits(own: OperatorKeys, site: Site) -> Iterator[Split]:
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
        yield Split(op=UNKNOWN, parts=split.parts, part_s=_times_s(own, site, split.parts), gather_s=gather_s)


def _exchange_s(site: Site, size_bytes: float) -> tuple[tuple[float, ...], ...]:
    """Return the least time of data between every two devices [D, D]; inf where no link joins them."""
    number = range(len(site.devices))
    least = {
        pair: min(way.transfer_s(size_bytes) for way in ways) if size_bytes else 0.0
        for pair, ways in ways_over(site.links).items()
    }
    return tuple(
        tuple(0.0 if home == other else least.get((home, other), math.inf) for other in number) for home in number
    )


def _check_memory(own: OperatorKeys, site: Site, exec_s: tuple[float, ...]) -> None:
    """Check that an operator, or a part of it, fits on some device."""
    parts = max((split.parts for split in own.splits), default=1)
    key = "memory_gib" if own.memory_gib >= own.working_gib else "working_gib"
    size_bytes = (own.memory_gib + own.working_gib) * GIB / parts
    check_room(size_bytes, site, exec_s, key=key, value=getattr(own, key))


def check_room(
    size_bytes: float,
    site: Site,
    exec_s: tuple[float, ...],
    *,
    key: str,
    value: float | None = None,
    nearest: str | None = None,
) -> None:
    """Check that some device which can run an operator has room for it.

    Raises:
        ConfigError: None has.
    """
    can_run = zip(site.capacity_bytes.tolist(), exec_s, strict=True)
    room_bytes = max(size for size, time_s in can_run if math.isfinite(time_s))
    if size_bytes > room_bytes:
        rule = f"fits on no device: {size_bytes / GIB:.4g} GiB, where at most {room_bytes / GIB:.4g} are free"
        raise ConfigError(rule, key=key, value=value, nearest=nearest)


def priced_fusion(own: FusionKeys, graph: GraphKeys, number: Mapping[str, int], site: Site) -> Fusion:
    """Return a fusion of two operators of a graph, with its prices.

    Args:
        own: Keys of the fusion.
        graph: Graph of both operators.
        number: Number of each operator of the graph in the workload.
        site: Devices and links.

    Raises:
        ConfigError: A value can't work.
    """
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
