"""Scheduling problem for branch and bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tuner.planners.engine.branch_and_bound import AbstractProblem
from tuner.planners.engine.frontier import Merit
from tuner.planners.engine.outcome import Incumbent
from tuner.planners.scheduling.bounds import cost_bounds_s
from tuner.planners.scheduling.greedy import complete_greedily
from tuner.planners.scheduling.memory import peak_bytes
from tuner.planners.scheduling.problem import Run, Schedule, Transfer, Workload
from tuner.planners.scheduling.state import NOWHERE, ScheduleState, empty_state, next_states
from tuner.planners.scheduling.tables import schedule_tables


class ScheduleNode(NamedTuple):
    """A partial schedule and the bound on its cost.

    Attributes:
        state: Partial schedule.
        bound: Lower bound of the cost of every schedule that begins so [s].
    """

    state: ScheduleState
    bound: float


class SchedulingProblem(AbstractProblem[ScheduleNode, Schedule]):
    """The scheduling problem of a workload."""

    def __init__(self, workload: Workload, *, known: Sequence[Schedule] = ()) -> None:
        """Compute the tables of the workload.

        Args:
            workload: Workload to schedule.
            known: Schedules that the first answer must not be worse than.
        """
        self.workload = workload
        self._known = tuple(known)
        self._tables = schedule_tables(workload)

    def root(self) -> ScheduleNode:
        """Return the empty schedule."""
        state = empty_state(self.workload)
        return ScheduleNode(state, float(cost_bounds_s([state], self.workload, self._tables)[0]))

    def children(self, node: ScheduleNode, cutoff: float) -> Iterable[ScheduleNode]:
        """Yield the states with one more run or transfer."""
        states = list(next_states(node.state, self.workload, self._tables))
        bounds_s = cost_bounds_s(states, self.workload, self._tables)
        for state, bound_s in zip(states, np.maximum(bounds_s, node.bound).tolist(), strict=True):
            if bound_s < cutoff:
                yield ScheduleNode(state, bound_s)

    def lower_bound(self, node: ScheduleNode) -> float:
        """Return the bound from critical paths and load."""
        return node.bound

    def complete(self, node: ScheduleNode) -> Incumbent[Schedule] | None:
        """Return the schedule once every operator has run."""
        if not all(node.state.done):
            return None
        events = node.state.events
        schedule = Schedule(
            runs=tuple(event for event in events if isinstance(event, Run)),
            transfers=tuple(event for event in events if isinstance(event, Transfer)),
        )
        return Incumbent(cost=schedule.cost_s(self.workload), solution=schedule)

    def greedy(self, node: ScheduleNode) -> Incumbent[Schedule] | None:
        """Complete the schedule greedily, see `greedy`; at the root also without splits, beside the known schedules."""
        states = [complete_greedily(node.state, self.workload, self._tables)]
        if not node.state.events and self.workload.splits:
            whole = replace(self.workload, splits=())
            states.append(complete_greedily(node.state, whole, schedule_tables(whole)))
        found = [self.complete(ScheduleNode(state, node.bound)) for state in states if state is not None]
        if not node.state.events:
            found += [Incumbent(cost=one.cost_s(self.workload), solution=one) for one in self._known]
        return min((one for one in found if one), key=lambda one: one.cost, default=None)

    def merit(self, node: ScheduleNode) -> Merit:
        """Compare nodes with equal operators done, equal homes that still matter, and equal data awaiting a consumer.

        All times and the memory in use are the values. No time counts below the start of the last addition. Memory that
        is released at a time to come must be equally large in both nodes, and peaks so far are values as well.
        """
        state, tables = node.state, self._tables
        waiting = [
            op
            for op, is_done in enumerate(state.done)
            if is_done and any(not state.done[to] and not state.sent[edge] for edge, to in tables.after[op])
        ]
        settled = [op for op, is_done in enumerate(state.done) if not is_done and state.home[op] != NOWHERE]
        sent = tuple(
            is_sent and not state.done[consumer]
            for is_sent, consumer in zip(state.sent, self.workload.edges[:, 1].tolist(), strict=True)
        )
        homes = tuple((op, state.home[op]) for op in waiting + settled)
        times = [*state.device_s, *(state.end_s[op] for op in waiting + settled)]
        # links and ports that may be exchanged for each other are compared in the order in which they are free
        times += [time for _, time in sorted(zip(tables.link_class, state.link_s, strict=True))]
        # Ends of open models matter as well, because a model ends no earlier than its last operator so far.
        times += self._ends_s(state)
        lent = sorted(
            (device, one.edge, one.num_bytes, one.end_s)
            for device, loans in enumerate(state.loans)
            for one in loans
            if state.last_s < one.end_s < math.inf
        )
        times += [end_s for *_, end_s in lent]
        return Merit(
            (state.done, sent, homes, tuple(one[:3] for one in lent)),
            (
                state.last_s,
                *(max(time, state.last_s) for time in times),
                self._settled_s(state),
                *state.used_bytes,
                *map(peak_bytes, state.loans),
            ),
        )

    def _ends_s(self, state: ScheduleState) -> list[float]:
        """Return the last end so far of every model that is not complete; their number follows from the key."""
        return [
            max((state.end_s[op] for op in ops if state.done[op]), default=0.0)
            for ops in self._tables.ops_of
            if not all(state.done[op] for op in ops)
        ]

    def _settled_s(self, state: ScheduleState) -> float:
        """Return the weighted completion times of the complete models [s]."""
        weights: list[float] = self.workload.weights.tolist()
        return sum(
            weights[model] * max(state.end_s[op] for op in ops)
            for model, ops in enumerate(self._tables.ops_of)
            if all(state.done[op] for op in ops)
        )
