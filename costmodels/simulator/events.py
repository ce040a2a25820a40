"""The engine of the event simulator: tasks that wait for each other and share devices and links, and when they run.

A task is a kernel, a collective, a transfer between stages. It begins when all that it waits for has ended; after its
latency it works, at its full rate where nothing else is at work beside it. Transfers share links by max-min fairness
(hardware/sharing.py); kernels and collectives on one device slow each other down. Rates change only when a task
begins or ends, so time goes from one such event to the next.

Which link a transfer takes may be open: of links that exclude each other it takes the one that is the fastest at the
moment when it begins ("Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization",
section 3.1).

Letters: t tasks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hardware.arrays import FloatArray, IntArray
from hardware.sharing import Uses, fair_rates

NOTHING = -1


class Route(NamedTuple):
    """One way to do a task.

    Attributes:
        work_s: What it takes at its full rate, without its latency.
        uses: What it takes of the links at that rate.
    """

    work_s: float
    uses: Uses = ()


@dataclass(kw_only=True, slots=True, eq=False)
class TaskGraph:
    """Tasks under construction; a task's number is its position.

    Attributes:
        latency_s: Time after its begin in which a task takes nothing from any link or device.
        routes: The ways to do each, one at least; of equal ones the first is taken.
        devices: The devices that each keeps at work.
        after: What each waits for.
    """

    latency_s: list[float] = field(default_factory=list)
    routes: list[tuple[Route, ...]] = field(default_factory=list)
    devices: list[tuple[int, ...]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)

    def add(
        self,
        *routes: Route,
        after: Iterable[int] = (),
        latency_s: float = 0.0,
        devices: tuple[int, ...] = (),
    ) -> int:
        """Adds a task that waits for those numbered `after`, of which NOTHING is none; returns its number."""
        assert routes, "there is a way to do every task"
        self.latency_s.append(latency_s)
        self.routes.append(routes)
        self.devices.append(devices)
        self.after.append([task for task in after if task != NOTHING])
        return len(self.routes) - 1

    def wait(self, task: int, other: int) -> None:
        """Makes a task wait for another one, too."""
        self.after[task].append(other)

    def __len__(self) -> int:
        return len(self.routes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """When the tasks of a graph ran.

    Attributes:
        start_s: [t]
        end_s: [t]; inf for what never ends, because a link that it crosses is down.
        waited_for: The task whose end let each begin, NOTHING for the first ones [t].
        route: Which of its routes each took [t].
    """

    start_s: FloatArray
    end_s: FloatArray
    waited_for: IntArray
    route: IntArray

    @property
    def makespan_s(self) -> float:
        """From 0 to the last end."""
        return float(self.end_s.max(initial=0.0))

    def critical_path(self) -> list[int]:
        """The chain of tasks without a gap from the first begin to the last end, in this order."""
        if not len(self.end_s):
            return []
        path = [int(self.end_s.argmax())]
        while self.waited_for[path[-1]] != NOTHING:
            path.append(int(self.waited_for[path[-1]]))
        return path[::-1]


def run(graph: TaskGraph, capacity: Sequence[float], overlap_efficiency: float) -> Timeline:
    """When every task runs.

    Args:
        graph: The tasks.
        capacity: Of every resource that routes name.
        overlap_efficiency: Share of the shorter one's time that two kernels on one device save by running beside each
            other: 1 is no harm at all, 0 is one after the other.

    Raises:
        ValueError: tasks wait for each other in a circle.
    """
    engine = _Engine(graph, capacity, 1.0 - overlap_efficiency)
    engine.run()
    return Timeline(
        start_s=np.array(engine.start_s),
        end_s=np.array(engine.end_s),
        waited_for=np.array(engine.waited_for, dtype=np.int64),
        route=np.array(engine.route, dtype=np.int64),
    )


class _Engine:
    """The state of one run: a clock that jumps along a heap of (time, order of pushing, task, version).

    A task that works at a changed rate gets another version; events of older ones are void.
    """

    def __init__(self, graph: TaskGraph, capacity: Sequence[float], harm: float) -> None:
        num_tasks = len(graph)
        self.graph, self.harm = graph, harm
        self.capacity = dict(enumerate(capacity))
        self.start_s = [0.0] * num_tasks
        self.end_s = [np.inf] * num_tasks
        self.waited_for = [NOTHING] * num_tasks
        self.route = [0] * num_tasks
        self.missing = [len(after) for after in graph.after]
        self.followers: list[list[int]] = [[] for _ in range(num_tasks)]
        for task, after in enumerate(graph.after):
            for other in after:
                self.followers[other].append(task)
        self.left_s = [routes[0].work_s for routes in graph.routes]
        self.uses = [routes[0].uses for routes in graph.routes]
        self.rate = [0.0] * num_tasks
        self.since_s = [0.0] * num_tasks
        self.version = [0] * num_tasks
        self.is_working = [False] * num_tasks
        self.is_free = [self._is_free(task) for task in range(num_tasks)]
        self.on_resource: list[set[int]] = [set() for _ in capacity]
        num_devices = 1 + max((device for devices in graph.devices for device in devices), default=NOTHING)
        self.on_device: list[set[int]] = [set() for _ in range(num_devices)]
        self.known_rates: dict[tuple[tuple[int, ...], tuple[float, ...]], list[float]] = {}
        self.known_alone: dict[int, float] = {}
        self.heap: list[tuple[float, int, int, int]] = []
        self.num_pushed = 0

    def run(self) -> None:
        """Runs all tasks."""
        for task, missing in enumerate(self.missing):
            if not missing:
                self._begin(task, 0.0)
        while self.heap:
            now_s, _, task, version = heapq.heappop(self.heap)
            if version != self.version[task]:
                continue
            if self.is_working[task] or self.is_free[task]:
                self._end(task, now_s)
            else:
                self._work(task, now_s)
        if any(self.missing) and not any(self.is_working):
            raise ValueError("The tasks wait for each other in a circle.")

    def _push(self, time_s: float, task: int) -> None:
        self.num_pushed += 1
        heapq.heappush(self.heap, (time_s, self.num_pushed, task, self.version[task]))

    def _is_free(self, task: int) -> bool:
        """Whether nothing can slow the task down."""
        routes = self.graph.routes[task]
        return not self.graph.devices[task] and len(routes) == 1 and not routes[0].uses

    def _begin(self, task: int, now_s: float) -> None:
        self.start_s[task] = now_s
        latency_s = self.graph.latency_s[task]
        if self.is_free[task]:
            self._push(now_s + latency_s + self.left_s[task], task)
        elif latency_s > 0:
            self._push(now_s + latency_s, task)
        else:
            self._work(task, now_s)

    def _work(self, task: int, now_s: float) -> None:
        """The task's latency is over."""
        self.is_working[task] = True
        self.since_s[task] = now_s
        self._choose_route(task)
        self._enter(task)
        self._share(task, now_s)

    def _end(self, task: int, now_s: float) -> None:
        self.end_s[task] = now_s
        self.version[task] += 1
        if self.is_working[task]:
            self.is_working[task] = False
            self._leave(task)
            slowed = {other for other in self._beside(task) if self.rate[other] < 1.0}
            while slowed:
                slowed.difference_update(self._share(slowed.pop(), now_s))
        for follower in self.followers[task]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                self.waited_for[follower] = task
                self._begin(follower, now_s)

    def _enter(self, task: int) -> None:
        for resource, _ in self.uses[task]:
            self.on_resource[resource].add(task)
        for device in self.graph.devices[task]:
            self.on_device[device].add(task)

    def _leave(self, task: int) -> None:
        for resource, _ in self.uses[task]:
            self.on_resource[resource].discard(task)
        for device in self.graph.devices[task]:
            self.on_device[device].discard(task)

    def _beside(self, task: int) -> set[int]:
        """The other tasks at work on its links and devices."""
        found: set[int] = set()
        for resource, _ in self.uses[task]:
            found |= self.on_resource[resource]
        for device in self.graph.devices[task]:
            found |= self.on_device[device]
        found.discard(task)
        return found

    def _choose_route(self, task: int) -> None:
        """Takes the way in which the task would end first if nothing changed."""
        routes = self.graph.routes[task]
        if len(routes) == 1:
            return
        needs_s = []
        for route in routes:
            self.uses[task] = route.uses
            members = self._component(task)
            rate = self._rates(members)[members.index(task)]
            needs_s.append(route.work_s / rate if rate > 0 else np.inf)
        self.route[task] = int(np.argmin(needs_s))
        self.left_s[task], self.uses[task] = routes[self.route[task]]

    def _component(self, task: int) -> list[int]:
        """The task and all whose rates its own may change."""
        found = {task}
        waiting = [task]
        while waiting:
            for other in self._beside(waiting.pop()):
                if other not in found:
                    found.add(other)
                    waiting.append(other)
        return sorted(found)

    def _rates(self, members: Sequence[int]) -> list[float]:
        """Rates of tasks that share links and devices; the same few constellations return again and again."""
        limits = [1.0] * len(members)
        if self.harm:
            for at, task in enumerate(members):
                places = [self.on_device[device] for device in self.graph.devices[task]]
                others = max([len(place) - (task in place) for place in places], default=0)
                limits[at] = 1.0 / (1.0 + self.harm * others)
        uses = [self.uses[task] for task in members]
        key = (tuple(map(id, uses)), tuple(limits))
        if key not in self.known_rates:
            self.known_rates[key] = fair_rates(uses, limits, self.capacity)
        return self.known_rates[key]

    def _rate_alone(self, task: int) -> float:
        """The same where nothing is at work beside it."""
        uses = self.uses[task]
        key = id(uses)
        if key not in self.known_alone:
            self.known_alone[key] = min([1.0, *(self.capacity[place] / amount for place, amount in uses if amount > 0)])
        return self.known_alone[key]

    def _share(self, task: int, now_s: float) -> list[int]:
        """Gives new rates to the task and all around it; returns these."""
        members = self._component(task)
        rates = self._rates(members) if len(members) > 1 else [self._rate_alone(task)]
        for member, rate in zip(members, rates, strict=True):
            if rate == self.rate[member] and self.since_s[member] < now_s:
                continue  # its event stands
            self.left_s[member] = max(self.left_s[member] - self.rate[member] * (now_s - self.since_s[member]), 0.0)
            self.since_s[member] = now_s
            self.rate[member] = rate
            self.version[member] += 1
            if rate > 0:
                self._push(now_s + self.left_s[member] / rate, member)
        return members
