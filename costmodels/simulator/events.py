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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What a task takes; tasks that take the same share one object.

    Attributes:
        routes: Ways to do the task, at least one; the first of equal ones is taken.
        latency_s: Time after its begin in which the task takes nothing from any link or device [s].
        devices: Devices that the task keeps at work.
    """

    routes: tuple[Route, ...]
    latency_s: float = 0.0
    devices: tuple[int, ...] = ()


@dataclass(kw_only=True, slots=True, eq=False)
class TaskGraph:
    """Tasks under construction; a task's number is its position.

    Attributes:
        demands: What each task takes.
        waiting: Task of each wait.
        awaited: Task that it waits for.
    """

    demands: list[Demand] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)

    def add(
        self, *routes: Route, after: Iterable[int] = (), latency_s: float = 0.0, devices: tuple[int, ...] = ()
    ) -> int:
        """Add a task that waits for the tasks numbered `after`, ignoring NOTHING, and return its number."""
        assert routes, "every task has a route"
        return self.add_like(Demand(routes, latency_s, devices), after)

    def add_like(self, demand: Demand, after: Iterable[int] = ()) -> int:
        """Add a task that takes what others take too, and waits for the tasks numbered `after`, ignoring NOTHING."""
        task = len(self.demands)
        self.demands.append(demand)
        for other in after:
            if other != NOTHING:
                self.wait(task, other)
        return task

    def wait(self, task: int, other: int) -> None:
        """Make a task wait for one more task."""
        self.waiting.append(task)
        self.awaited.append(other)

    def add_all(self, demands: Iterable[Demand]) -> IntArray:
        """Add tasks that wait for nothing yet; return their numbers [t]."""
        first = len(self.demands)
        self.demands.extend(demands)
        return np.arange(first, len(self.demands))

    def wait_all(self, tasks: IntArray, others: IntArray) -> None:
        """Make each of some tasks [t] wait for one more task, unless it is NOTHING."""
        kept = others != NOTHING
        self.waiting.extend(tasks[kept].tolist())
        self.awaited.extend(others[kept].tolist())

    def __len__(self) -> int:
        return len(self.demands)


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


class _Way:
    """A route of one demand during a run, with the sets of tasks at work on each of its links and devices.

    Attributes:
        work_s: Duration at the full rate, without the latency [s].
        uses: Shares of the links that the task takes at that rate.
        number: Number of these uses; equal ones have equal numbers.
        devices: Tasks at work on each device, if tasks on one device slow each other down.
        places: Tasks at work on each link and device.
        is_free: Whether nothing can slow the task down.
    """

    __slots__ = ("devices", "is_free", "number", "places", "uses", "work_s")

    def __init__(
        self, route: Route, number: int, devices: tuple[set[int], ...], resources: Sequence[set[int]], *, is_only: bool
    ) -> None:
        self.work_s, self.uses, self.number, self.devices = route.work_s, route.uses, number, devices
        self.places = (*(resources[resource] for resource, _ in route.uses), *devices)
        self.is_free = is_only and not self.places


class _Engine:
    """State of one run: a clock that jumps along a heap of events, each a time, the event's number, and a task.

    A task's next event is the one pushed last; a change of its rate makes the others void.
    """

    def __init__(self, graph: TaskGraph, capacity: Sequence[float], harm: float) -> None:
        num_tasks = len(graph)
        self.harm, self.capacity = harm, dict(enumerate(capacity))
        self.start_s = [0.0] * num_tasks
        self.end_s = [np.inf] * num_tasks
        self.waited_for = [NOTHING] * num_tasks
        self.route = [0] * num_tasks
        waiting, awaited = np.array(graph.waiting, dtype=np.int64), np.array(graph.awaited, dtype=np.int64)
        self.missing = np.bincount(waiting, minlength=num_tasks).tolist()
        # Tasks that may begin when a task ends: those from its first one up to the first one of the next task.
        self.followers = waiting[np.lexsort((waiting, awaited))].tolist()
        self.first_follower = [0, *np.cumsum(np.bincount(awaited, minlength=num_tasks)).tolist()]
        self.latency_s = [demand.latency_s for demand in graph.demands]
        # Ways of each task, and the one that it takes. Equal demands share their ways.
        of_demand = self._ways_of({id(demand): demand for demand in graph.demands}, len(capacity))
        self.ways = [of_demand[id(demand)] for demand in graph.demands]
        self.way = [ways[0] for ways in self.ways]
        # Sum of what tasks at work on each link take at their full rates, and the sum from which on they are slowed.
        self.load = [0.0] * len(capacity)
        self.most = [amount * (1 + 1e-12) for amount in capacity]
        # State of each task: the work that is left at full rate, its rate, and the time since when it has that rate.
        self.left_s = [way.work_s for way in self.way]
        self.rate = [0.0] * num_tasks
        self.since_s = [0.0] * num_tasks
        self.event = [0] * num_tasks
        self.is_working = [False] * num_tasks
        # Number of devices with several tasks at work.
        self.num_crowded = 0
        # Rates are remembered by the numbers of the ways' uses, and by the limits where devices are crowded.
        self.known_rates: dict[tuple[tuple[int, ...], tuple[float, ...]], list[float]] = {}
        self.heap: list[tuple[float, int, int]] = []
        self.num_pushed = 0

    def _ways_of(self, demands: Mapping[int, Demand], num_resources: int) -> dict[int, tuple[_Way, ...]]:
        """Return the ways of each demand, by its key."""
        resources: list[set[int]] = [set() for _ in range(num_resources)]
        on_device: defaultdict[int, set[int]] = defaultdict(set)
        numbers: dict[Uses, int] = {}
        found = {}
        for key, demand in demands.items():
            devices = tuple(on_device[device] for device in demand.devices) if self.harm else ()
            found[key] = tuple(
                _Way(
                    route,
                    numbers.setdefault(route.uses, len(numbers)),
                    devices,
                    resources,
                    is_only=len(demand.routes) == 1,
                )
                for route in demand.routes
            )
        return found

    def run(self) -> None:
        """Run all tasks."""
        for task, missing in enumerate(self.missing):
            if not missing:
                self._begin(task, 0.0)
        heap, event, is_working, way = self.heap, self.event, self.is_working, self.way
        while heap:
            now_s, number, task = heapq.heappop(heap)
            if number != event[task]:
                continue
            if is_working[task] or way[task].is_free:
                self._end(task, now_s)
            else:
                self._work(task, now_s)
        # A task may also wait for ever because a link is down. Then it is still at work, at rate 0.
        if any(self.missing) and not any(self.is_working):
            raise ValueError("The tasks wait for each other in a circle.")

    def _push(self, time_s: float, task: int) -> None:
        self.num_pushed += 1
        self.event[task] = self.num_pushed
        heapq.heappush(self.heap, (time_s, self.num_pushed, task))

    def _begin(self, task: int, now_s: float) -> None:
        self.start_s[task] = now_s
        latency_s = self.latency_s[task]
        if self.way[task].is_free:
            self._push(now_s + latency_s + self.left_s[task], task)
        elif latency_s > 0:
            self._push(now_s + latency_s, task)
        else:
            self._work(task, now_s)

    def _work(self, task: int, now_s: float) -> None:
        """Start the task's work; its latency is over."""
        self.is_working[task] = True
        if len(self.ways[task]) > 1:
            self._choose_route(task)
        is_crowded = self._enter(task)
        self.since_s[task] = now_s
        if is_crowded:
            self._share(task, now_s)
        else:
            # Links that are not full, and devices without other tasks, hold back neither this task nor others.
            self.rate[task] = 1.0
            self._push(now_s + self.left_s[task], task)

    def _end(self, task: int, now_s: float) -> None:
        """End the task, speed up the tasks beside it, and begin those that waited for it last."""
        self.end_s[task] = now_s
        if self.is_working[task]:
            self.is_working[task] = False
            if self._leave(task):
                self._speed_up(task, now_s)
        missing, first = self.missing, self.first_follower
        for follower in self.followers[first[task] : first[task + 1]]:
            missing[follower] -= 1
            if not missing[follower]:
                self.waited_for[follower] = task
                self._begin(follower, now_s)

    def _enter(self, task: int) -> bool:
        """Enter the task's links and devices; return whether it shares any with tasks that it slows down."""
        way, load, is_crowded = self.way[task], self.load, False
        for place in way.places:
            place.add(task)
        for resource, amount in way.uses:
            load[resource] += amount
            if load[resource] > self.most[resource]:
                is_crowded = True
        for device in way.devices:
            if len(device) > 1:
                is_crowded = True
                self.num_crowded += len(device) == 2
        return is_crowded

    def _leave(self, task: int) -> bool:
        """Leave the task's links and devices; return whether it shared any with tasks that it slowed down."""
        way, load, is_crowded = self.way[task], self.load, False
        for device in way.devices:
            if len(device) > 1:
                is_crowded = True
                self.num_crowded -= len(device) == 2
        for place in way.places:
            place.discard(task)
        for resource, amount in way.uses:
            if load[resource] > self.most[resource]:
                is_crowded = True
            load[resource] -= amount
        return is_crowded

    def _speed_up(self, task: int, now_s: float) -> None:
        """Speed up the tasks that were beside a task."""
        # Only tasks below their full rate can gain. Each call of _share settles a whole component, so its members are
        # struck off.
        slowed = {other for place in self.way[task].places for other in place if self.rate[other] < 1.0}
        while slowed:
            slowed.difference_update(self._share(slowed.pop(), now_s))

    def _choose_route(self, task: int) -> None:
        """Choose the route on which the task would end first if nothing changed."""
        needs_s = []
        for way in self.ways[task]:
            self.way[task] = way
            self._enter(task)
            members = self._component(task)
            rate = self._rates(members)[members.index(task)]
            needs_s.append(way.work_s / rate if rate > 0 else np.inf)
            self._leave(task)
        self.route[task] = int(np.argmin(needs_s))
        self.way[task] = self.ways[task][self.route[task]]
        self.left_s[task] = self.way[task].work_s

    def _component(self, task: int) -> list[int]:
        """Return the task and all tasks whose rates its own may change."""
        found, waiting = {task}, [task]
        while waiting:
            for place in self.way[waiting.pop()].places:
                if not place <= found:
                    waiting += place - found
                    found |= place
        return sorted(found)

    def _rates(self, members: Sequence[int]) -> list[float]:
        """Return the rates of tasks that share links and devices.

        Results are remembered, because the same few constellations return again and again.
        """
        ways = [self.way[task] for task in members]
        numbers = tuple([way.number for way in ways])
        limits = tuple(map(self._limit, ways)) if self.num_crowded else ()
        if (numbers, limits) not in self.known_rates:
            uses = [way.uses for way in ways]
            self.known_rates[numbers, limits] = fair_rates(uses, limits or [1.0] * len(ways), self.capacity)
        return self.known_rates[numbers, limits]

    def _limit(self, way: _Way) -> float:
        """Return the rate to which others on its devices slow a task down."""
        # Each other kernel on the busiest of its devices slows it down by the harm of one overlap.
        return 1.0 / (1.0 + self.harm * max([len(device) - 1 for device in way.devices], default=0))

    def _share(self, task: int, now_s: float) -> list[int]:
        """Give new rates to the task and to all tasks of its component, and return these."""
        members = self._component(task)
        for member, rate in zip(members, self._rates(members), strict=True):
            if rate == self.rate[member] and self.since_s[member] < now_s:
                continue  # its event stays valid
            # Work done since the last change of the rate is settled before the new rate counts.
            self.left_s[member] = max(self.left_s[member] - self.rate[member] * (now_s - self.since_s[member]), 0.0)
            self.since_s[member] = now_s
            self.rate[member] = rate
            if rate > 0:
                self._push(now_s + self.left_s[member] / rate, member)
            else:
                self.event[member] = NOTHING
        return members
