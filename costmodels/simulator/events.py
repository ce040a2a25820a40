"""Engine of the event simulator: runs tasks that wait for each other and share devices and links.

A task is a kernel, a collective, or a transfer between stages. It begins when all tasks that it waits for have ended.
After its latency it works, at its full rate if nothing else works beside it. Transfers share links by max-min fairness
(hardware/sharing.py). Kernels and collectives on one device slow each other down. Rates change only when a task begins
or ends, so time advances from one such event to the next.

A transfer may have several routes. Of links that exclude each other, it takes the one that is the fastest at the moment
when it begins ("Rethinking Dynamic Networks and Heterogeneous Computing with Automatic Parallelization", section 3.1).

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
        work_s: Duration at the full rate, without the latency [s].
        uses: Shares of the links that the task takes at that rate.
    """

    work_s: float
    uses: Uses = ()


@dataclass(kw_only=True, slots=True, eq=False)
class TaskGraph:
    """Tasks under construction; a task's number is its position.

    Attributes:
        latency_s: Time after its begin in which a task takes nothing from any link or device [s].
        routes: Routes of each task, at least one; the first of equal ones is taken.
        devices: Devices that each task keeps at work.
        after: Tasks that each task waits for.
    """

    latency_s: list[float] = field(default_factory=list)
    routes: list[tuple[Route, ...]] = field(default_factory=list)
    devices: list[tuple[int, ...]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)

    def add(
        self, *routes: Route, after: Iterable[int] = (), latency_s: float = 0.0, devices: tuple[int, ...] = ()
    ) -> int:
        """Add a task that waits for the tasks numbered `after`, ignoring NOTHING, and return its number."""
        assert routes, "every task has a route"
        self.latency_s.append(latency_s)
        self.routes.append(routes)
        self.devices.append(devices)
        self.after.append([task for task in after if task != NOTHING])
        return len(self.routes) - 1

    def wait(self, task: int, other: int) -> None:
        """Make a task wait for one more task."""
        self.after[task].append(other)

    def __len__(self) -> int:
        return len(self.routes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Times at which the tasks of a graph ran.

    Attributes:
        start_s: Begin of each task [s], [t].
        end_s: End of each task [s], [t]; inf for a task that never ends because a link that it crosses is down.
        waited_for: Task whose end let each task begin [t]; NOTHING for the first ones.
        route: Number of the route that each task took [t].
    """

    start_s: FloatArray
    end_s: FloatArray
    waited_for: IntArray
    route: IntArray

    @property
    def makespan_s(self) -> float:
        """Time from 0 to the last end [s]."""
        return float(self.end_s.max(initial=0.0))

    def critical_path(self) -> list[int]:
        """Return the chain of tasks without a gap from the first begin to the last end, in this order."""
        if not len(self.end_s):
            return []
        path = [int(self.end_s.argmax())]
        while self.waited_for[path[-1]] != NOTHING:
            path.append(int(self.waited_for[path[-1]]))
        return path[::-1]


def run(graph: TaskGraph, capacity: Sequence[float], overlap_efficiency: float) -> Timeline:
    """Run all tasks and return their times.

    Args:
        graph: Tasks to run.
        capacity: Capacity of every resource that routes name.
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
    """State of one run: a clock that jumps along a heap of (time, order of pushing, task, version).

    A task whose rate changes gets a new version; events of older versions are void.
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
        # The reverse of `after`: tasks that may begin when a task ends.
        self.followers: list[list[int]] = [[] for _ in range(num_tasks)]
        for task, after in enumerate(graph.after):
            for other in after:
                self.followers[other].append(task)
        # State of each task: the work that is left at full rate, its rate, and the time since when it has that rate.
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
        # Rates are remembered by the identities of the routes' uses, which are shared by equal messages.
        self.known_rates: dict[tuple[tuple[int, ...], tuple[float, ...]], list[float]] = {}
        self.known_alone: dict[int, float] = {}
        self.heap: list[tuple[float, int, int, int]] = []
        self.num_pushed = 0

    def run(self) -> None:
        """Run all tasks."""
        for task, missing in enumerate(self.missing):
            if not missing:
                self._begin(task, 0.0)
        while self.heap:
            now_s, _, task, version = heapq.heappop(self.heap)
            # The task's rate has changed since this event was pushed.
            if version != self.version[task]:
                continue
            if self.is_working[task] or self.is_free[task]:
                self._end(task, now_s)
            else:
                self._work(task, now_s)
        # A task may also wait for ever because a link is down. Then it is still at work, at rate 0.
        if any(self.missing) and not any(self.is_working):
            raise ValueError("The tasks wait for each other in a circle.")

    def _push(self, time_s: float, task: int) -> None:
        self.num_pushed += 1
        heapq.heappush(self.heap, (time_s, self.num_pushed, task, self.version[task]))

    def _is_free(self, task: int) -> bool:
        """Return whether nothing can slow the task down."""
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
        """Start the task's work; its latency is over."""
        self.is_working[task] = True
        self.since_s[task] = now_s
        self._choose_route(task)
        self._enter(task)
        self._share(task, now_s)

    def _end(self, task: int, now_s: float) -> None:
        """End the task, speed up the tasks beside it, and begin those that waited for it last."""
        self.end_s[task] = now_s
        self.version[task] += 1
        if self.is_working[task]:
            self.is_working[task] = False
            self._leave(task)
            # Only tasks below their full rate can gain. Each call of _share settles a whole component, so its members
            # are struck off.
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
        """Return the other tasks at work on the task's links and devices."""
        found: set[int] = set()
        for resource, _ in self.uses[task]:
            found |= self.on_resource[resource]
        for device in self.graph.devices[task]:
            found |= self.on_device[device]
        found.discard(task)
        return found

    def _choose_route(self, task: int) -> None:
        """Choose the route on which the task would end first if nothing changed."""
        routes = self.graph.routes[task]
        if len(routes) == 1:
            return
        needs_s = []
        for route in routes:
            # The task is not entered yet: its component is found as if it took this route.
            self.uses[task] = route.uses
            members = self._component(task)
            rate = self._rates(members)[members.index(task)]
            needs_s.append(route.work_s / rate if rate > 0 else np.inf)
        self.route[task] = int(np.argmin(needs_s))
        self.left_s[task], self.uses[task] = routes[self.route[task]]

    def _component(self, task: int) -> list[int]:
        """Return the task and all tasks whose rates its own may change."""
        found = {task}
        waiting = [task]
        while waiting:
            for other in self._beside(waiting.pop()):
                if other not in found:
                    found.add(other)
                    waiting.append(other)
        return sorted(found)

    def _rates(self, members: Sequence[int]) -> list[float]:
        """Return the rates of tasks that share links and devices.

        Results are remembered, because the same few constellations return again and again.
        """
        limits = [1.0] * len(members)
        if self.harm:
            for at, task in enumerate(members):
                places = [self.on_device[device] for device in self.graph.devices[task]]
                others = max([len(place) - (task in place) for place in places], default=0)
                # Each other kernel on the busiest of its devices slows a task down by the harm of one overlap.
                limits[at] = 1.0 / (1.0 + self.harm * others)
        uses = [self.uses[task] for task in members]
        key = (tuple(map(id, uses)), tuple(limits))
        # `id` suffices as a key, because the graph keeps all routes alive during the run.
        if key not in self.known_rates:
            self.known_rates[key] = fair_rates(uses, limits, self.capacity)
        return self.known_rates[key]

    def _rate_alone(self, task: int) -> float:
        """Return the rate of a task that has nothing at work beside it."""
        uses = self.uses[task]
        key = id(uses)
        if key not in self.known_alone:
            self.known_alone[key] = min([1.0, *(self.capacity[place] / amount for place, amount in uses if amount > 0)])
        return self.known_alone[key]

    def _share(self, task: int, now_s: float) -> list[int]:
        """Give new rates to the task and to all tasks of its component, and return these."""
        members = self._component(task)
        rates = self._rates(members) if len(members) > 1 else [self._rate_alone(task)]
        for member, rate in zip(members, rates, strict=True):
            if rate == self.rate[member] and self.since_s[member] < now_s:
                continue  # its event stays valid
            # Work done since the last change of the rate is settled before the new rate counts.
            self.left_s[member] = max(self.left_s[member] - self.rate[member] * (now_s - self.since_s[member]), 0.0)
            self.since_s[member] = now_s
            self.rate[member] = rate
            self.version[member] += 1
            if rate > 0:
                self._push(now_s + self.left_s[member] / rate, member)
        return members
