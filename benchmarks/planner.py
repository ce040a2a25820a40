"""D-Rec beside the optimum of the same cost model: seconds, and by how much its plans are slower.

    python -m benchmarks.planner [--layers 1 2 4] [--json]

The first layers of a model's training step are planned on one mesh, by D-Rec in every order and by a mixed integer
program for HiGHS, which proves a bound that no plan is below (`tuner.planners.sharding_milp`). Both see the same mesh:
its axes as they are, or with `--parts` their prime factors, as D-Rec cuts them.

Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.timing import answer, count_at_least, median_s, publish, tell
from costmodels.device_mesh import DeviceMesh
from costmodels.frontends.transformer import transformer_graph
from costmodels.graph import Graph
from costmodels.job import TrainingJob
from costmodels.model_catalog import find_model
from costmodels.plan import PlanCost, cost_of
from hardware.cluster import find_cluster
from tuner.planners.outcome import Limits
from tuner.planners.recursive import ORDERS, recursive_plan, refined, whole
from tuner.planners.sharding_milp import shard_by_milp
from tuner.sharding_plans import mesh_of


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="llama3-8b", help="of the catalog (llama3-8b)")
    parser.add_argument("--layers", type=count_at_least(1), nargs="+", default=[1, 2, 4], help="how many (1 2 4)")
    parser.add_argument("--sequences", type=count_at_least(1), default=8, help="of a step, 4096 tokens each (8)")
    parser.add_argument("--cluster", default="dgx-h100", help="of the catalog (dgx-h100)")
    parser.add_argument("--hosts", type=count_at_least(1), default=1, help="of the cluster (1)")
    parser.add_argument("--mesh", default="data=2,model=4", help="its axes (data=2,model=4)")
    parser.add_argument("--parts", action="store_true", help="cut axes into their prime factors")
    parser.add_argument("--time", type=count_at_least(1), default=120, help="seconds for HiGHS (120)")
    parser.add_argument("--repeats", type=count_at_least(1), default=3, help="timings of D-Rec (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return answer("planner", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The rows of all numbers of layers."""
    mesh = mesh_of(given.mesh, find_cluster(given.cluster, given.hosts))
    rows = []
    for num_layers in given.layers:
        graph = graph_of(given.model, num_layers, given.sequences)
        tell(f"{num_layers} layers: {len(graph.ops)} operators")
        rows += rows_of(graph, num_layers, mesh, given)
    return {"settings": {name: value for name, value in vars(given).items() if name != "json"}, "rows": rows}


def show(figures: dict[str, Any]) -> None:
    """Prints them as a table."""
    publish(figures["rows"], as_json=False)


def graph_of(model: str, num_layers: int, sequences: int) -> Graph:
    """The first layers of a model's training step.

    Raises:
        ConfigError: the catalog has no such model.
    """
    job = TrainingJob(model=find_model(model), sequence_length=4096, global_batch_size=sequences, precision="bf16")
    return transformer_graph(job, micro_batch_size=sequences, num_layers=num_layers)


def rows_of(graph: Graph, num_layers: int, mesh: DeviceMesh, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What HiGHS proves of one graph, and every order of D-Rec."""
    own_mesh, levels = (refined if given.parts else whole)(mesh)
    began_s = time.perf_counter()
    outcome = shard_by_milp(graph, own_mesh, limits=Limits(time_s=given.time))
    seconds = time.perf_counter() - began_s

    def row(planner: str, seconds: float, cost: PlanCost | None) -> dict[str, Any]:
        return {
            "layers": num_layers,
            "operators": len(graph.ops),
            "planner": planner,
            "seconds": seconds,
            "step_ms": None if cost is None else 1e3 * cost.step_time_s,
            "communication_ms": None if cost is None else 1e3 * cost.comm_s,
            "over_bound": None if cost is None or outcome.bound <= 0 else cost.step_time_s / outcome.bound,
            "peak_gib": None if cost is None else cost.peak_memory_bytes / 2**30,
        }

    known = outcome.known.name.lower()
    yield row(f"HiGHS ({known})", seconds, None if outcome.best is None else cost_of(outcome.best.solution))
    for order in ORDERS:
        found_s = median_s(lambda order=order: recursive_plan(graph, own_mesh, levels, order=order), given.repeats)  # type: ignore[misc] # mypy sees no default
        yield row(f"D-Rec {order}", found_s, cost_of(recursive_plan(graph, own_mesh, levels, order=order)))


if __name__ == "__main__":
    raise SystemExit(main())
