"""Scheduling problem without splits and fusions as a mixed integer program, solved by HiGHS.

Letters as in `problem`; H is a horizon within which everything can be done one after the other. Variables
and constraints, each with the method that makes it:

- x[v, d] is 1 if operator v runs on device d (`_devices`); s[v] is its start, and its end is s[v] + its time there.
- y[e, w] is 1 if way w carries edge e: one way between the two devices if they differ. An edge between devices that no
  way joins is forbidden (`_ways`). s_e[e] is the transfer's start.
- A transfer follows its producer (equation 5), an operator its transfers (equation 4) (`_precedence`).
- Of two operators on one device, and of two transfers that hold one link or port, one follows the other: a variable
  says which, and constraints with H bind only where both are there (`_one_at_a_time`; equation 7).
- Memory: g[e, d] is at least x of both ends of the edge (`_memory`; equation 6).
- T[i] is at least the end of each operator of model i; the objective is their weighted sum (equation 3) (`_ends`).
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from tuner.planners.engine.mixed_integer import MixedInteger, Terms
from tuner.planners.engine.outcome import Limits, Outcome
from tuner.planners.scheduling.problem import Run, Schedule, Transfer, Way, Workload, ways_between

MOST_VARIABLES = 1500
"""Most choices of a device for an operator and of a way for an edge with which a problem counts as small."""


WIDEST_RANGE = 1e6
"""Largest ratio of two times with which HiGHS's tolerances still tell them apart."""


def is_small(workload: Workload) -> bool:
    """Return whether HiGHS can be expected to solve a workload's program in seconds."""
    ways = [way for of_pair in ways_between(workload).values() for way in of_pair]
    if workload.num_ops * workload.num_devices + len(workload.data_bytes) * len(ways) > MOST_VARIABLES:
        return False
    times_s = workload.exec_s[np.isfinite(workload.exec_s)].tolist()
    slowest_s = max((way.transfer_s(size) for way in ways for size in workload.data_bytes.tolist()), default=0.0)
    return bool(max(*times_s, slowest_s) <= WIDEST_RANGE * min(times_s))


def schedule_by_milp(workload: Workload, *, limits: Limits | None = None) -> Outcome[Schedule]:
    """Find the best schedule of a workload with HiGHS; nodes in `limits` are those of its own tree."""
    assert not workload.splits, "the program knows no splits"
    assert not workload.fusions, "the program knows no fusions"
    return _ScheduleProgram(workload).solve(limits or Limits())


class _ScheduleProgram:
    """Integer program of one workload."""

    def __init__(self, workload: Workload) -> None:
        """Add all variables and constraints."""
        self.workload = workload
        self.program = MixedInteger()
        self.edges: list[tuple[int, int]] = [(u, v) for u, v in workload.edges.tolist()]
        self.ways: list[tuple[tuple[int, int], Way]] = [
            (pair, way) for pair, of_pair in ways_between(workload).items() for way in of_pair
        ]
        num_ops, num_devices = workload.exec_s.shape
        self.x = self.program.variables((num_ops, num_devices), upper=np.isfinite(workload.exec_s), integer=True)
        self.y = self.program.variables((len(self.edges), len(self.ways)), upper=1.0, integer=True)
        self.horizon_s = self._horizon_s()
        # with times that are not bounded HiGHS (of SciPy 1.17.1) now and then calls a schedule optimal that costs up
        # to 0.5% more than another which its program admits (measured)
        self.starts = self.program.variables((num_ops,), upper=self.horizon_s)
        self.sends = self.program.variables((len(self.edges),), upper=self.horizon_s)
        self.ends = self.program.variables((len(workload.weights),), upper=self.horizon_s)
        self.reach = self._reach()
        self._devices()
        self._ways()
        self._precedence()
        self._one_at_a_time()
        self._memory()
        self._ends()

    def _horizon_s(self) -> float:
        """Return a time within which all operators and transfers can run one after the other [s]."""
        finite = np.where(np.isfinite(self.workload.exec_s), self.workload.exec_s, 0.0)
        slowest = [
            max((way.transfer_s(size) for _, way in self.ways), default=0.0) for size in self.workload.data_bytes
        ]
        return float(finite.max(axis=1).sum() + sum(slowest))

    def _reach(self) -> NDArray[np.bool_]:
        """Return whether the second operator is the first or comes after it on all devices [V, V]."""
        reach = np.eye(self.workload.num_ops, dtype=np.bool_)
        for u, v in sorted(self.edges, reverse=True):  # rows of later operators are complete when an earlier one asks
            reach[u] |= reach[v]
        return reach

    def _time(self, op: int) -> Terms:
        """Return the time of an operator as a linear expression."""
        row = self.workload.exec_s[op]
        return [(self.x[op, device], float(row[device])) for device in np.flatnonzero(np.isfinite(row))]

    def _transfer_time(self, edge: int) -> Terms:
        """Return the transfer time of an edge's data as a linear expression; zero on one device."""
        size = float(self.workload.data_bytes[edge])
        return [(self.y[edge, at], way.transfer_s(size)) for at, (_, way) in enumerate(self.ways)]

    def _devices(self) -> None:
        """Give each operator one device, and operators that share a home the same one."""
        for row in self.x:
            self.program.add([(var, 1.0) for var in row], at_least=1.0, at_most=1.0)
        for first, *others in self.workload.mates:
            for other, device in itertools.product(others, range(self.x.shape[1])):
                alike: Terms = [(self.x[first, device], 1.0), (self.x[other, device], -1.0)]
                self.program.add(alike, at_least=0.0, at_most=0.0)

    def _ways(self) -> None:
        """Give each edge between two devices one way."""
        for edge, (u, v) in enumerate(self.edges):
            self.program.add([(var, 1.0) for var in self.y[edge]], at_most=1.0)
            for source, target in itertools.permutations(range(self.workload.num_devices), 2):
                chosen: Terms = [
                    (self.y[edge, at], 1.0) for at, (pair, _) in enumerate(self.ways) if pair == (source, target)
                ]
                self.program.add([*chosen, (self.x[u, source], -1.0), (self.x[v, target], -1.0)], at_least=-1.0)

    def _precedence(self) -> None:
        """Order producers, transfers and consumers."""
        for edge, (u, v) in enumerate(self.edges):
            self._follows([(self.sends[edge], 1.0)], [(self.starts[u], 1.0), *self._time(u)])
            self._follows([(self.starts[v], 1.0)], [(self.sends[edge], 1.0), *self._transfer_time(edge)])

    def _follows(self, later: Terms, earlier: Terms, unless: Terms | None = None, least: float = 0.0) -> None:
        """Require `later` to be at least `earlier`, less a horizon for every unit of `unless` above `least`."""
        lifted = [(var, self.horizon_s * factor) for var, factor in unless or []]
        terms = [*later, *((var, -factor) for var, factor in earlier), *lifted]
        self.program.add(terms, at_least=self.horizon_s * least)

    def _one_at_a_time(self) -> None:
        """Order operators on one device, and transfers on one link."""
        for one, other in itertools.combinations(range(self.workload.num_ops), 2):
            if self.reach[one, other]:
                continue
            both = [[(self.x[one, device], -1.0), (self.x[other, device], -1.0)] for device in range(self.x.shape[1])]
            ends = [[(self.starts[op], 1.0), *self._time(op)] for op in (one, other)]
            self._disjoint(self.starts[one], self.starts[other], ends, both)
        numbers = range(self.workload.num_held)
        for one, other in itertools.combinations(range(len(self.edges)), 2):
            # a transfer to an operator, and one from it or from a later one, are in order already
            if any(self.reach[self.edges[a][1], self.edges[b][0]] for a, b in ((one, other), (other, one))):
                continue
            both = [
                [
                    (self.y[edge, at], -1.0)
                    for edge in (one, other)
                    for at, (_, way) in enumerate(self.ways)
                    if link in way.holds
                ]
                for link in numbers
            ]
            ends = [[(self.sends[edge], 1.0), *self._transfer_time(edge)] for edge in (one, other)]
            self._disjoint(self.sends[one], self.sends[other], ends, both)

    def _disjoint(self, one: int, other: int, ends: list[Terms], both: list[Terms]) -> None:
        """Order two operators or transfers where both hold a resource.

        Args:
            one: Start of the first.
            other: Start of the second.
            ends: End of each of them.
            both: Coefficient -1 for each of the two that holds a resource, for each resource.
        """
        order = self.program.variables((), upper=1.0, integer=True)[()]
        for holders in both:
            self._follows([(other, 1.0)], ends[0], unless=[(order, -1.0), *holders], least=-3.0)
            self._follows([(one, 1.0)], ends[1], unless=[(order, 1.0), *holders], least=-2.0)

    def _memory(self) -> None:
        """Limit the memory of each device."""
        workload = self.workload
        held = self.program.variables((len(self.edges), workload.num_devices))
        scale = float(workload.capacity_bytes.max())
        for edge, ends in enumerate(self.edges):
            for op, device in itertools.product(ends, range(workload.num_devices)):
                self.program.add([(held[edge, device], 1.0), (self.x[op, device], -1.0)], at_least=0.0)
        for device in range(workload.num_devices):
            own: Terms = [(self.x[op, device], float(size) / scale) for op, size in enumerate(workload.memory_bytes)]
            data: Terms = [(held[edge, device], float(size) / scale) for edge, size in enumerate(workload.data_bytes)]
            self.program.add(own + data, at_most=float(workload.capacity_bytes[device]) / scale)

    def _ends(self) -> None:
        """Bound the end of each model, and add the objective."""
        for op, model in enumerate(self.workload.model_of):
            self._follows([(self.ends[model], 1.0)], [(self.starts[op], 1.0), *self._time(op)])
        self.program.cost(list(zip(self.ends, self.workload.weights.tolist(), strict=True)))

    def solve(self, limits: Limits) -> Outcome[Schedule]:
        """Solve the program, and read the schedule from its variables."""

        def read(values: np.ndarray) -> tuple[float, Schedule]:
            home = values[self.x].argmax(axis=1).tolist()
            runs, transfers = [], []
            for op, device in enumerate(home):
                start_s = float(values[self.starts[op]])
                end_s = start_s + float(self.workload.exec_s[op, device])
                runs.append(Run(ops=(op,), devices=(device,), start_s=start_s, end_s=end_s))
            for edge, (u, v) in enumerate(self.edges):
                for at, (pair, way) in enumerate(self.ways):
                    if pair == (home[u], home[v]) and values[self.y[edge, at]] > 0.5:
                        start_s = float(values[self.sends[edge]])
                        end_s = start_s + way.transfer_s(float(self.workload.data_bytes[edge]))
                        transfers.append(Transfer(edge=edge, links=way.links, start_s=start_s, end_s=end_s))
            schedule = Schedule(runs=tuple(runs), transfers=tuple(transfers))
            return schedule.cost_s(self.workload), schedule

        return self.program.solve(limits, read)
