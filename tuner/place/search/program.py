"""Placement problem as a mixed integer program, solved by HiGHS: a baseline for small clusters.

Variables and constraints:

- x[u, o, S] is 1 if unit u has option o on the cells S; one each. Sets are aligned blocks of hosts, and of a host's
  cells, which is a part of the family of branch and bound.
- s[t] is the start of task t, d[t] its duration, the sum of x times the option's time; C is at least every s + d.
- s[t'] >= s[t] + d[t] where t' waits for t. What is sent takes no time here; the answer is priced with it.
- y[t, t'] is 1 if t runs before t'. Two tasks with a common cell c run in that order: with a[u, c] the sum of the x
  that hold c, s[t'] >= s[t] + d[t] - M (3 - y - a[u, c] - a[u', c]), and the other way round with 1 - y.
- memory: on each cell and for each task, the idle bytes of all units and the further bytes of the units at work fit.

Gangs, and rules on who shares devices, are left out: such problems have no program.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from tuner.place.options import WHOLE, SetKind
from tuner.place.search.problem import PlacementProblem
from tuner.place.search.state import State, bits_of, finish_s, scheduled
from tuner.planners.engine.mixed_integer import MixedInteger, Terms
from tuner.planners.engine.outcome import Limits, Outcome

MOST_VARIABLES = 2500
"""Most sets and options of all units together for which a program is written."""


def solve_program(problem: PlacementProblem, *, longest_s: float, limits: Limits) -> Outcome[State] | None:
    """Solve the program of a small problem; None for one that is larger, or has gangs or rules.

    Args:
        problem: Tables of the workload.
        longest_s: Time of a step that some placement takes, which no better one exceeds [s].
        limits: Limits of HiGHS.
    """
    workload = problem.workload
    if any(len(units) > 1 for units in problem.units_of) or workload.pools or workload.together or workload.apart:
        return None
    program = _PlacementProgram(problem, longest_s)
    return program.solve(limits) if program.is_small else None


def _blocks(problem: PlacementProblem, kind: SetKind) -> list[int]:
    """Return the aligned sets of a kind, as bits."""
    if kind.pool == WHOLE:
        return [problem.whole]
    hosts = [(first, last) for pool, first, last in problem.hosts if pool == kind.pool]
    if kind.cells == problem.pools[kind.pool].cells:
        firsts = {*range(0, len(hosts) - kind.hosts + 1, kind.hosts), len(hosts) - kind.hosts}
        return [
            sum(1 << cell for first, last in hosts[at : at + kind.hosts] for cell in range(first, last))
            for at in sorted(firsts)
        ]
    return [
        sum(1 << cell for cell in range(begin, begin + kind.cells))
        for first, last in hosts
        for begin in range(first, last - kind.cells + 1, kind.cells)
    ]


class _PlacementProgram:
    """Integer program of one problem."""

    def __init__(self, problem: PlacementProblem, longest_s: float) -> None:
        self.problem = problem
        self.longest_s = longest_s
        self.choices = {
            unit: [
                (number, cells)
                for number, option in enumerate(problem.options[unit])
                for cells in _blocks(problem, option.kind)
            ]
            for unit in problem.units
        }
        self.is_small = sum(map(len, self.choices.values())) <= MOST_VARIABLES
        self.program = MixedInteger()

    def solve(self, limits: Limits) -> Outcome[State]:
        """Add all variables and constraints, and solve."""
        tasks = len(self.problem.tasks)
        self.chosen = {
            unit: self.program.variables((len(choices),), upper=1.0, integer=True)
            for unit, choices in self.choices.items()
        }
        self.start = self.program.variables((tasks,), upper=self.longest_s)
        self.end = self.program.variables(())
        for unit in self.choices:
            self.program.add([(var, 1.0) for var in self.chosen[unit]], at_least=1.0, at_most=1.0)
        # of each unit and cell, the choices that hold the cell
        self.holding: dict[int, dict[int, Terms]] = {unit: defaultdict(list) for unit in self.choices}
        for unit, choices in self.choices.items():
            for var, (_, cells) in zip(self.chosen[unit], choices, strict=True):
                for cell in bits_of(cells):
                    self.holding[unit][cell].append((var, 1.0))
        self._times()
        self._orders()
        self._memory()
        self.program.cost([(self.end, 1.0)])
        return self.program.solve(limits, self._read)

    def _duration(self, task: int, factor: float) -> Terms:
        (module,) = self.problem.tasks[task]
        unit = self.problem.unit_of[module]
        options = self.problem.options[unit]
        return [
            (var, factor * self.problem.module_time_s(module, options[number]))
            for var, (number, _) in zip(self.chosen[unit], self.choices[unit], strict=True)
        ]

    def _times(self) -> None:
        """Let a step end after every task, and a task begin after those that it waits for."""
        for task, waits in enumerate(self.problem.before):
            self.program.add([(self.end, 1.0), (self.start[task], -1.0), *self._duration(task, -1.0)], at_least=0.0)
            for before in {one for one, _ in waits}:
                row = [(self.start[task], 1.0), (self.start[before], -1.0), *self._duration(before, -1.0)]
                self.program.add(row, at_least=0.0)

    def _orders(self) -> None:
        """Let two tasks with a common cell run one after the other."""
        most = self.longest_s
        for one, other in itertools.combinations(range(len(self.problem.tasks)), 2):
            first = self.program.variables((), upper=1.0, integer=True)
            units = [self.problem.units_of[task][0] for task in (one, other)]
            for cell in range(self.problem.num_cells):
                both = [(var, -most) for unit in units for var, _ in self.holding[unit][cell]]
                forth = [(self.start[other], 1.0), (self.start[one], -1.0), *self._duration(one, -1.0), *both]
                self.program.add([*forth, (first, -most)], at_least=-3 * most)
                back = [(self.start[one], 1.0), (self.start[other], -1.0), *self._duration(other, -1.0), *both]
                self.program.add([*back, (first, most)], at_least=-2 * most)

    def _memory(self) -> None:
        """Let the units on each cell fit while each task runs."""
        for cell, task in itertools.product(range(self.problem.num_cells), range(len(self.problem.tasks))):
            row: Terms = []
            for unit, choices in self.choices.items():
                at_work = unit in self.problem.units_of[task]
                for var, (number, cells) in zip(self.chosen[unit], choices, strict=True):
                    option = self.problem.options[unit][number]
                    if cells >> cell & 1:
                        row.append((var, option.busy_bytes if at_work else option.idle_bytes))
            room = self.problem.pools[self.problem.pool_of_cell[cell]].capacity_bytes
            self.program.add([(var, size / room) for var, size in row], at_most=1.0)

    def _read(self, values: NDArray[np.float64]) -> tuple[float, State]:
        """Return the placement that the variables stand for, with the time of its step."""
        chosen, where = {}, {}
        for unit, choices in self.choices.items():
            chosen[unit], where[unit] = choices[int(np.argmax(values[self.chosen[unit]]))]
        # tasks stand after those that they wait for, which settles starts at the same time
        order = sorted(
            range(len(self.problem.tasks)), key=lambda task: (round(float(values[self.start[task]]), 6), task)
        )
        state = scheduled(self.problem, chosen, where, order)
        return finish_s(self.problem, state), state
