"""Compare sharding plans with the optimum of the same cost model, in step time and in planning time.

    python -m benchmarks.judges.planner [--models llama3-8b ...] [--meshes data=2,model=4 ...] [--layers N] [--json]

The graphs are the first layers of models' training steps, as few as show every kind of layer. They are planned on
meshes of H100 hosts in three ways: by D-Rec in every order, by axis descent from each of these plans, and by a mixed
integer program for HiGHS (`tuner.planners.sharding.sharding_milp`), which proves a lower bound on the step time of
every plan. All planners see the same mesh: its axes as they are, or with `--parts` their prime factors. The default is
all models of the catalog on four meshes of 4 to 64 devices.

Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from costmodels.job.model_catalog import find_model, model_names
from costmodels.job.proxy_job import least_layers, with_layers
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.device_mesh import DeviceMesh, mesh_of
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import Plan, cost_of
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tuner.planners.engine.outcome import Limits
from tuner.planners.planning import PlannerOptions, plan_graph
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.recursive import ORDERS, recursive_plan, refine_mesh, whole
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms

MESHES = ("data=2,model=2", "data=2,model=4", "data=4,model=4", "data=8,model=8")
DEVICES_PER_HOST = 8

Found = TypeVar("Found")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    parser = benchmark_parser("judges.planner", __doc__)
    parser.add_argument("--models", nargs="+", default=list(model_names()), help="models of the catalog (all)")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), help=f"axes of each mesh ({' '.join(MESHES)})")
    parser.add_argument("--layers", type=count_at_least(1), help="layers of each model (as few as show every kind)")
    parser.add_argument(
        "--sequences", type=count_at_least(1), default=16, help="sequences of a step, of at most 4096 tokens each (16)"
    )
    parser.add_argument("--parts", action="store_true", help="split axes into their prime factors")
    parser.add_argument(
        "--time", type=count_at_least(1), default=60, help="time limit of HiGHS for each graph, in seconds (60)"
    )
    return answer("planner", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute a row for each graph and mesh, and a summary of all rows."""
    graphs = {model: graph_of(model, given.layers, given.sequences) for model in given.models}
    meshes = [mesh_from(text) for text in given.meshes]
    rows = []
    for model, graph in graphs.items():
        for mesh in meshes:
            rows.append(
                {"model": model, "mesh": mesh.in_words, "operators": len(graph.ops), **row_of(graph, mesh, given)}
            )
            tell(f"{model} on {mesh.in_words}: {rows[-1]['over_bound']:.4f} of the bound")
    return {
        "settings": {name: value for name, value in vars(given).items() if name != "json"},
        "rows": rows,
        "together": _summarise(rows),
    }


def show(figures: dict[str, Any]) -> None:
    """Print the rows and the summary as tables."""
    publish(figures["rows"], as_json=False)
    publish(figures["together"], as_json=False)


def graph_of(model: str, num_layers: int | None, sequences: int) -> Graph:
    """Build the graph of the first layers of a model's training step.

    Raises:
        ConfigError: The catalog has no such model.
    """
    spec = find_model(model)
    spec = with_layers(spec, num_layers or least_layers(spec))
    length = min(4096, spec.learned_positions or 4096)
    job = TrainingJob(model=spec, sequence_length=length, global_batch_size=sequences, precision="bf16")
    return transformer_graph(job, micro_batch_size=sequences)


def row_of(graph: Graph, mesh: DeviceMesh, given: argparse.Namespace) -> dict[str, Any]:
    """Plan one graph on one mesh with HiGHS and with every planner, and compare the plans with the proven bound."""
    own_mesh, levels = (refine_mesh if given.parts else whole)(mesh)
    outcome, highs_s = _time_call(lambda: shard_by_milp(graph, own_mesh, limits=Limits(time_s=given.time)))
    row: dict[str, Any] = {"HiGHS": outcome.known.name.lower(), "HiGHS_s": highs_s}

    def told(name: str, plan: Plan, seconds: float) -> None:
        row[name] = cost_of(plan).step_time_s / outcome.bound
        row[f"{name}_s"] = seconds

    for order in ORDERS:
        plan, halving_s = _time_call(lambda order=order: recursive_plan(graph, own_mesh, levels, order=order))  # type: ignore[misc] # mypy sees no default
        told(order, plan, halving_s)
        found, descent_s = _time_call(lambda plan=plan: descend(plan, ShardingTerms(graph, own_mesh)).plan)  # type: ignore[misc] # mypy sees no default
        told(f"{order}+descent", found, halving_s + descent_s)
    options = PlannerOptions(whole_axes=not given.parts)
    found, seconds = _time_call(lambda: plan_graph(graph, mesh, options).plan)
    row["over_bound"] = cost_of(found).step_time_s / outcome.bound
    row["seconds"] = seconds
    return row


def _summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarise each planner: median and worst of its plans over the bound, and its seconds beside those of HiGHS."""
    names = {f"D-Rec {order}": order for order in ORDERS}
    names |= {f"descent from {order}": f"{order}+descent" for order in ORDERS}
    columns = {name: (key, f"{key}_s") for name, key in names.items()} | {"all orders": ("over_bound", "seconds")}
    return [
        {
            "planner": name,
            "graphs": len(rows),
            "median": statistics.median(row[over] for row in rows),
            "worst": max(row[over] for row in rows),
            "median_s": statistics.median(row[seconds] for row in rows),
            "HiGHS_over_it": statistics.median(row["HiGHS_s"] / row[seconds] for row in rows),
        }
        for name, (over, seconds) in columns.items()
    ]


def _time_call(work: Callable[[], Found]) -> tuple[Found, float]:
    began_s = time.perf_counter()
    found = work()
    return found, time.perf_counter() - began_s


def mesh_from(text: str) -> DeviceMesh:
    """Build the mesh of that name on as few hosts as hold it."""
    try:
        hosts = -(-_count_devices(text) // DEVICES_PER_HOST)
    except ValueError:
        raise ConfigError("must be axes with sizes", key="--meshes", value=text, nearest=MESHES[1]) from None
    return mesh_of(text, find_cluster("dgx-h100", hosts), option="--meshes")


def _count_devices(text: str) -> int:
    count = 1
    for part in text.split(","):
        count *= int(part.partition("=")[2])
    return count


if __name__ == "__main__":
    raise SystemExit(main())
