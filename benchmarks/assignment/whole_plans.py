"""Compare strategy assignment as a planner of whole graphs with the descent, TOAST, plans by hand and HiGHS.

    python -m benchmarks.assignment.whole_plans [--models llama3-8b ...] [--meshes data=2,model=4 ...] [--json]

A node is an operator, its strategies are all factors that the axes may serve, and edges hold the shares of moves
between two operators (`ShardingTerms.pairwise`). Their sum is no more than a step takes, because several readers of a
tensor may share a move, and so the assignment's plan is charged by `cost_of` like all others. Memory is not limited.
Seconds are CPU seconds of this process; HiGHS may take 60 s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.judges.planner import graph_of, mesh_from
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from costmodels.sharding.plan import Plan, cost_of
from tuner.planners.assignment.assigned import assigned_plan
from tuner.planners.engine.outcome import Limits
from tuner.planners.planning import PlannerOptions, plan_graph
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.recursive import whole
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms
from tuner.planners.toast.by_hand import plans_by_hand


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status."""
    parser = benchmark_parser("assignment.whole_plans", __doc__)
    parser.add_argument("--models", nargs="+", default=["llama3-8b", "mixtral-8x7b"], help="models of the catalog")
    parser.add_argument("--meshes", nargs="+", default=["data=2,model=4", "data=8,model=8"], help="axes of each mesh")
    parser.add_argument("--layers", type=count_at_least(1), help="layers of each model (as few as show every kind)")
    parser.add_argument("--time-limit", type=count_at_least(1), default=8, help="seconds of the assignment (8)")
    return answer("whole_plans", parser.parse_args(arguments), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute a row for each model, mesh and planner."""
    rows = []
    for model in given.models:
        for mesh in given.meshes:
            tell(f"{model} on {mesh}")
            rows += _rows(model, mesh, given)
    return {"rows": rows}


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    publish(figures["rows"], as_json=False)


def _rows(model: str, mesh_text: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan one graph on one mesh in every way."""
    graph, mesh = graph_of(model, given.layers, 16), mesh_from(mesh_text)
    own_mesh, _ = whole(mesh)
    terms = ShardingTerms(graph, own_mesh)

    def highs() -> Plan | None:
        """Return the plan of HiGHS, if it finds one in time."""
        best = shard_by_milp(graph, own_mesh, limits=Limits(time_s=60)).best
        return None if best is None else best.solution

    def planned(options: PlannerOptions) -> Plan:
        """Return the plan of one of the product's planners."""
        return plan_graph(graph, mesh, options).plan

    planners: dict[str, Callable[[], Plan | None]] = {
        "by hand": lambda: plans_by_hand(graph, own_mesh, memory_bytes=np.inf, most=1)[0],
        "descent": lambda: planned(PlannerOptions(whole_axes=True, overlap=False)),
        "toast": lambda: planned(PlannerOptions(planner="toast", whole_axes=True, overlap=False)),
        "assignment": lambda: assigned_plan(terms, Limits(time_s=given.time_limit)),
        "assignment, descent": lambda: descend(assigned_plan(terms, Limits(time_s=given.time_limit)), terms).plan,
        "HiGHS": highs,
    }
    rows = []
    for name, plan_by in planners.items():
        start_s = time.process_time()
        plan = plan_by()
        seconds = time.process_time() - start_s
        step_ms = None if plan is None else 1e3 * cost_of(plan).step_time_s
        rows.append({"model": model, "mesh": mesh_text, "planner": name, "step_ms": step_ms, "seconds": seconds})
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
