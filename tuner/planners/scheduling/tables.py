"""Tables of a workload, in the layout in which the search for a schedule looks them up.

Letters as in `problem`; W ways.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.planners.scheduling.problem import Fusion, Split, Way, Workload, ways_between


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScheduleTables:
    """Tables of a workload.

    Attributes:
        before: Edge and producer of every input of an operator [V].
        after: Edge and consumer of every output of an operator [V].
        ways: Ways from device to device.
        way_holds: Links and ports of every way; ways to one device stand together [W].
        way_source: Device from which each way leads [W].
        way_first: First way to each device that has any.
        way_targets: Devices that have ways to them.
        each_way_s: Time of each edge's data over every way [E, W].
        transfer_s: Least time of each edge's data from device to device; 0 on one device, inf without a link [E, D, D].
        splits: Splits of each operator [V].
        fusions: Fusions in which each operator is the first [V].
        least_exec_s: Time of each operator on each device that no split and no fusion can undercut. The shares of two
            fused operators add up to no more than the fused time [V, D].
        device_weight: Weight of a second of each device when work is spread over all; they add up to 1 [D].
        least_work_s: Least work of each operator, in such weighted seconds of all devices [V].
        least_bytes: Least memory of each operator on its device, beside what stays there of others [V].
        to_end_s: Least time from the end of an operator on a device to the end of all that follows it [V, D].
        device_class: Class of each device; devices of one class may be exchanged for each other [D].
        link_class: Class of each link and port; those of one class may be exchanged for each other [links + ports].
        ops_of: Operators of each model [n].
        mates: Operators that share the home of each operator, itself included [V].
    """

    before: tuple[tuple[tuple[int, int], ...], ...]
    after: tuple[tuple[tuple[int, int], ...], ...]
    ways: dict[tuple[int, int], tuple[Way, ...]]
    way_holds: tuple[tuple[int, ...], ...]
    way_source: IntArray
    way_first: IntArray
    way_targets: IntArray
    each_way_s: FloatArray
    transfer_s: FloatArray
    splits: tuple[tuple[Split, ...], ...]
    fusions: tuple[tuple[Fusion, ...], ...]
    least_exec_s: FloatArray
    device_weight: FloatArray
    least_work_s: FloatArray
    least_bytes: FloatArray
    to_end_s: FloatArray
    device_class: tuple[int, ...]
    link_class: tuple[int, ...]
    ops_of: tuple[tuple[int, ...], ...]
    mates: tuple[tuple[int, ...], ...]


def schedule_tables(workload: Workload) -> ScheduleTables:
    """Compute the tables of a workload."""
    ops = range(workload.num_ops)
    ends = [(edge, int(u), int(v)) for edge, (u, v) in enumerate(workload.edges)]
    before = tuple(tuple((edge, u) for edge, u, v in ends if v == op) for op in ops)
    after = tuple(tuple((edge, v) for edge, u, v in ends if u == op) for op in ops)
    ways = ways_between(workload)
    # Ways to one device stand together, so that the least arrival there is one `reduceat`.
    every_way = sorted(
        ((target, source, way) for (source, target), of_pair in ways.items() for way in of_pair),
        key=lambda entry: (entry[0], entry[1], entry[2].links),
    )
    targets = [target for target, _, _ in every_way]
    transfer_s = _transfer_s(workload, ways)
    least_exec_s = _least_exec_s(workload)
    device_weight = _device_weight(workload)
    return ScheduleTables(
        before=before,
        after=after,
        ways=ways,
        way_holds=tuple(way.holds for _, _, way in every_way),
        way_source=np.array([source for _, source, _ in every_way], dtype=np.int64),
        way_first=np.array([targets.index(target) for target in dict.fromkeys(targets)], dtype=np.int64),
        way_targets=np.array(list(dict.fromkeys(targets)), dtype=np.int64),
        each_way_s=np.array(
            [[way.transfer_s(size) for _, _, way in every_way] for size in workload.data_bytes.tolist()]
        ).reshape(len(workload.data_bytes), len(every_way)),
        transfer_s=transfer_s,
        splits=tuple(tuple(split for split in workload.splits if split.op == op) for op in ops),
        fusions=tuple(tuple(fusion for fusion in workload.fusions if fusion.first == op) for op in ops),
        least_exec_s=least_exec_s,
        device_weight=device_weight,
        least_work_s=_least_work_s(workload, device_weight),
        least_bytes=_least_bytes(workload),
        to_end_s=_to_end_s(workload, after, transfer_s, least_exec_s),
        device_class=_device_classes(workload),
        link_class=_link_classes(workload),
        mates=tuple(next((one for one in workload.mates if op in one), (op,)) for op in ops),
        ops_of=tuple(
            tuple(np.flatnonzero(workload.model_of == model).tolist()) for model in range(len(workload.weights))
        ),
    )


def _transfer_s(workload: Workload, ways: dict[tuple[int, int], tuple[Way, ...]]) -> FloatArray:
    """Compute the least time of each edge's data from device to device [E, D, D]."""
    least = np.full((len(workload.data_bytes), workload.num_devices, workload.num_devices), np.inf)
    least[:, range(workload.num_devices), range(workload.num_devices)] = 0.0
    for edge, size in enumerate(workload.data_bytes.tolist()):
        for (source, target), of_pair in ways.items():
            least[edge, source, target] = min(way.transfer_s(size) for way in of_pair)
    return least


def _least_exec_s(workload: Workload) -> FloatArray:
    """Compute the time of each operator on each device that no split and no fusion can undercut [V, D]."""
    least = workload.exec_s.copy()
    for split in workload.splits:
        for home in range(workload.num_devices):
            # The home and the quickest other devices run the parts.
            others = sorted(time for device, time in enumerate(split.part_s) if device != home)
            longest_s = max(split.part_s[home], others[split.parts - 2])
            # gathering takes at least as long as from the nearest ones
            near = sorted(time for device, time in enumerate(split.gather_s[home]) if device != home)
            least[split.op, home] = min(least[split.op, home], longest_s + near[split.parts - 2])
    for fusion in workload.fusions:
        # The second operator's share is what the first one leaves of the fused time.
        both = np.array(fusion.exec_s)
        least[fusion.first] = np.minimum(least[fusion.first], both)
        least[fusion.second] = np.minimum(
            least[fusion.second], both - np.where(np.isfinite(both), least[fusion.first], 0.0)
        )
    return least


def _device_weight(workload: Workload) -> FloatArray:
    """Compute the speed of each device as a fraction of the speed of all, from its slowness beside the best one.

    All positive weights make a valid bound on the load. These make it exact where a device is slower by the same factor
    with every operator.
    """
    # Operators that a device can't run do not count for its speed.
    slowness = workload.exec_s / workload.exec_s.min(axis=1, keepdims=True)
    speed = 1 / np.ma.masked_invalid(slowness).mean(axis=0).filled(1.0)
    return np.asarray(speed / speed.sum())


def _least_work_s(workload: Workload, device_weight: FloatArray) -> FloatArray:
    """Compute the least work of each operator, in weighted seconds of all devices [V]."""
    least: FloatArray = (workload.exec_s * device_weight).min(axis=1)
    for split in workload.splits:
        # Parts on the devices of least weighted time are a lower bound for every choice of devices.
        parts = sorted((np.array(split.part_s) * device_weight).tolist())
        least[split.op] = min(least[split.op], sum(parts[: split.parts]))
    for fusion in workload.fusions:
        both = (np.array(fusion.exec_s) * device_weight).min()
        least[fusion.first] = min(least[fusion.first], both)
        least[fusion.second] = min(least[fusion.second], both - least[fusion.first])
    return least


def _least_bytes(workload: Workload) -> FloatArray:
    """Compute the least memory of each operator on its device [V].

    Where memory is released, it is that while the operator runs: all its inputs are there as well.
    """
    least = workload.memory_bytes.copy()
    np.add.at(least, workload.edges[:, 0], workload.data_bytes)
    if workload.working_bytes is not None:
        least += workload.working_bytes
        np.add.at(least, workload.edges[:, 1], workload.data_bytes)
    for split in workload.splits:  # other devices than the one that is asked may hold most of it
        least[split.op] = 0.0
    for fusion in workload.fusions:
        least[[fusion.first, fusion.second]] = 0.0
    return least


def _to_end_s(
    workload: Workload, after: tuple[tuple[tuple[int, int], ...], ...], transfer_s: FloatArray, least_exec_s: FloatArray
) -> FloatArray:
    """Compute the least time from the end of an operator to the end of all that follows it [V, D]."""
    to_end_s = np.zeros_like(workload.exec_s)
    for op in reversed(range(workload.num_ops)):
        for edge, to in after[op]:
            # The least over the devices of the successor, for each device of this operator.
            onward_s = (transfer_s[edge] + least_exec_s[to] + to_end_s[to]).min(axis=1)
            to_end_s[op] = np.maximum(to_end_s[op], onward_s)
    return to_end_s


def _device_classes(workload: Workload) -> tuple[int, ...]:
    """Classify devices: two are alike if exchanging them leaves the workload as it is."""
    classes: list[int] = []
    for device in range(workload.num_devices):
        # Being alike is transitive, so that the first twin decides.
        twin = next((other for other in range(device) if _are_twins(workload, other, device)), None)
        classes.append(device if twin is None else classes[twin])
    return tuple(classes)


def _are_twins(workload: Workload, one: int, other: int) -> bool:
    """Return whether exchanging two devices leaves the workload as it is."""
    tables = [workload.exec_s, workload.capacity_bytes[None, :]]
    tables += [np.array([split.part_s]) for split in workload.splits]
    tables += [np.array([fusion.exec_s]) for fusion in workload.fusions]
    if any((table[:, one] != table[:, other]).any() for table in tables):
        return False
    exchange = {one: other, other: one}
    places = [exchange.get(device, device) for device in range(workload.num_devices)]
    for split in workload.splits:
        gather_s = np.array(split.gather_s)
        if (gather_s[np.ix_(places, places)] != gather_s).any():
            return False
    links = [(link.source, link.target, link.ports, _kind(workload, at)) for at, link in enumerate(workload.links)]
    exchanged = [
        (places[source], places[target], tuple((places[device], name) for device, name in ports), kind)
        for source, target, ports, kind in links
    ]
    return sorted(links) == sorted(exchanged)


def _kind(workload: Workload, link: int) -> tuple[float, float, str]:
    """Return the properties that distinguish links of one pair of devices."""
    of = workload.links[link].link
    return of.bandwidth_bytes_per_s, of.latency_s, of.exclusive_group or ""


def _link_classes(workload: Workload) -> tuple[int, ...]:
    """Classify links: two are alike if they join the same devices through the same ports with the same properties."""
    kinds = [(link.source, link.target, link.ports, *_kind(workload, at)) for at, link in enumerate(workload.links)]
    ports = range(len(workload.links), workload.num_held)
    return (*(kinds.index(kind) for kind in kinds), *ports)


def prefixes_kept(chosen: tuple[int, ...], untouched: frozenset[int], device_class: tuple[int, ...]) -> bool:
    """Return whether a choice of devices takes untouched devices of one class in their order.

    All other orders lead to the same schedules and are spared.
    """
    taken = set()
    for device in chosen:
        if device in untouched:
            spared = (
                other
                for other in untouched
                if other < device and device_class[other] == device_class[device] and other not in taken
            )
            if next(spared, None) is not None:
                return False
        taken.add(device)
    return True


def subsets(devices: range, home: int, count: int) -> itertools.combinations[tuple[int, ...]]:
    """Return every choice of `count` further devices beside the home."""
    return itertools.combinations([device for device in devices if device != home], count)
