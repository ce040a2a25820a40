"""Placements that teams choose by hand, each with the best layouts that it allows: the baselines of an answer.

- colocated: every module on all devices, one after another (verl's default: one resource pool for all roles).
- halves: what generates on one half of the hosts and all else on the other (OpenRLHF's engines beside its trainers);
  without generation, the modules that send embeddings on one half and the last receiver on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.place.search.branch_and_bound import search_placements
from tuner.place.search.problem import PlacementProblem
from tuner.place.search.state import State, bonds_of, finish_s
from tuner.place.workload import EMBEDDINGS, GENERATE
from tuner.planners.engine.outcome import Known, Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A placement by hand.

    Attributes:
        name: Name of the baseline.
        meaning: Where each module is, in words.
        state: Placement with the best layouts found; None if nothing fits.
        step_time_s: Time of a step [s]; None if nothing fits, or nothing was found.
        fits: Whether it may fit: False if it is proven that nothing does, or that the file's rules forbid it.
    """

    name: str
    meaning: str
    state: State | None
    step_time_s: float | None
    fits: bool = True


def baselines_of(problem: PlacementProblem, *, time_s: float) -> tuple[Baseline, ...]:
    """Return both baselines, with their best layouts.

    Args:
        problem: Tables of the workload.
        time_s: Longest time of the search of each one's layouts [s].
    """
    rows = (
        ("colocated", "every module on all devices, one after another", _colocated(problem)),
        ("halves", _in_words(problem), _halves(problem)),
    )
    found = []
    for name, meaning, allowed in rows:
        state, fits = None, False
        if allowed is not None:
            outcome = search_placements(problem, limits=Limits(time_s=time_s), bonds=bonds_of(problem, allowed))
            state = outcome.best.solution if outcome.best else None
            fits = outcome.known is not Known.INFEASIBLE
        step_s = None if state is None else finish_s(problem, state)
        found.append(Baseline(name=name, meaning=meaning, state=state, step_time_s=step_s, fits=fits))
    return tuple(found)


def _colocated(problem: PlacementProblem) -> dict[int, tuple[int, ...]]:
    return dict.fromkeys(problem.units, (problem.whole,))


def _first_half(problem: PlacementProblem) -> set[int]:
    """Return the units on the first half."""
    modules, edges = problem.workload.modules, problem.workload.edges
    generating = {problem.unit_of[at] for at, module in enumerate(modules) if module.job == GENERATE}
    sending = {problem.unit_of[edge.source] for edge in edges if edge.sends == EMBEDDINGS}
    return generating or sending


def _in_words(problem: PlacementProblem) -> str:
    names = [problem.workload.modules[unit].name for unit in sorted(_first_half(problem))]
    return f"{', '.join(names) or 'nothing'} on one half of the hosts, all else on the other"


def _halves(problem: PlacementProblem) -> dict[int, tuple[int, ...]] | None:
    first, halves = _first_half(problem), _two_halves(problem)
    if not first or first == set(problem.units) or halves is None:
        return None
    return {unit: (halves[0 if unit in first else 1],) for unit in problem.units}


def _two_halves(problem: PlacementProblem) -> tuple[int, int] | None:
    """Return the cells of both halves of the hosts, or of the first two groups; None if hosts can't be divided."""
    pools = problem.pools
    if len(pools) > 1:
        return problem.cells_of_hosts(0, range(pools[0].hosts)), problem.cells_of_hosts(1, range(pools[1].hosts))
    if pools[0].hosts > 1:
        middle = pools[0].hosts // 2
        return problem.cells_of_hosts(0, range(middle)), problem.cells_of_hosts(0, range(middle, pools[0].hosts))
    if pools[0].cells % 2 == 0:
        low = (1 << pools[0].cells // 2) - 1
        return low, problem.whole & ~low
    return None


def coarse_placement(problem: PlacementProblem, known: Sequence[State], *, time_s: float) -> State | None:
    """Return a placement in which every module has all devices or one of both halves, as a start to improve.

    Args:
        problem: Tables of the workload.
        known: Placements that it must not be worse than.
        time_s: Longest time of the search [s].
    """
    halves = _two_halves(problem)
    if halves is None:
        return None
    bonds = bonds_of(problem, dict.fromkeys(problem.units, (problem.whole, *halves)))
    limits = Limits(time_s=time_s, gap=0.01)
    best = search_placements(problem, limits=limits, bonds=bonds, known=known).best
    return best.solution if best else None
