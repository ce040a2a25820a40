"""Answer of `meshtune place`: the placement, its timeline, the bound, and the baselines beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from costmodels.job.parallel_config import DEGREES
from hardware.io.errors import ConfigError
from tuner.place.search.baselines import Baseline, baselines_of, coarse_placement
from tuner.place.search.branch_and_bound import PlacementSearch, improve, search_placements
from tuner.place.search.problem import PlacementProblem, placement_problem
from tuner.place.search.program import solve_program
from tuner.place.search.state import State, finish_s, options_chosen
from tuner.place.timeline import at_work_s, devices_in_words, events_of, makes_tokens
from tuner.place.workload import Workload
from tuner.planners.engine.outcome import Known, Limits, Outcome, gap_of

BASELINE_SHARE = 0.1
"""Share of the time limit in which the layouts of each baseline are searched."""

PROGRAM_SHARE = 0.2
"""Share of the time limit in which HiGHS solves the program of a small problem."""

COARSE_SHARE = 0.15
"""Share of the time limit in which placements on halves of the cluster are searched, to begin with a good one."""

IMPROVING_SHARE = 0.3
"""Share of the time limit in which the best placement so far is improved before branch and bound."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """Answer for one workload.

    Attributes:
        problem: Tables of the workload.
        outcome: Outcome of the search.
        baselines: Placements by hand, and that of HiGHS for a small problem.
        before_s: Time of the baselines and of improving the best of them, before branch and bound [s].
        stages: Times before branch and bound at which a placement was known, and its gap to the root's bound.
    """

    problem: PlacementProblem
    outcome: Outcome[State]
    baselines: tuple[Baseline, ...]
    before_s: float
    stages: tuple[tuple[float, float], ...]

    @property
    def search_s(self) -> float:
        """Time of the whole search [s]."""
        return self.before_s + self.outcome.seconds

    @property
    def state(self) -> State | None:
        """Best placement found; None without one."""
        return self.outcome.best.solution if self.outcome.best else None

    @property
    def step_time_s(self) -> float:
        """Time of its step [s]; inf without one."""
        return self.outcome.best.cost if self.outcome.best else math.inf

    def seconds_to_gap(self, gap: float) -> float | None:
        """Return the time after which the search had come within a gap of its bound [s]; None if it never did."""
        found = [*self.stages, *((self.before_s + one.seconds, one.gap) for one in self.outcome.trace)]
        return next((seconds for seconds, reached in found if reached <= gap), None)


def place(
    workload: Workload,
    *,
    time_s: float,
    gap: float,
    on_progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Search the best placement of a workload.

    Args:
        workload: Modules and their cluster.
        time_s: Longest time of the search [s]; pricing comes before it.
        gap: Gap to the lower bound at which the search ends.
        on_progress: Function that is told what takes seconds.
        clock: Clock in seconds.

    Raises:
        ConfigError: A module fits on no set of devices.
    """
    problem = placement_problem(workload, on_progress)
    for unit in problem.units:
        if not problem.options[unit]:
            _refuse(problem, unit)
    begin_s = clock()
    bound_s = PlacementSearch(problem).root().bound
    stages: list[tuple[float, float]] = []

    def best_of(states: Sequence[State]) -> State:
        """Return the fastest placement, and record its time."""
        best = min(states, key=lambda state: finish_s(problem, state))
        stages.append((clock() - begin_s, finish_s(problem, best)))
        return best

    on_progress("searching layouts of the baselines")
    baselines = baselines_of(problem, time_s=BASELINE_SHARE * time_s)
    known = [one.state for one in baselines if one.state is not None]
    longest_s = min((finish_s(problem, state) for state in known), default=math.inf)
    coarse = coarse_placement(problem, known, time_s=COARSE_SHARE * time_s)
    known += [coarse] if coarse is not None else []
    if known:
        best_of(known)
        highs = _by_program(problem, longest_s, time_s=PROGRAM_SHARE * time_s)
        baselines = (*baselines, *highs)
        known += [one.state for one in highs if one.state is not None]
        enough_s = bound_s / max(1 - gap, 1e-9)
        improved = improve(problem, best_of(known), enough_s=enough_s, time_s=IMPROVING_SHARE * time_s, clock=clock)
        known = [best_of([improved])]
    on_progress("searching placements")
    before_s = clock() - begin_s
    left_s = max(time_s - before_s, BASELINE_SHARE * time_s)
    outcome = search_placements(problem, limits=Limits(time_s=left_s, gap=gap), known=known, clock=clock)
    return Answer(
        problem=problem,
        outcome=outcome,
        baselines=baselines,
        before_s=before_s,
        stages=tuple((seconds, gap_of(cost_s, bound_s)) for seconds, cost_s in stages),
    )


def _by_program(problem: PlacementProblem, longest_s: float, *, time_s: float) -> tuple[Baseline, ...]:
    """Return the placement that HiGHS finds in its time, if the problem is small and a baseline fits."""
    if math.isinf(longest_s):
        return ()
    outcome = solve_program(problem, longest_s=longest_s, limits=Limits(time_s=time_s))
    if outcome is None or outcome.best is None:
        return ()
    meaning = "mixed integer program over aligned sets of hosts, in a fifth of the time"
    return (Baseline(name="highs", meaning=meaning, state=outcome.best.solution, step_time_s=outcome.best.cost),)


def _refuse(problem: PlacementProblem, unit: int) -> None:
    module = problem.workload.modules[unit]
    devices = [kind.devices for kind in problem.kinds]
    if module.devices is not None and module.devices not in devices:
        raise ConfigError(
            "is the size of no set of devices",
            key=f"modules.{module.name}.devices",
            value=module.devices,
            nearest=f"one of {', '.join(map(str, sorted(set(devices))))}",
        )
    raise ConfigError(
        f"fits on no set of up to {max(devices)} devices, with any layout that its batch, its model and `layout` allow",
        key=f"modules.{module.name}",
        nearest="more hosts, fewer fixed degrees, or a batch with more divisors",
    )


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as an object."""
    problem, state, outcome = answer.problem, answer.state, answer.outcome
    found = state is not None
    return {
        "name": problem.workload.name,
        "devices": problem.workload.cluster.num_devices,
        "known": outcome.known.name.lower(),
        "stop": outcome.stop.name.lower(),
        "step_time_s": answer.step_time_s if found else None,
        "lower_bound_s": outcome.bound if math.isfinite(outcome.bound) else None,
        "gap": outcome.gap if found else None,
        "search_s": answer.search_s,
        "nodes": outcome.nodes,
        "tokens_per_s": makes_tokens(problem) / answer.step_time_s if found else None,
        "devices_held": at_work_s(problem, state, answer.step_time_s) if state else None,
        "overlap_steps": problem.workload.overlap_steps,
        "modules": [module_json(problem, state, at) for at in range(len(problem.unit_of))] if state else [],
        "timeline": [
            {key: value for key, value in asdict(event).items() if key != "cells"}
            for event in (events_of(problem, state) if state else ())
        ],
        "baselines": [
            {"name": one.name, "meaning": one.meaning, "step_time_s": one.step_time_s} for one in answer.baselines
        ],
    }


def module_json(problem: PlacementProblem, state: State, module: int) -> dict[str, Any]:
    """Return one module of a placement as an object."""
    unit = problem.unit_of[module]
    option, task = options_chosen(problem, state)[unit], problem.task_of[module]
    own = problem.workload.modules[module]
    config = option.layout.config
    return {
        "name": own.name,
        "job": own.job,
        "model": own.model.name,
        "devices": option.kind.devices,
        "where": devices_in_words(problem, state.where[unit]),
        "layout": config.values((*DEGREES, "recompute")),
        "beside": _beside(problem, state, module),
        "shares_devices_with": _sharing(problem, state, module),
        "start_s": state.start_s[task],
        "end_s": state.end_s[task],
        "run_s": option.times_s[problem.place_in_unit[module]],
        "moves_s": option.moves_s[problem.place_in_unit[module]],
        "states_leave": option.leaves,
        "idle_bytes": option.idle_bytes,
        "busy_bytes": option.busy_bytes,
        "sequences_at_once": option.layout.concurrency or None,
    }


def _beside(problem: PlacementProblem, state: State, module: int) -> list[str]:
    """Return the modules that run at the same time on other devices."""
    own = problem.task_of[module]
    return [
        other.name
        for at, other in enumerate(problem.workload.modules)
        for task in [problem.task_of[at]]
        if at != module and min(state.end_s[own], state.end_s[task]) - max(state.start_s[own], state.start_s[task]) > 0
    ]


def _sharing(problem: PlacementProblem, state: State, module: int) -> list[str]:
    """Return the modules of which some device is also this module's."""
    own = state.where[problem.unit_of[module]]
    return [
        other.name
        for at, other in enumerate(problem.workload.modules)
        if at != module and state.where[problem.unit_of[at]] & own
    ]


def is_proven(answer: Answer) -> bool:
    """Return whether no placement of the family is faster."""
    return answer.outcome.known is Known.OPTIMAL


def check_answer(answer: Answer) -> None:
    """Check that the answer is no worse than its baselines, and that its cost is that of its timeline."""
    state = answer.state
    if state is None:
        return
    assert finish_s(answer.problem, state) == answer.step_time_s, "the step time is that of the timeline"
    slower = [one for one in answer.baselines if one.step_time_s is not None]
    assert all(answer.step_time_s <= one.step_time_s for one in slower if one.step_time_s is not None), (
        "no baseline is faster than the answer"
    )
