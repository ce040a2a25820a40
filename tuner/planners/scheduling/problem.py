"""Scheduling problem: the device of each operator of several models, and the links that carry the data between them.

Source: "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", sections 2.3, 3.1 and
3.2. Points that the paper leaves open are settled as follows:

- A device runs one operator at a time, and a link carries one transfer at a time, at its full rate. The rates on a link
  then never exceed its bandwidth (equation 7).
- Links may have ports, such as the adapter through which a device sends to all other hosts. All links with one port
  together carry one transfer at a time.
- Data of an edge take memory on the device of the producer, and on that of the consumer if it is another one, from
  beginning to end (equation 6 has no notion of time), or else only while they are needed (`memory`).
- A transfer uses links that join its two devices. Of one exclusive group it uses one link. It may be split over links
  that do not exclude each other, and then holds all of them until its end (assumed): their bandwidths add up, and the
  largest latency counts.
- An operator may be split: equal parts start together on different devices. The first device is its home, takes its
  inputs, and gathers the results. An operator may also be fused with a successor: both are then one operator, and the
  data between them take neither time nor memory.
- Operators may have to share a home, as a backward pass shares the weights of its forward pass (assumed).

Letters: V operators, D devices, E edges, n models.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hardware.arrays import FloatArray, IntArray
from hardware.link import Link

Port = tuple[int, str]
"""Port through which links pass: the device that has it, and its name there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """A link from one device to another; a second one leads back.

    Attributes:
        source: Device at which the link begins.
        target: Device at which it ends.
        link: Bandwidth and latency of the link.
        ports: Ports through which it passes.
    """

    source: int
    target: int
    link: Link
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A way to run an operator on several devices.

    Attributes:
        op: Number of the operator.
        parts: Number of equal parts, each on a device of its own; at least two.
        part_s: Time of one part on each device [D].
        gather_s: Time of sending inputs from each home to each other device and gathering its results, after the
            longest part [D, D]; all other devices do so at once.
        received_bytes: What each device but the home gets for the run, while the operator's own memory stays at home.
            None if that memory is shared in equal parts, and nothing else is held.
    """

    op: int
    parts: int
    part_s: tuple[float, ...]
    gather_s: tuple[tuple[float, ...], ...]
    received_bytes: float | None = None

    def memory_shares(self, own_bytes: float) -> tuple[float, ...]:
        """Return what each device holds from beginning to end of the operator's own memory, the home first [parts]."""
        if self.received_bytes is None:
            return (own_bytes / self.parts,) * self.parts
        return (own_bytes, *(0.0,) * (self.parts - 1))

    def working_shares(self, working_bytes: float) -> tuple[float, ...]:
        """Return what each device takes while the operator runs, the home first [parts]."""
        own_bytes = working_bytes / self.parts
        return (own_bytes, *(own_bytes + (self.received_bytes or 0.0),) * (self.parts - 1))

    def gathering_s(self, devices: tuple[int, ...]) -> float:
        """Return the time of gathering at the first of some devices [s]."""
        return max(self.gather_s[devices[0]][device] for device in devices[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusion:
    """A way to run an operator and a successor of it as one.

    Attributes:
        first: Number of the operator.
        second: Number of its successor; no other path leads from the first to the second.
        exec_s: Time of both together on each device [D].
        memory_bytes: Memory of both together [bytes].
    """

    first: int
    second: int
    exec_s: tuple[float, ...]
    memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """Models to train, with the devices and links to train them on.

    Attributes:
        model_of: Model of each operator, from 0; operators stand after their predecessors [V].
        weights: Weight of each model's completion time in the objective [n].
        exec_s: Time of each operator on each device; inf where it can't run [V, D].
        memory_bytes: Memory of each operator [V].
        edges: Producer and consumer of data [E, 2].
        data_bytes: Bytes sent along each edge, and stored [E].
        capacity_bytes: Memory of each device [D].
        links: Links between the devices.
        splits: Possible splits of operators.
        fusions: Possible fusions of operators.
        mates: Sets of operators that share a home; no operator is in two of them.
        working_bytes: Memory that each operator takes only while it runs, where memory is released [V]. None where
            nothing is: then data of edges stay from beginning to end.
    """

    model_of: IntArray
    weights: FloatArray
    exec_s: FloatArray
    memory_bytes: FloatArray
    edges: IntArray
    data_bytes: FloatArray
    capacity_bytes: FloatArray
    links: tuple[DeviceLink, ...]
    splits: tuple[Split, ...] = ()
    fusions: tuple[Fusion, ...] = ()
    mates: tuple[tuple[int, ...], ...] = ()
    working_bytes: FloatArray | None = None

    def __post_init__(self) -> None:
        """Check the shapes and the order of the operators."""
        num_ops, num_devices = self.exec_s.shape
        assert self.model_of.shape == self.memory_bytes.shape == (num_ops,), "one model and one size per operator"
        assert set(self.model_of.tolist()) == set(range(len(self.weights))), "every model has operators, and a weight"
        assert (self.weights > 0).all(), "a model that does not count is left out"
        assert self.capacity_bytes.shape == (num_devices,), "one capacity per device"
        assert self.edges.shape == (len(self.data_bytes), 2), "two ends and one size per edge"
        assert (self.edges[:, 0] < self.edges[:, 1]).all(), "operators stand after their predecessors"
        assert (np.diff(self.model_of[self.edges], axis=1) == 0).all(), "models exchange no data"
        assert all(2 <= split.parts <= num_devices for split in self.splits), "each part has a device of its own"
        assert all(
            {len(split.part_s), len(split.gather_s), *map(len, split.gather_s)} == {num_devices}
            for split in self.splits
        ), "a part takes its time on each device, and gathering its own from each to each"
        assert self.working_bytes is None or self.working_bytes.shape == (num_ops,), "one size per operator"
        assert len({op for one in self.mates for op in one}) == sum(map(len, self.mates)), "sets of mates are disjoint"

    @property
    def num_ops(self) -> int:
        """Number of operators, V."""
        return len(self.model_of)

    @property
    def num_held(self) -> int:
        """Number of links and ports, which transfers hold."""
        return len(self.links) + len(ports_of(self.links))

    @property
    def num_devices(self) -> int:
        """Number of devices, D."""
        return len(self.capacity_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Links that one transfer can use together.

    Attributes:
        links: Numbers of the links in `Workload.links`.
        holds: Numbers of all that the transfer holds: the links, and after all links of the workload the ports.
        bandwidth_bytes_per_s: Bandwidth of all links together.
        latency_s: Largest latency of the links.
    """

    links: tuple[int, ...]
    holds: tuple[int, ...]
    bandwidth_bytes_per_s: float
    latency_s: float

    def transfer_s(self, data_bytes: float) -> float:
        """Return the time of a transfer: T_comm of section 3.2.1 [s]."""
        return self.latency_s + data_bytes / self.bandwidth_bytes_per_s


def ways_between(workload: Workload) -> dict[tuple[int, int], tuple[Way, ...]]:
    """Return all ways between each pair of devices of a workload."""
    return ways_over(workload.links)


def ways_over(links: Sequence[DeviceLink]) -> dict[tuple[int, int], tuple[Way, ...]]:
    """Return all ways between each pair of devices: every set of its links that can work together."""
    # Sets of links are enumerated for each pair of devices; there are few links between two devices.
    between: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, link in enumerate(links):
        between[link.source, link.target].append(number)
    port_number = {port: len(links) + at for at, port in enumerate(ports_of(links))}
    return {
        pair: tuple(
            _way(links, chosen, port_number)
            for size in range(1, len(numbers) + 1)
            for chosen in itertools.combinations(numbers, size)
            if _work_together(links, chosen)
        )
        for pair, numbers in between.items()
    }


def ports_of(links: Sequence[DeviceLink]) -> tuple[Port, ...]:
    """Return the ports of all links, each once, in the order in which they are numbered."""
    return tuple(sorted({port for link in links for port in link.ports}))


def _work_together(links: Sequence[DeviceLink], numbers: tuple[int, ...]) -> bool:
    """Return whether no two of the links exclude each other, by their group or because they share a port."""
    # Links without a group exclude nobody.
    groups = [links[number].link.exclusive_group for number in numbers]
    named = [group for group in groups if group is not None]
    ports = [port for number in numbers for port in links[number].ports]
    return len(named) == len(set(named)) and len(ports) == len(set(ports))


def _way(every: Sequence[DeviceLink], numbers: tuple[int, ...], port_number: Mapping[Port, int]) -> Way:
    """Return the way over some links."""
    links = [every[number].link for number in numbers]
    return Way(
        links=numbers,
        holds=(*numbers, *(port_number[port] for number in numbers for port in every[number].ports)),
        bandwidth_bytes_per_s=sum(link.bandwidth_bytes_per_s for link in links),
        latency_s=max(link.latency_s for link in links),
    )


class Run(NamedTuple):
    """An operator at work.

    Attributes:
        ops: Number of the operator, or the two numbers of fused ones.
        devices: Devices that run it: the home first, followed by those of the other parts.
        start_s: Start on all of them [s].
        end_s: End at home; other parts may end before [s].
    """

    ops: tuple[int, ...]
    devices: tuple[int, ...]
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """Data on their way.

    Attributes:
        edge: Number of the edge whose data are sent.
        links: Links that carry them, all at once.
        start_s: Start on all links [s].
        end_s: End on all links [s].
    """

    edge: int
    links: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A solution of the scheduling problem.

    Attributes:
        runs: Runs of all operators.
        transfers: Transfers of all edges between two devices.
    """

    runs: tuple[Run, ...]
    transfers: tuple[Transfer, ...]

    def completion_s(self, workload: Workload) -> FloatArray:
        """Return the time when each model ends [n]; T_compl of equation 3."""
        ends_s = np.zeros(len(workload.weights))
        for run in self.runs:
            for op in run.ops:
                ends_s[workload.model_of[op]] = max(ends_s[workload.model_of[op]], run.end_s)
        return ends_s

    def cost_s(self, workload: Workload) -> float:
        """Return the weighted sum of the completion times (equation 3)."""
        return float(workload.weights @ self.completion_s(workload))

    def devices(self) -> dict[int, int]:
        """Return the home of every operator, D(v)."""
        return {op: run.devices[0] for run in self.runs for op in run.ops}
