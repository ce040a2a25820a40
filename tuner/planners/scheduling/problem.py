"""The scheduling problem: which device runs each operator of several models, and which links carry what is between.

Source: "Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", sections 2.3, 3.1
and 3.2. What the paper leaves open is settled here:

- A device runs one operator at a time, and a link carries one transfer at a time, at its full rate. So the rates on a
  link never exceed its bandwidth (equation 7).
- Data of an edge take memory on the device of its producer and, if that is another, on that of its consumer, from
  beginning to end (equation 6 knows no time).
- A transfer goes over links that join its two devices. Of one exclusive group it uses one link; it may be split over
  links that do not exclude each other, all of which it then holds until its end (assumed): their bandwidths add up,
  and the largest latency counts.
- An operator may be split: equal parts start together on unlike devices, the first of which is its home, takes its
  inputs, and gathers the results. It may be fused with a successor: both are one operator then, and what is between
  them takes neither time nor memory.

Letters: V operators, D devices, E edges, n models.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hardware.arrays import FloatArray, IntArray
from hardware.link import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """A link from one device to another; one of its own leads back."""

    source: int
    target: int
    link: Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A way to run an operator on several devices.

    Attributes:
        op: The operator.
        parts: Equal parts, each on a device of its own, at least two.
        part_s: Time of one part on each device [D].
        gather_s: Handing out the inputs and gathering the results at home, where it follows the longest part.
    """

    op: int
    parts: int
    part_s: tuple[float, ...]
    gather_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusion:
    """A way to run an operator and a successor of it as one.

    Attributes:
        first: The operator.
        second: Its successor; no other way leads from the one to the other.
        exec_s: Time of both on each device [D].
        memory_bytes: Of both.
    """

    first: int
    second: int
    exec_s: tuple[float, ...]
    memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """Models to be trained, and the devices and links to do it with.

    Attributes:
        model_of: The model of each operator, from 0; operators stand after their predecessors [V].
        weights: Of each model's completion in the objective [n].
        exec_s: Time of each operator on each device; inf where it can't run [V, D].
        memory_bytes: Of each operator [V].
        edges: Producer and consumer of data [E, 2].
        data_bytes: Sent along each edge, and stored [E].
        capacity_bytes: Memory of each device [D].
        links: Between the devices.
        splits: What may be split, and how.
        fusions: What may be fused.
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

    def __post_init__(self) -> None:
        """Checks the shapes and the order of the operators."""
        num_ops, num_devices = self.exec_s.shape
        assert self.model_of.shape == self.memory_bytes.shape == (num_ops,), "one model and one size per operator"
        assert set(self.model_of.tolist()) == set(range(len(self.weights))), "every model has operators, and a weight"
        assert (self.weights > 0).all(), "a model that does not count is left out"
        assert self.capacity_bytes.shape == (num_devices,), "one capacity per device"
        assert self.edges.shape == (len(self.data_bytes), 2), "two ends and one size per edge"
        assert (self.edges[:, 0] < self.edges[:, 1]).all(), "operators stand after their predecessors"
        assert (np.diff(self.model_of[self.edges], axis=1) == 0).all(), "models exchange no data"
        assert all(2 <= split.parts <= num_devices for split in self.splits), "each part has a device of its own"

    @property
    def num_ops(self) -> int:
        """V."""
        return len(self.model_of)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.capacity_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Links over which one transfer can go together.

    Attributes:
        links: Their numbers in `Workload.links`.
        bandwidth_bytes_per_s: Of all together.
        latency_s: The largest.
    """

    links: tuple[int, ...]
    bandwidth_bytes_per_s: float
    latency_s: float

    def transfer_s(self, data_bytes: float) -> float:
        """Time of a transfer: T_comm of section 3.2.1."""
        return self.latency_s + data_bytes / self.bandwidth_bytes_per_s


def ways_between(workload: Workload) -> dict[tuple[int, int], tuple[Way, ...]]:
    """All ways from one device to another: every set of its links with at most one of each exclusive group."""
    between: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, link in enumerate(workload.links):
        between[link.source, link.target].append(number)
    return {
        pair: tuple(
            _way(workload, chosen)
            for size in range(1, len(numbers) + 1)
            for chosen in itertools.combinations(numbers, size)
            if _work_together(workload, chosen)
        )
        for pair, numbers in between.items()
    }


def _work_together(workload: Workload, numbers: tuple[int, ...]) -> bool:
    groups = [workload.links[number].link.exclusive_group for number in numbers]
    named = [group for group in groups if group is not None]
    return len(named) == len(set(named))


def _way(workload: Workload, numbers: tuple[int, ...]) -> Way:
    links = [workload.links[number].link for number in numbers]
    return Way(
        links=numbers,
        bandwidth_bytes_per_s=sum(link.bandwidth_bytes_per_s for link in links),
        latency_s=max(link.latency_s for link in links),
    )


class Run(NamedTuple):
    """An operator at work.

    Attributes:
        ops: The operator, or the two that are fused.
        devices: Where: the home first, and after it those of the other parts.
        start_s: On all of them.
        end_s: At home; other parts may end before.
    """

    ops: tuple[int, ...]
    devices: tuple[int, ...]
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """Data on their way.

    Attributes:
        edge: Whose data.
        links: Over which, all at once.
        start_s: On all of them.
        end_s: On all of them.
    """

    edge: int
    links: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A solution of the scheduling problem."""

    runs: tuple[Run, ...]
    transfers: tuple[Transfer, ...]

    def completion_s(self, workload: Workload) -> FloatArray:
        """When each model ends [n]; T_compl of equation 3."""
        ends_s = np.zeros(len(workload.weights))
        for run in self.runs:
            for op in run.ops:
                ends_s[workload.model_of[op]] = max(ends_s[workload.model_of[op]], run.end_s)
        return ends_s

    def cost_s(self, workload: Workload) -> float:
        """The weighted sum of the completion times (equation 3)."""
        return float(workload.weights @ self.completion_s(workload))

    def devices(self) -> dict[int, int]:
        """D(v): the home of every operator."""
        return {op: run.devices[0] for run in self.runs for op in run.ops}
