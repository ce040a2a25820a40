"""Answer of `meshtune place` for operators: the schedule, the bound, and the baselines beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hardware.arrays import FloatArray
from tuner.place.operators.graph_file import OperatorPlacement
from tuner.place.operators.timeline import events_of
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Incumbent, Known, Limits, Outcome
from tuner.planners.engine.workers import AbstractWorkers
from tuner.planners.scheduling.by_rule import by_heft, on_one_device
from tuner.planners.scheduling.memory import loans_of, peak_bytes
from tuner.planners.scheduling.problem import Schedule, Workload
from tuner.planners.scheduling.program import is_small, schedule_by_milp
from tuner.planners.scheduling.replay import replayed
from tuner.planners.scheduling.search import SchedulingProblem

PROGRAM_SHARE = 0.2
"""Share of the time limit in which HiGHS solves the program of a small problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Schedule beside the answer.

    Attributes:
        name: Name of the baseline.
        meaning: How it is made, in words.
        schedule: Schedule; None if none was found.
        cost_s: Weighted sum of the models' ends [s]; None without a schedule.
    """

    name: str
    meaning: str
    schedule: Schedule | None
    cost_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperatorAnswer:
    """Answer for the operators of one file.

    Attributes:
        placement: Problem.
        outcome: Outcome of the search.
        baselines: Schedules by rule, and that of HiGHS for a small problem.
        before_s: Time of the baselines, before the search [s].
    """

    placement: OperatorPlacement
    outcome: Outcome[Schedule]
    baselines: tuple[Baseline, ...]
    before_s: float

    @property
    def schedule(self) -> Schedule | None:
        """Best schedule found; None without one."""
        return self.outcome.best.solution if self.outcome.best else None

    @property
    def makespan_s(self) -> float:
        """Time when the last model ends [s]; inf without a schedule."""
        if self.schedule is None:
            return math.inf
        return float(self.schedule.completion_s(self.placement.workload).max())

    @property
    def is_proven(self) -> bool:
        """Whether no schedule costs less."""
        return self.outcome.known is Known.OPTIMAL


def place_operators(
    placement: OperatorPlacement,
    *,
    time_s: float,
    gap: float,
    workers: AbstractWorkers | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> OperatorAnswer:
    """Search the best schedule of a file's operators (Algorithm 1 of the paper in `tuner.planners.scheduling`).

    Args:
        placement: Problem.
        time_s: Longest time of baselines and search together [s].
        gap: Gap to the lower bound at which the search ends.
        workers: Processes that search together; None to search in this one alone.
        on_progress: Function that is told what takes seconds.
        clock: Clock in seconds; a function of a module if workers are other processes.
    """
    workload, begin_s = placement.workload, clock()
    on_progress("scheduling by rules")
    baselines = [
        _baseline("one device", "everything on the device on which it costs least", on_one_device(workload)),
        _baseline("heft", "one operator after the other, each where it ends first", by_heft(workload)),
    ]
    if is_small(workload):
        on_progress("solving the mixed integer program")
        found = _by_program(workload, PROGRAM_SHARE * time_s)
        beside = ", without splits and fusions" if workload.splits or workload.fusions else ""
        kept = ", with all memory kept to the end" if workload.working_bytes is not None else ""
        meaning = f"mixed integer program{beside}{kept}, in a fifth of the time"
        baselines.append(_baseline("highs", meaning, found))
    before_s = clock() - begin_s
    on_progress("searching schedules")
    known = [one.schedule for one in baselines if one.schedule is not None]
    limits = Limits(time_s=max(time_s - before_s, PROGRAM_SHARE * time_s), gap=gap)
    outcome = branch_and_bound(SchedulingProblem(workload, known=known), limits=limits, workers=workers, clock=clock)
    return OperatorAnswer(placement=placement, outcome=outcome, baselines=tuple(baselines), before_s=before_s)


def _by_program(workload: Workload, time_s: float) -> Incumbent[Schedule] | None:
    """Return the schedule that HiGHS finds without splits, fusions and released memory; None without one.

    HiGHS's tolerances are absolute, so it gets times in units of a usual operator.
    """
    unit_s = float(np.mean(workload.exec_s[np.isfinite(workload.exec_s)]))
    links = tuple(
        replace(
            link,
            link=replace(
                link.link,
                bandwidth_bytes_per_s=link.link.bandwidth_bytes_per_s * unit_s,
                latency_s=link.link.latency_s / unit_s,
            ),
        )
        for link in workload.links
    )
    working_bytes = np.zeros(workload.num_ops) if workload.working_bytes is None else workload.working_bytes
    scaled = replace(
        workload,
        exec_s=workload.exec_s / unit_s,
        links=links,
        splits=(),
        fusions=(),
        memory_bytes=workload.memory_bytes + working_bytes,
        working_bytes=None,
    )
    best = schedule_by_milp(scaled, limits=Limits(time_s=time_s)).best
    return None if best is None else replayed(workload, best.solution)


def _baseline(name: str, meaning: str, found: Incumbent[Schedule] | None) -> Baseline:
    return Baseline(
        name=name, meaning=meaning, schedule=found.solution if found else None, cost_s=found.cost if found else None
    )


def used_bytes(workload: Workload, schedule: Schedule) -> FloatArray:
    """Return the most memory that operators and the data of edges take on each device [D] [bytes].

    It is that of equation 6 where nothing is released.
    """
    used, home = np.zeros(workload.num_devices), schedule.devices()
    memory_of: dict[tuple[int, ...], float] = {
        (fusion.first, fusion.second): fusion.memory_bytes for fusion in workload.fusions
    }
    split_of = {(split.op, split.parts): split for split in workload.splits}
    for run in schedule.runs:
        own_bytes = memory_of[run.ops] if len(run.ops) > 1 else float(workload.memory_bytes[run.ops[0]])
        is_split = len(run.devices) > 1
        shares = split_of[run.ops[0], len(run.devices)].memory_shares(own_bytes) if is_split else (own_bytes,)
        used[list(run.devices)] += shares
    if workload.working_bytes is not None:
        used += [peak_bytes(loans) for loans in loans_of(workload, schedule)]
        return used
    inside = {run.ops for run in schedule.runs}
    for (source, target), size in zip(workload.edges.tolist(), workload.data_bytes.tolist(), strict=True):
        if (source, target) not in inside:
            used[list({home[source], home[target]})] += size
    return used


def answer_json(answer: OperatorAnswer) -> dict[str, Any]:
    """Return the answer as an object."""
    placement, outcome, schedule = answer.placement, answer.outcome, answer.schedule
    workload = placement.workload
    ends_s = schedule.completion_s(workload).tolist() if schedule else []
    return {
        "name": placement.name,
        "devices": workload.num_devices,
        "known": outcome.known.name.lower(),
        "stop": outcome.stop.name.lower(),
        "makespan_s": answer.makespan_s if schedule else None,
        "cost_s": outcome.best.cost if outcome.best else None,
        "lower_bound_s": outcome.bound if math.isfinite(outcome.bound) else None,
        "gap": outcome.gap if schedule else None,
        "search_s": answer.before_s + outcome.seconds,
        "nodes": outcome.nodes,
        "graphs": [
            {"name": name, "weight": weight, "end_s": end_s}
            for name, weight, end_s in zip(placement.graphs, workload.weights.tolist(), ends_s, strict=True)
        ]
        if schedule
        else [],
        "operators": operators_json(placement, schedule) if schedule else [],
        "used_bytes": used_bytes(workload, schedule).tolist() if schedule else [],
        "timeline": [event.as_json() for event in (events_of(placement, schedule) if schedule else ())],
        "baselines": [{"name": one.name, "meaning": one.meaning, "cost_s": one.cost_s} for one in answer.baselines],
        "captured": [{**asdict(one), "unknown": dict(one.unknown)} for one in placement.captured],
    }


def operators_json(placement: OperatorPlacement, schedule: Schedule) -> list[dict[str, Any]]:
    """Return each operator of a schedule as an object, in the order of their starts."""
    return [
        {
            "graph": placement.graphs[placement.workload.model_of[op]],
            "operator": placement.operators[op],
            "devices": list(run.devices),
            "fused_with": [placement.operators[other] for other in run.ops if other != op],
            "start_s": run.start_s,
            "end_s": run.end_s,
        }
        for run in sorted(schedule.runs, key=lambda run: (run.start_s, run.ops))
        for op in run.ops
    ]


def check_answer(answer: OperatorAnswer) -> None:
    """Check that the answer costs no more than its baselines and no less than its bound, and fits into memory."""
    best, workload = answer.outcome.best, answer.placement.workload
    if best is None:
        return
    assert answer.outcome.bound <= best.cost * (1 + 1e-9), "the bound is below every schedule"
    assert all(one.cost_s is None or best.cost <= one.cost_s for one in answer.baselines), "no baseline costs less"
    assert (used_bytes(workload, best.solution) <= workload.capacity_bytes * (1 + 1e-6)).all(), "everything fits"
