"""Measure the search time of sharding planners, as in TOAST's figure 9.

    python -m benchmarks.speed.search_time [--tables steps ended devices axes layers milp] [--steps gemma_2b unet ...]
        [--automap-states 40] [--milp-s 300] [--repeats 3] [--quick] [--json]

    steps     each step on data=4,model=2: TOAST's analysis, its unseeded search (four trees), its search with seeds
              and polishing, D-Rec by compromise price, descent from that, and the AutoMap-like search
    ended     one tree of TOAST and one of the AutoMap-like search on shallow steps, each until it finds nothing better
    devices   TOAST's unseeded search of Gemma 2B on 8, 32, 128 and 512 devices of two axes
    axes      the same search on 8 devices of one, two and three axes
    layers    the same search with 9, 18 and 36 layers on data=4,model=2
    milp      TOAST beside HiGHS on the same graph, of Gemma 2B with few layers, until HiGHS has proved the optimum or
              its time is over

The AutoMap-like search (`automap`) grows one tree until it has seen a number of states or finds nothing better. Its
time for as many states as TOAST saw is projected from the CPU seconds of one state: those of propagation, in the
cheapest form that Shardy can run, and of pricing. Reading plans back is left out, because only this comparison needs
it.

CPU seconds of this process are compared, as medians of `--repeats`, since other programs change wall times; both are
printed. The last table lists the targets, which are about full steps; --quick measures small steps in a minute. JAX
must be installed. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from costmodels.sharding.device_mesh import DeviceMesh, mesh_of
from costmodels.sharding.graph import Graph
from costmodels.sharding.plan import cost_of
from hardware.cluster_file import find_cluster
from tuner.planners.engine.outcome import Limits, Stop
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.recursive import recursive_plan, whole
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms
from tuner.planners.toast.compatibility import compatibility
from tuner.planners.toast.named_dims import named_dims
from tuner.planners.toast.search import Toast, ToastOptions, toast_plan

Result = TypeVar("Result")

TABLES = ("steps", "ended", "devices", "axes", "layers", "milp")
STEPS = ("gemma_2b", "graph_network", "unet", "moe", "decode")
QUICK_STEPS = ("gemma_small", "graph_network_small")
LAYERS, QUICK_LAYERS = (9, 18, 36), (1, 2)
MILP_LAYERS, QUICK_MILP_LAYERS = (1, 2, 4), (1,)
MESH = "data=4,model=2"
DEVICES = ("data=4,model=2", "data=8,model=4", "data=16,model=8", "data=64,model=8")
AXES = ("data=8", "data=4,model=2", "data=2,sequence=2,model=2")
UNSEEDED = ToastOptions(is_seeded=False, is_polished=False)

MOST_SEARCH_S = 10.0
MOST_ANALYSIS_S = 2.0
LEAST_OVER_AUTOMAP = 25.0
LEAST_OVER_MILP = 10.0
FLAT = 1.5
"""Largest growth over all numbers of devices that still counts as flat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed(Generic[Result]):
    """Result and median times of some runs.

    Attributes:
        result: Result of the last run.
        cpu_s: CPU time of this process [s].
        wall_s: Wall time of the run [s].
    """

    result: Result
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Traced:
    """One step to plan.

    Attributes:
        name: Name of the step in the tables.
        program: Trace of the step; only JAX knows its type.
        graph: Graph of the step.
        trace_s: CPU time of tracing and of making the graph [s].
    """

    name: str
    program: Any
    graph: Graph
    trace_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    parser = benchmark_parser("speed.search_time", __doc__)
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, default=list(TABLES), help=f"tables to compute ({' '.join(TABLES)})"
    )
    parser.add_argument("--steps", nargs="+", help=f"programs of the zoo ({' '.join(STEPS)})")
    parser.add_argument("--layers", type=count_at_least(1), nargs="+", help=f"numbers of layers of Gemma 2B {LAYERS}")
    parser.add_argument(
        "--milp-layers", type=count_at_least(1), nargs="+", help=f"numbers of layers for HiGHS {MILP_LAYERS}"
    )
    parser.add_argument("--milp-s", type=count_at_least(1), default=300, help="time limit of HiGHS in seconds (300)")
    parser.add_argument(
        "--automap-states",
        type=count_at_least(1),
        default=40,
        help="maximum number of states of the AutoMap-like search (40)",
    )
    parser.add_argument("--repeats", type=count_at_least(1), default=3, help="timings of TOAST and D-Rec (3)")
    parser.add_argument("--quick", action="store_true", help="measure small steps")
    return answer("search_time", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the tables and the targets."""
    given.steps = given.steps or list(QUICK_STEPS if given.quick else STEPS)
    given.layers = given.layers or list(QUICK_LAYERS if given.quick else LAYERS)
    given.milp_layers = given.milp_layers or list(QUICK_MILP_LAYERS if given.quick else MILP_LAYERS)
    typical = min(given.layers, key=lambda layers: abs(layers - 18))
    tables: dict[str, list[dict[str, Any]]] = {}
    if "steps" in given.tables:
        tables["steps"] = [_step_row(traced_step(name), given) for name in given.steps]
    if "ended" in given.tables:
        tables["ended"] = [_ended_row(step) for step in shallow(is_small=given.quick)]
    if {"devices", "axes"} & set(given.tables):
        graph = gemma(typical, is_small=given.quick).graph
        for table, meshes in (("devices", DEVICES), ("axes", AXES)):
            if table in given.tables:
                tables[table] = [_search_row(graph, typical, mesh, given.repeats) for mesh in meshes]
    if "layers" in given.tables:
        tables["layers"] = [
            _search_row(gemma(layers, is_small=given.quick).graph, layers, MESH, given.repeats)
            for layers in given.layers
        ]
    if "milp" in given.tables:
        tables["milp"] = [
            _milp_row(gemma(layers, is_small=given.quick).graph, layers, given) for layers in given.milp_layers
        ]
    settings = {name: value for name, value in vars(given).items() if name != "json"}
    return {"settings": settings, **tables, "targets": [] if given.quick else targets(tables)}


def show(figures: dict[str, Any]) -> None:
    """Print the tables and the targets."""
    for name in (*TABLES, "targets"):
        if figures.get(name):
            print(f"{name}:")
            publish(figures[name], as_json=False)
            print()


def targets(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compare each target with its measurement; targets without a measurement are left out."""
    found: list[dict[str, Any]] = []

    def ask(what: str, measured: float, *, least: float = -math.inf, most: float = math.inf) -> None:
        bound = f"at least {least:g}" if least > -math.inf else f"at most {most:.4g}"
        found.append({"target": what, "asked": bound, "measured": measured, "is_met": least <= measured <= most})

    for row in tables.get("steps", []):
        if row["step"].startswith("gemma"):
            ask(f"{row['step']}: seconds of analysis", row["analysis_s"], most=MOST_ANALYSIS_S)
            ask(f"{row['step']}: seconds of search", row["search_s"], most=MOST_SEARCH_S)
        if row["step"].startswith(("unet", "graph_network")):
            ask(f"{row['step']}: times faster than AutoMap-like", row["automap_ratio"], least=LEAST_OVER_AUTOMAP)
    if "devices" in tables:
        seconds = [row["search_s"] for row in tables["devices"]]
        ask("all devices: seconds over those of the fewest", max(seconds) / seconds[0], most=FLAT)
    for row in tables.get("ended", []):
        if row["step"].startswith(("U-Net", "graph network")):
            ask(f"{row['step']}: times faster, both to their ends", row["ratio"], least=LEAST_OVER_AUTOMAP)
    for table, scale in (("axes", "axes"), ("layers", "layers")):
        rows = tables.get(table, [])
        if len(rows) > 1:
            # Rows are in increasing order of the scale.
            first, last = rows[0], rows[-1]
            # At most linear growth is asked for.
            growth = last["search_s"] / first["search_s"]
            ask(f"{table}: seconds over those of the fewest", growth, most=last[scale] / first[scale])
    for row in tables.get("milp", []):
        ask(f"{row['layers']} layers: times faster than the MILP", row["milp_ratio"], least=LEAST_OVER_MILP)
    return found


def timed(work: Callable[[], Result], repeats: int = 1) -> Timed[Result]:
    """Run a function several times; return its last result and the median times."""
    cpu_s, wall_s = [], []
    for _ in range(repeats):
        began = time.process_time(), time.perf_counter()
        result = work()
        cpu_s.append(time.process_time() - began[0])
        wall_s.append(time.perf_counter() - began[1])
    return Timed(result=result, cpu_s=statistics.median(cpu_s), wall_s=statistics.median(wall_s))


def traced_step(name: str) -> Traced:
    """Trace a program of the zoo."""
    from benchmarks.zoo import FACTORIES  # noqa: PLC0415 # JAX may be missing

    return _trace(name, FACTORIES[name])


def gemma(layers: int, *, is_small: bool = False) -> Traced:
    """Trace Gemma 2B with a number of layers."""
    from benchmarks.zoo import GEMMA_2B, SMALL_GEMMA  # noqa: PLC0415 # JAX may be missing

    sizes = SMALL_GEMMA if is_small else GEMMA_2B
    return _trace(f"{layers} layers", replace(sizes, layers=layers).train_program)


def shallow(*, is_small: bool = False) -> Iterator[Traced]:
    """Yield steps with full widths and few layers, since a search hardly depends on depth when layers are cut alike."""
    from benchmarks.zoo import GEMMA_2B, SMALL_GEMMA, GraphNetwork, UNet  # noqa: PLC0415 # JAX may be missing

    if is_small:
        yield _trace("small layer", SMALL_GEMMA.train_program)
        return
    yield _trace("Gemma 2B, 2 layers", replace(GEMMA_2B, layers=2).train_program)
    network = GraphNetwork(nodes=2048, edges=65_536, features=128, latent=2048, hidden=1024, hidden_layers=3, steps=2)
    yield _trace("graph network, 2 steps", network.train_program)
    images = UNet(batch=64, side=64, channels=(256, 512), blocks=1, groups=32, heads=32)
    yield _trace("U-Net, 2 levels of a block", images.train_program)


def _trace(name: str, factory: Callable[[], Any]) -> Traced:
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415 # JAX may be missing
    from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415 # as above

    began_s = time.process_time()
    function, shapes, donated = factory()
    program = trace_function(function, *shapes, donated=donated)
    graph = graph_of(program)
    return Traced(name=name, program=program, graph=graph, trace_s=time.process_time() - began_s)


def _mesh(text: str) -> DeviceMesh:
    """Build a mesh of whole axes on hosts of eight devices."""
    devices = math.prod(int(part.partition("=")[2]) for part in text.split(","))
    return whole(mesh_of(text, find_cluster("dgx-a100", max(devices // 8, 1)), option="--meshes"))[0]


def _step_row(step: Traced, given: argparse.Namespace) -> dict[str, Any]:
    """Time every planner on one step."""
    from benchmarks.papers.automap import automap_plan  # noqa: PLC0415 # JAX may be missing

    graph, mesh = step.graph, _mesh(MESH)
    analysis = timed(lambda: compatibility(named_dims(graph)), given.repeats)
    search = timed(lambda: toast_plan(graph, mesh, UNSEEDED), given.repeats)
    tell(f"{step.name}: TOAST {search.cpu_s:.2f} s, {_count_states(search.result):,} states")
    levels = whole(mesh)[1]
    d_rec = timed(lambda: recursive_plan(graph, mesh, levels), given.repeats)
    descent = timed(lambda: descend(d_rec.result, ShardingTerms(graph, mesh)))
    seeded = timed(lambda: toast_plan(graph, mesh, given=[d_rec.result]))
    tell(f"{step.name}: with seeds {seeded.cpu_s:.2f} s")
    options = replace(UNSEEDED, searches=1)
    limits = Limits(nodes=given.automap_states)
    # The peer is timed once, since each of its states takes a propagation by Shardy.
    peer = timed(lambda: automap_plan(step.program, mesh, options, limits=limits, graph=graph)).result
    spent, (tree,) = peer.spent, peer.trees
    tell(f"{step.name}: AutoMap-like {spent.evaluation_s:.3f} s a state, {spent.evaluations} states")
    # The comparison projects the peer's cost of one state to TOAST's number of states.
    num_states = _count_states(search.result)
    return {
        "step": step.name,
        "operators": len(graph.ops),
        "trace_s": step.trace_s,
        "analysis_s": analysis.cpu_s,
        "search_s": search.cpu_s,
        "search_wall_s": search.wall_s,
        "states": num_states,
        "seeded_s": seeded.cpu_s,
        "d_rec_s": d_rec.cpu_s,
        "descent_s": descent.cpu_s,
        "automap_states": spent.evaluations,
        "automap_has_ended": tree.stop is not Stop.NODES,
        "automap_propagation_s": spent.propagation_s / spent.evaluations,
        "automap_pricing_s": spent.cost_s / spent.evaluations,
        "automap_pipeline_s": peer.pipeline_s,
        "automap_measured_s": spent.total_s,
        "automap_projected_s": spent.evaluation_s * num_states,
        "automap_ratio": spent.evaluation_s * num_states / search.cpu_s,
        "automap_ratio_propagation": spent.propagation_s / spent.evaluations * num_states / search.cpu_s,
        "search_cost": search.result.steps[-1].cost,
        "automap_cost": peer.cost,
    }


def _ended_row(step: Traced) -> dict[str, Any]:
    """Grow one tree of each search to its end, with the same seed."""
    from benchmarks.papers.automap import automap_plan  # noqa: PLC0415 # JAX may be missing

    graph, mesh, options = step.graph, _mesh(MESH), replace(UNSEEDED, searches=1)
    search = timed(lambda: toast_plan(graph, mesh, options))
    peer = automap_plan(step.program, mesh, options, graph=graph)
    automap_s = peer.spent.total_s
    tell(f"{step.name}: TOAST {search.cpu_s:.2f} s, AutoMap-like {automap_s:.2f} s, {peer.spent.evaluations} states")
    costs = [cost_of(plan) for plan in (search.result.plan, peer.plan)]
    return {
        "step": step.name,
        "operators": len(graph.ops),
        "search_s": search.cpu_s,
        "states": _count_states(search.result),
        "automap_s": automap_s,
        "automap_states": peer.spent.evaluations,
        "automap_reading_s": peer.spent.reading_s,
        "ratio": automap_s / search.cpu_s,
        "unsharded_s": search.result.steps[0].figures.step_time_s,
        "search_step_s": costs[0].step_time_s,
        "automap_step_s": costs[1].step_time_s,
        "search_gib": costs[0].peak_memory_bytes / 2**30,
        "automap_gib": costs[1].peak_memory_bytes / 2**30,
        "automap_over_search": peer.cost / search.result.steps[-1].cost,
    }


def _search_row(graph: Graph, layers: int, text: str, repeats: int) -> dict[str, Any]:
    """Time TOAST's unseeded search of one graph on one mesh."""
    mesh = _mesh(text)
    analysis = timed(lambda: compatibility(named_dims(graph)), repeats)
    search = timed(lambda: toast_plan(graph, mesh, UNSEEDED), repeats)
    tell(f"{layers} layers on {text}: TOAST {search.cpu_s:.2f} s")
    return {
        "layers": layers,
        "mesh": text,
        "devices": mesh.num_devices,
        "axes": len(mesh.sizes),
        "analysis_s": analysis.cpu_s,
        "search_s": search.cpu_s,
        "search_wall_s": search.wall_s,
        "states": _count_states(search.result),
        "states_per_s": _count_states(search.result) / search.cpu_s,
        "step_s": search.result.steps[-1].figures.step_time_s,
    }


def _milp_row(graph: Graph, layers: int, given: argparse.Namespace) -> dict[str, Any]:
    """Time TOAST and HiGHS on one graph."""
    mesh = _mesh(MESH)
    search = timed(lambda: toast_plan(graph, mesh, UNSEEDED), given.repeats)
    milp = timed(lambda: shard_by_milp(graph, mesh, limits=Limits(time_s=given.milp_s)))
    tell(f"{layers} layers: TOAST {search.cpu_s:.2f} s, MILP {milp.cpu_s:.2f} s")
    best = milp.result.best
    return {
        "layers": layers,
        "operators": len(graph.ops),
        "search_s": search.cpu_s,
        "search_step_s": cost_of(search.result.plan).step_time_s,
        "milp_s": milp.cpu_s,
        "milp_wall_s": milp.wall_s,
        "milp_known": milp.result.known.name.lower(),
        "milp_step_s": None if best is None else best.cost,
        "milp_ratio": milp.cpu_s / search.cpu_s,
    }


def _count_states(found: Toast) -> int:
    return sum(len(tree.nodes) for tree in found.trees)


if __name__ == "__main__":
    raise SystemExit(main())
