"""Measure the time to plan a Gemma 2B training step, by its number of layers and by the devices of the mesh.

    python -m benchmarks.speed.planning_time [--layers 9 18 36] [--meshes data=4,model=2 ...] [--json]

There is a row for each number of layers on the first mesh, and for each further mesh at the number nearest to 18. It
times the graph of the traced step, D-Rec by compromise price, and descent from its plan. Target: D-Rec under 1 s for 18
layers (about 7,500 operators) on 2 cores, linear in layers and flat in devices. JAX must be installed.

Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, median_s, publish, tell
from costmodels.sharding.device_mesh import mesh_of
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import cost_of
from hardware.cluster_file import find_cluster
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.recursive import recursive_plan, whole
from tuner.planners.sharding.sharding_terms import ShardingTerms

MESHES = ("data=4,model=2", "data=16,model=8", "data=64,model=8")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status."""
    parser = benchmark_parser("speed.planning_time", __doc__)
    parser.add_argument(
        "--layers",
        type=count_at_least(1),
        nargs="+",
        default=[9, 18, 36],
        help="numbers of layers of the step (9 18 36)",
    )
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), help=f"axes of each mesh ({' '.join(MESHES)})")
    parser.add_argument("--repeats", type=count_at_least(1), default=3, help="timings of D-Rec (3)")
    return answer("planning_time", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the rows."""
    first, *others = given.meshes
    typical = min(given.layers, key=lambda layers: abs(layers - 18))
    rows = []
    for layers in given.layers:
        graph, trace_s, graph_s = _graph(layers)
        for mesh in [first, *(others if layers == typical else ())]:
            rows.append({"layers": layers, "trace_s": trace_s, "graph_s": graph_s, **_row(graph, mesh, given.repeats)})
            tell(f"{layers} layers on {mesh}: D-Rec {rows[-1]['d_rec_s']:.2f} s")
    return {"settings": {name: value for name, value in vars(given).items() if name != "json"}, "rows": rows}


def show(figures: dict[str, Any]) -> None:
    """Print the rows as a table."""
    publish(figures["rows"], as_json=False)


def _graph(layers: int) -> tuple[Graph, float, float]:
    """Build the graph of a number of layers; return it with the seconds of tracing and of making the graph."""
    from benchmarks.zoo import GEMMA_2B  # noqa: PLC0415 # JAX may be missing
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415 # as above

    began_s = time.perf_counter()
    function, shapes, donated = replace(GEMMA_2B, layers=layers).train_program()
    program = trace_function(function, *shapes, donated=donated)
    trace_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    graph = graph_of(program)
    return graph, trace_s, time.perf_counter() - began_s


def _row(graph: Graph, text: str, repeats: int) -> dict[str, Any]:
    """Plan one graph on one mesh of hosts with eight devices."""
    devices = math.prod(int(part.partition("=")[2]) for part in text.split(","))
    mesh, levels = whole(mesh_of(text, find_cluster("dgx-a100", max(devices // 8, 1)), option="--meshes"))
    d_rec_s = median_s(lambda: recursive_plan(graph, mesh, levels), repeats)
    plan = recursive_plan(graph, mesh, levels)
    began_s = time.perf_counter()
    found = descend(plan, ShardingTerms(graph, mesh)).plan
    descent_s = time.perf_counter() - began_s
    return {
        "operators": len(graph.ops),
        "mesh": mesh.in_words,
        "d_rec_s": d_rec_s,
        "descent_s": descent_s,
        "descent_over_d_rec": cost_of(found).step_time_s / cost_of(plan).step_time_s,
    }


if __name__ == "__main__":
    raise SystemExit(main())
