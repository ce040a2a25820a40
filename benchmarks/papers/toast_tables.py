"""Repeat the tables of TOAST's evaluation (Alabed et al. 2025, figures 8 and 10) with estimated step times.

    python -m benchmarks.papers.toast_tables [--quick] [--models T2B ...] [--clusters A100 ...] [--devices 8 ...]
        [--jobs 2] [--planners manual unseeded ...] [--seeds 3] [--prove SECONDS] [--automap STATES] [--json]

Each model of section 5.1, cluster and number of devices gives one row: step time and memory of plans by TOAST, by
people and by other planners. Meshes have two axes, data and model. For long sequences they have three, batch, seq and
model, as in figure 10: 2x32x2 for 32k tokens on 128 devices. Every axis cuts one dim of a tensor.

`unseeded` begins with nothing and is compared with `manual`, the best of all hand-written combinations. `seeded` has
all extensions that are added here. The time of every plan is the estimate of `costmodels.sharding.plan.cost_of` in
seconds. Memory is in GiB of a device, with a star if it exceeds the device's. With several seeds, `unseeded` is the run
with the median cost. `automap` stops after the number of states in `--automap`: each state takes a propagation by
Shardy, 0.1 to 0.3 s.

Products of float32 are priced as bf16 on TPUs, as XLA multiplies them there by default. JAX must be installed. Progress
goes to stderr.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers.toast_planners import OURS, PLANNERS, Problem, cell_of
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from benchmarks.support.workers import mapper
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from hardware.cluster import Cluster
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One program of the zoo.

    Attributes:
        factory: Name of its factory in the zoo.
        texts: Number of texts in a step if the sequence is long enough for an axis of its own; 0 for two axes.
    """

    factory: str
    texts: int = 0


MODELS: Mapping[str, Model] = {
    "T2B": Model(factory="gemma_2b"),
    "T2B-4k": Model(factory="gemma_2b_4k", texts=16),
    "T2B-8k": Model(factory="gemma_2b_8k", texts=8),
    "T2B-16k": Model(factory="gemma_2b_16k", texts=4),
    "T2B-32k": Model(factory="gemma_2b_32k", texts=2),
    "T2B-scan": Model(factory="gemma_2b_scan"),
    "T7B": Model(factory="gemma_7b"),
    "GNS": Model(factory="graph_network"),
    "GNS-8k": Model(factory="graph_network_8k"),
    "U-Net": Model(factory="unet_3b"),
    "ITX": Model(factory="itx"),
    "MoE": Model(factory="moe"),
    "Mixtral": Model(factory="mixtral"),
}
"""Models by the paper's names, and the mixture of experts."""

CLUSTERS: Mapping[str, str] = {"A100": "dgx-a100", "P100": "dgx-1-p100", "TPUv3": "tpu-v3"}
"""Clusters of the catalog by the paper's names."""

MODEL_WAYS = {8: 2, 32: 4, 128: 8}
"""Number of devices along the model axis of a mesh of two axes, by the number of devices."""

QUICK: Mapping[str, Sequence[Any]] = {"models": ("T2B-scan", "MoE", "ITX"), "clusters": ("A100",), "devices": (8,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Inputs of one row."""

    model: str
    cluster: str
    devices: int
    planners: tuple[str, ...]
    seeds: int
    prove_s: float
    automap_states: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status."""
    parser = benchmark_parser("papers.toast_tables", __doc__)
    parser.add_argument("--models", nargs="+", help=f"names of models ({' '.join(MODELS)})")
    parser.add_argument("--clusters", nargs="+", help=f"names of clusters ({' '.join(CLUSTERS)})")
    parser.add_argument(
        "--devices", nargs="+", type=int, help=f"devices of each mesh ({' '.join(map(str, MODEL_WAYS))})"
    )
    parser.add_argument(
        "--planners", nargs="+", default=list(PLANNERS), help=f"names of planners ({' '.join(PLANNERS)})"
    )
    parser.add_argument("--seeds", type=count_at_least(1), default=1, help="unseeded searches of each row (1)")
    parser.add_argument(
        "--prove", type=int, default=0, metavar="SECONDS", help="time limit of HiGHS for each small graph (0)"
    )
    parser.add_argument("--automap", type=count_at_least(0), default=0, help="states of the AutoMap-like search (0)")
    parser.add_argument("--jobs", type=count_at_least(1), default=1, help="worker processes (1)")
    parser.add_argument("--quick", action="store_true", help="plan three small graphs on eight A100")
    return answer("toast_tables", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute a row for each model, cluster and number of devices."""
    asked = QUICK if given.quick else {"models": MODELS, "clusters": CLUSTERS, "devices": MODEL_WAYS}
    models, clusters, devices = (
        _known(getattr(given, option) or list(asked[option]), known, f"--{option}")
        for option, known in (("models", MODELS), ("clusters", CLUSTERS), ("devices", MODEL_WAYS))
    )
    planners = tuple(_known(given.planners, PLANNERS, "--planners"))
    tasks = [
        Task(
            model=model,
            cluster=cluster,
            devices=count,
            planners=planners,
            seeds=given.seeds,
            prove_s=given.prove,
            automap_states=given.automap,
        )
        for model in models
        for cluster in clusters
        for count in devices
    ]
    rows = []
    with mapper(given.jobs) as mapped:
        for row in mapped(row_of, tasks):
            rows.append(row)
            tell(" ".join(f"{name}={text}" for name, text in _format_row(row).items()))
    return {"settings": {name: value for name, value in vars(given).items() if name != "json"}, "rows": rows}


def show(figures: dict[str, Any]) -> None:
    """Print the rows as a table."""
    publish([_format_row(row) for row in figures["rows"]], as_json=False)


def row_of(task: Task) -> dict[str, Any]:
    """Plan one model on one mesh with every planner."""
    cluster = _cluster(task.cluster, task.devices)
    graph = _with_units_of(cluster, _graph(MODELS[task.model].factory))
    mesh = mesh_for(MODELS[task.model], cluster, task.devices)
    problem = Problem(
        graph=graph,
        mesh=mesh,
        prove_s=task.prove_s,
        factory=MODELS[task.model].factory,
        automap_states=task.automap_states,
    )
    cells = {name: cell_of(name, problem) for name in task.planners if name != "unseeded"}
    if "unseeded" in task.planners:
        # The search is random: the median run represents it, and all times stay in the JSON output.
        runs = [cell_of("unseeded", replace(problem, seed=seed)) for seed in range(task.seeds)]
        found = sorted((run for run in runs if run is not None), key=_rank)
        times = [run["step_time_s"] for run in found]
        cells["unseeded"] = {**found[len(found) // 2], "runs_s": times, "fitting_runs": sum(r["fits"] for r in found)}
    # The last column marks rows where people's and other planners' plans all run out of memory.
    fitting = {name for name, cell in cells.items() if cell is not None and cell["fits"]}
    return {
        "model": task.model,
        "cluster": task.cluster,
        "devices": task.devices,
        "mesh": mesh.in_words,
        "operators": len(graph.ops),
        "device_gib": problem.memory_bytes / 2**30,
        "cells": {name: cells[name] for name in task.planners},
        "only_ours_fit": bool(fitting) and fitting <= set(OURS) and not set(cells) <= set(OURS),
    }


def mesh_for(model: Model, cluster: Cluster, devices: int) -> DeviceMesh:
    """Build a mesh of two axes, or of three for long sequences.

    Of three axes the model axis has 2 devices. The batch axis has at most the square root of the rest.
    """
    if not model.texts:
        ways = MODEL_WAYS[devices]
        return DeviceMesh(names=("data", "model"), sizes=(devices // ways, ways), cluster=cluster)
    rest = devices // 2
    # A power of two close to the square root shares the rest evenly between batch and sequence.
    batch = min(model.texts, 2 ** round(math.log2(rest) / 2))
    return DeviceMesh(names=("batch", "seq", "model"), sizes=(batch, rest // batch, 2), cluster=cluster)


def over_manual(row: Mapping[str, Any], ours_is: str = "unseeded") -> float | None:
    """Return a plan's time over the best manual plan's.

    It is infinite if only the manual plan fits, and 0 in the opposite case.
    """
    cells = row["cells"]
    ours, theirs = cells.get(ours_is), cells.get("manual")
    if ours is None or theirs is None:
        return None
    if ours["fits"] != theirs["fits"]:
        return 0.0 if ours["fits"] else math.inf
    return float(ours["step_time_s"] / theirs["step_time_s"])


def _rank(cell: Mapping[str, Any]) -> tuple[bool, float]:
    """Return the sort key of a cell: fitting plans first, then by step time."""
    return not cell["fits"], cell["step_time_s"]


def _format_row(row: Mapping[str, Any]) -> dict[str, Any]:
    cells = {name: _cell_text(cell) for name, cell in row["cells"].items()}
    ratios = {name: over_manual(row, name) for name in ("unseeded", "seeded")}
    seeded = row["cells"].get("seeded")
    return {
        "model": row["model"],
        "mesh": f"{row['cluster']} {row['mesh']}",
        **cells,
        **{f"{name}/manual": "-" if ratio is None else f"{ratio:.3f}" for name, ratio in ratios.items()},
        "gap": f"{seeded['gap']:.2f}" if seeded else "-",
        "only_ours": "yes" if row["only_ours_fit"] else "",
    }


def _cell_text(cell: Mapping[str, Any] | None) -> str:
    """Format seconds and GiB as `0.584,53`, followed by a star if the plan does not fit."""
    return "-" if cell is None else f"{cell['step_time_s']:.4g},{cell['gib']:.3g}{'' if cell['fits'] else '*'}"


@functools.lru_cache(maxsize=1)
def _graph(factory: str) -> Graph:
    from benchmarks.zoo import FACTORIES  # noqa: PLC0415 # JAX may be missing
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415 # as above
    from costmodels.sharding.fusion import unfused  # noqa: PLC0415 # as above

    function, shapes, donated = FACTORIES[factory]()
    return unfused(graph_of(trace_function(function, *shapes, donated=donated)))


def _with_units_of(cluster: Cluster, graph: Graph) -> Graph:
    """Return the graph with float32 as bf16 if the devices have no unit for float32."""
    try:
        cluster.devices[0].peak_flop_per_s("fp32")
    except ConfigError:
        ops = tuple(replace(op, precision="bf16") if op.precision == "fp32" else op for op in graph.ops)
        return replace(graph, ops=ops)
    return graph


def _cluster(name: str, devices: int) -> Cluster:
    one = find_cluster(CLUSTERS[name], 1)
    return one.with_hosts(max(devices // one.num_devices, 1))


def _known(chosen: Sequence[Any], known: Mapping[Any, Any], option: str) -> list[Any]:
    for one in chosen:
        if one not in known:
            raise ConfigError("is not in the tables", key=option, value=one, nearest=did_you_mean(one, map(str, known)))
    return list(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
