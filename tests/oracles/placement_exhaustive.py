"""Best placement by trying everything: every set of hosts or of parts of a host, option and order of tasks.

It shares the durations and transfers with the product, and nothing of its search: neither like hosts, nor bounds, nor
the order of starts.
"""

from __future__ import annotations

import itertools
import math

from tuner.place.options import WHOLE
from tuner.place.workload import WEIGHTS


def best_step_s(problem):
    """Return the least step time of all placements; inf if there is none."""
    units = problem.units
    choices = [
        [(option, cells) for option in problem.options[unit] for cells in _sets(problem, option.kind)] for unit in units
    ]
    orders = list(itertools.permutations(range(len(problem.tasks))))
    best = math.inf
    for combination in itertools.product(*choices):
        chosen = {unit: option for unit, (option, _) in zip(units, combination, strict=True)}
        where = {unit: cells for unit, (_, cells) in zip(units, combination, strict=True)}
        if _may_share(problem, where) and _fits(problem, chosen, where):
            best = min(best, *(_step_s(problem, chosen, where, order) for order in orders))
    return best


def _sets(problem, kind):
    if kind.pool == WHOLE:
        return [problem.whole]
    hosts = [(first, last) for pool, first, last in problem.hosts if pool == kind.pool]
    if kind.cells == problem.pools[kind.pool].cells:
        return [
            sum(1 << cell for first, last in some for cell in range(first, last))
            for some in itertools.combinations(hosts, kind.hosts)
        ]
    return [
        sum(1 << cell for cell in some)
        for first, last in hosts
        for some in itertools.combinations(range(first, last), kind.cells)
    ]


def _may_share(problem, where):
    """Whether modules share devices as gangs, pools and the file's lists demand."""
    workload, unit_of = problem.workload, problem.unit_of
    pools = itertools.combinations(where, 2) if workload.pools else []
    gangs = [{unit_of[module] for module in members} for members in problem.tasks]
    alike = [*pools, *(pair for gang in gangs for pair in itertools.combinations(gang, 2))]
    return (
        all(where[one] == where[other] or not where[one] & where[other] for one, other in alike)
        and all(len({where[unit_of[module]] for module in group}) == 1 for group in workload.together)
        and all(not where[unit_of[one]] & where[unit_of[other]] for one, other in workload.apart)
    )


def _fits(problem, chosen, where):
    for cell in range(problem.num_cells):
        here = [unit for unit in chosen if where[unit] >> cell & 1]
        capacity = problem.pools[problem.pool_of_cell[cell]].capacity_bytes
        for members in problem.tasks:
            at_work = {problem.unit_of[module] for module in members}
            need = sum(chosen[unit].busy_bytes if unit in at_work else chosen[unit].idle_bytes for unit in here)
            if any(unit in at_work for unit in here) and need > capacity:
                return False
    return True


def _step_s(problem, chosen, where, order):
    free_s = [0.0] * problem.num_cells
    end_s = {}
    for task in order:
        units = {problem.unit_of[module] for module in problem.tasks[task]}
        start_s = 0.0
        for edge in problem.workload.edges:
            source, target = problem.task_of[edge.source], problem.task_of[edge.target]
            if target != task or source == task or not problem.workload.waits_for(edge):
                continue
            if source not in end_s:
                return math.inf
            start_s = max(start_s, end_s[source] + problem.edge_s(edge, *_ends(problem, edge, chosen, where)))
        cells = [cell for cell in range(problem.num_cells) if any(where[unit] >> cell & 1 for unit in units)]
        start_s = max(start_s, *(free_s[cell] for cell in cells))
        end_s[task] = start_s + problem.task_time_s(task, chosen, where)
        for cell in cells:
            free_s[cell] = end_s[task]
    step_s = max(end_s.values())
    for edge in problem.workload.edges:
        if edge.sends == WEIGHTS:
            both_s = max(end_s[problem.task_of[edge.source]], end_s[problem.task_of[edge.target]])
            step_s = max(step_s, both_s + problem.weights_s(edge, *_ends(problem, edge, chosen, where)))
    return step_s


def _ends(problem, edge, chosen, where):
    source, target = problem.unit_of[edge.source], problem.unit_of[edge.target]
    return chosen[source], where[source], chosen[target], where[target]
