"""Measure the time until branch and bound has proven its optimum, beside HiGHS on the same problem in the same run.

    python -m benchmarks.papers.branch_and_bound [--workers N] [--limit SECONDS] [--json]

There are three tables. Pipelines: two kinds of devices serve eight stages of 96 equal layers, or of 61 layers of which
three are dense; also with memory that forces recomputation, and with fewer bounds than usual, which shows the work of
the search itself. Operators: random graphs of one or two models on unlike devices, with links that exclude each other.
The third table shows the gap over time of the slowest operator graph, alone and with workers.

The gain of several processes depends on the load of the machine, so the available parallel speed is measured at the
start. All times and sizes are made up, in the proportions of H100 and A100 hosts (assumed).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from hardware.link import Link
from tests.oracles.stage_milp import plan_stages_by_milp
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Limits, Outcome
from tuner.planners.engine.workers import AbstractBound, AbstractWorkers, ProcessWorkers
from tuner.planners.pipeline.stage_bounds import MOST_CAPS
from tuner.planners.pipeline.stage_search import StagesProblem
from tuner.planners.pipeline.stages import Pipeline
from tuner.planners.scheduling.problem import DeviceLink, Workload
from tuner.planners.scheduling.program import schedule_by_milp
from tuner.planners.scheduling.search import SchedulingProblem

GIB = 2.0**30
MOMENTS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Times at which the gap is reported [s]."""


def main() -> int:
    """Time the planners on both problems and return the exit status."""
    parser = benchmark_parser("papers.branch_and_bound", __doc__)
    parser.add_argument("--workers", type=count_at_least(1), default=2, help="worker processes (2)")
    parser.add_argument("--limit", type=count_at_least(1), default=60, help="seconds per search (60)")
    return answer("branch_and_bound", parser.parse_args(), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the rows of the three tables."""
    limits = Limits(time_s=given.limit)
    with ProcessWorkers(given.workers) as workers:
        workers.map(_spin, range(given.workers))  # start the processes before any search is timed
        ceiling = _ceiling(workers)
        stages = [_stage_row(name, pipeline, caps, limits, workers) for name, pipeline, caps in _pipelines()]
        schedules, traces = [], []
        for name, workload in _workloads():
            row, gaps = _schedule_row(name, workload, limits, workers)
            schedules.append(row)
            traces.extend(gaps)
    slowest = max(schedules, key=lambda row: row["seconds"])["problem"]
    return {
        "workers": given.workers,
        "limit_s": given.limit,
        "ceiling": ceiling,
        "stages": [_finite(row) for row in stages],
        "schedules": [_finite(row) for row in schedules],
        "gap_over_time": [_finite(gap) for gap in traces if gap["problem"] == slowest],
    }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with None for infinite gaps and costs, where nothing was found in time."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def show(figures: dict[str, Any]) -> None:
    """Print the tables, each below its title."""
    together = f"together: {figures['workers']} processes, which do {figures['ceiling']:.2f} times the work of one"
    for title, key in (
        (f"Pipelines; {together}", "stages"),
        ("Operators", "schedules"),
        ("Gap over time of the slowest", "gap_over_time"),
    ):
        print(f"{title}\n")
        publish(figures[key], as_json=False)
        print()


def _spin(_: int, __: AbstractBound) -> int:
    """Do a fixed amount of work that needs neither memory nor messages."""
    return sum(number % 7 for number in range(10_000_000))


def _ceiling(workers: AbstractWorkers) -> float:
    """Return the parallel speed-up of independent work on this machine, an upper bound for every search."""
    times_s = []
    for count in (1, workers.num_workers):
        begin_s = time.perf_counter()
        workers.map(_spin, range(count))
        times_s.append(time.perf_counter() - begin_s)
    alone_s, together_s = times_s
    return workers.num_workers * alone_s / together_s


def _stage_row(
    name: str, pipeline: Pipeline, most_caps: int, limits: Limits, workers: AbstractWorkers
) -> dict[str, Any]:
    tell(name)
    begin_s = time.perf_counter()
    problem = StagesProblem(pipeline, most_caps=most_caps)
    tables_s = time.perf_counter() - begin_s
    outcome = branch_and_bound(problem, limits=limits)
    together = branch_and_bound(problem, limits=limits, workers=workers)
    highs = plan_stages_by_milp(pipeline, limits=limits)
    return {
        "problem": name,
        "known": outcome.known.name,
        "step_s": _cost(outcome),
        "seconds": tables_s + outcome.seconds,
        "tables_s": tables_s,
        "nodes": outcome.nodes,
        "first_gap": outcome.trace[0].gap,
        "together_s": tables_s + together.seconds,
        **_beside(highs, outcome),
    }


def _schedule_row(
    name: str, workload: Workload, limits: Limits, workers: AbstractWorkers
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    tell(name)
    problem = SchedulingProblem(workload)
    outcome = branch_and_bound(problem, limits=limits)
    together = branch_and_bound(problem, limits=limits, workers=workers)
    highs = schedule_by_milp(workload, limits=limits)
    row = {
        "problem": name,
        "known": outcome.known.name,
        "cost_s": _cost(outcome),
        "seconds": outcome.seconds,
        "nodes": outcome.nodes,
        "nodes_per_s": outcome.nodes / max(outcome.seconds, 1e-9),
        "first_gap": outcome.trace[0].gap,
        "gap": outcome.gap,
        "together": together.known.name,
        "together_s": together.seconds,
        "together_nodes_per_s": together.nodes / max(together.seconds, 1e-9),
        "speed_up": outcome.seconds / together.seconds,
        **_beside(highs, outcome),
    }
    return row, list(_gaps(name, outcome, together))


def _cost(outcome: Outcome[Any]) -> float:
    return math.inf if outcome.best is None else outcome.best.cost


def _beside(highs: Outcome[Any], ours: Outcome[Any]) -> dict[str, Any]:
    """Return HiGHS's status and time, and its cost over ours."""
    ratio = _cost(highs) / _cost(ours) if ours.best is not None else math.nan
    return {"highs": highs.known.name, "highs_s": highs.seconds, "highs_over_ours": ratio}


def _gaps(name: str, alone: Outcome[Any], together: Outcome[Any]) -> Iterator[dict[str, Any]]:
    """Yield the gap of both searches at some moments, until both have ended."""
    for moment_s in MOMENTS_S:
        row: dict[str, Any] = {"problem": name, "seconds": moment_s}
        for who, outcome in (("alone", alone), ("together", together)):
            row[who] = min(entry.gap for entry in outcome.trace if entry.seconds <= moment_s or entry.nodes == 0)
        yield row
        if max(alone.seconds, together.seconds) <= moment_s:
            return


def _pipelines() -> Iterator[tuple[str, Pipeline, int]]:
    """Yield named pipelines with the number of caps of their bounds."""
    # The factors of the memory below force recomputation.
    dense = _pipeline(np.zeros(96, dtype=np.int64))
    mixed = _pipeline(np.repeat([0, 1], [3, 58]))
    yield "96 layers, 2 kinds, 8 stages", dense, MOST_CAPS
    yield "the same, 8 micro-batches", _with(dense, num_micro_batches=8), MOST_CAPS
    yield "the same, tight memory", _with(dense, capacity_bytes=dense.capacity_bytes * 0.68), MOST_CAPS
    yield "3 dense and 58 MoE layers", mixed, MOST_CAPS
    yield "the same, tight memory", _with(mixed, capacity_bytes=mixed.capacity_bytes * 0.75), MOST_CAPS
    shuffled = np.random.default_rng(0).integers(0, 3, 96)
    unlike = _with(_pipeline(shuffled), num_micro_batches=8)
    yield "96 layers of 3 types in disorder", unlike, MOST_CAPS
    yield "the same, bounds with 1 cap", unlike, 1


def _pipeline(layer_type: np.ndarray) -> Pipeline:
    """Build a pipeline of four stages on each of two kinds of devices, with 64 micro-batches.

    The second kind is 2.31 times as slow and has less memory.
    """
    num_types = int(layer_type.max()) + 1
    own_s = np.array([[0.0100], [0.0231]])
    layer_s = own_s * np.array([1.0, 1.37, 0.81])[:num_types]
    return Pipeline(
        layer_type=layer_type,
        layer_s=layer_s,
        recompute_s=layer_s / 3.1,
        first_s=own_s[:, 0] * 0.6,
        last_s=own_s[:, 0] * 1.9,
        stage_s=own_s[:, 0] * 0.05,
        hop_s=np.array([[0.0007, 0.0028], [0.0028, 0.0007]]),
        state_bytes=np.array([1.6, 3.1, 1.3])[:num_types] * GIB,
        kept_bytes=np.array([0.5, 0.6, 0.4])[:num_types] * GIB,
        recomputed_bytes=np.array([0.03, 0.04, 0.03])[:num_types] * GIB,
        first_bytes=2.0 * GIB,
        last_bytes=2.5 * GIB,
        working_bytes=1.5 * GIB,
        capacity_bytes=np.array([80.0, 48.0]) * GIB,
        supply=np.array([4, 4]),
        in_flight=8.0 - np.arange(8),
        num_micro_batches=64,
    )


def _with(pipeline: Pipeline, **changes: Any) -> Pipeline:
    return replace(pipeline, **changes)


def _workloads() -> Iterator[tuple[str, Workload]]:
    for num_ops, num_devices, num_models in ((6, 2, 1), (8, 2, 1), (8, 3, 1), (10, 3, 2), (12, 3, 2), (12, 4, 2)):
        name = f"{num_ops} operators, {num_devices} devices, {num_models} models"
        yield name, _workload(np.random.default_rng(num_ops), num_ops, num_devices, num_models)


def _workload(rng: np.random.Generator, num_ops: int, num_devices: int, num_models: int) -> Workload:
    """Draw a workload in which each operator takes the data of one or two before it.

    Devices of odd numbers are 2.3 times as slow.
    """
    model_of = np.arange(num_ops) % num_models
    edges = []
    for op in range(num_models, num_ops):
        # Edges lead to later operators of the same model only, which keeps each graph acyclic.
        earlier = np.flatnonzero(model_of[:op] == model_of[op])
        edges += [(int(u), op) for u in rng.choice(earlier, min(len(earlier), int(rng.integers(1, 3))), replace=False)]
    slowness = np.where(np.arange(num_devices) % 2, 2.3, 1.0)
    links = []
    for source, target in np.argwhere(~np.eye(num_devices, dtype=bool)).tolist():
        # Each pair of devices has two links of which one can be used at a time.
        for kind, bandwidth, latency_s in (("nvlink", 4.0, 0.05), ("pcie", 1.0, 0.1)):
            link = Link(kind=kind, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s, exclusive_group="one of both")
            links.append(DeviceLink(source=source, target=target, link=link))
    return Workload(
        model_of=model_of,
        weights=rng.uniform(0.5, 2.0, num_models),
        exec_s=rng.uniform(1.0, 4.0, (num_ops, 1)) * slowness,
        memory_bytes=rng.uniform(1.0, 3.0, num_ops),
        edges=np.array(edges, dtype=np.int64),
        data_bytes=rng.uniform(0.5, 6.0, len(edges)),
        capacity_bytes=np.full(num_devices, 6.0 * num_ops),
        links=tuple(links),
    )


if __name__ == "__main__":
    raise SystemExit(main())
