"""Let the planners compete: where do tree search or assignment ever beat the descent, by how much, in which time?

    python -m benchmarks.judges.contest [--kinds jax torch transformers catalog] [--programs gemma_2b ...]
        [--meshes data=2,model=4 ...] [--planners descent toast ...] [--json]

Programs are the zoo's and the referee's in JAX, the zoo's torch modules, models of transformers where it is installed,
and layers of all models of the catalog. Each is planned on meshes of H100 hosts whose axes cut one dim each, in these
ways:

- `by hand`: the cheapest of data parallelism, FSDP, Megatron's plan and their mixes;
- `recursive`: D-Rec;
- `descent`: the descent along the axes from both of these;
- `trees`: the same, and two of TOAST's trees of 200 states after it;
- `toast`: TOAST with its trees, seeds, edits and its own descent;
- `default`: what `plan_jax` and `plan_torch` do: the descent, another one from a short assignment, and the trees where
  collectives run beside compute;
- `assignment`: one strategy for each operator under costs of pairs of operators (`benchmarks/assignment`), and the
  descent from there, in at most 8 s.

All plans have the price of the product: the timeline of a step with overlap where a compiler fuses the program, and
the sum of all work elsewhere. Assignments are improved for overlap as the descent's plans are. Seconds are CPU seconds
of this process after tracing. A planner beats the descent where its step is faster by more than 0.1%, or where its plan
fits on a device and the descent's does not.

JAX and torch must be installed for their programs. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from benchmarks.judges.planner import graph_of as layers_of
from benchmarks.judges.planner import mesh_from
from benchmarks.support.timing import answer, benchmark_parser, publish, tell
from costmodels.job.model_catalog import model_names
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.overlap import overlaps, timeline_of
from costmodels.sharding.plan import Plan, cost_of
from hardware.device import GIB
from hardware.io.errors import ConfigError, did_you_mean
from tuner.planners.assignment.assigned import assigned_plan
from tuner.planners.engine.outcome import Limits
from tuner.planners.planning import ASSIGNED, EFFORT, PlannerOptions, plan_graph
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.hidden_moves import hide_moves
from tuner.planners.sharding.recursive import whole
from tuner.planners.sharding.sharding_terms import ShardingTerms
from tuner.planners.toast.by_hand import plans_by_hand

MESHES = ("data=2,model=4", "data=8,model=8", "a=2,b=2,c=2")
LEAST_GAIN = 1e-3
"""Share of a step by which a planner must be faster to count as faster."""
ASSIGNED_S = 8.0
"""CPU time of an assignment [s]."""
SEQUENCES = 16
"""Sequences of a step of the catalog's models."""
SIZES = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "num_hidden_layers": 2,
    "intermediate_size": 4096,
    "ffn_dim": 4096,
    "word_embed_proj_dim": 1024,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": 8,
    "n_positions": 512,
    "max_position_embeddings": 512,
}
"""Sizes of models of transformers, of those that a model's configuration has."""
TEXTS, TOKENS = 16, 512
"""Sequences of a step of these models, and their length."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Program on a mesh.

    Attributes:
        graph: Graph of one step.
        mesh: Mesh.
    """

    graph: Graph
    mesh: DeviceMesh

    @cached_property
    def own_mesh(self) -> DeviceMesh:
        """Mesh each of whose axes cuts one dim."""
        return whole(self.mesh)[0]

    @cached_property
    def memory_bytes(self) -> float:
        """Memory of a device [bytes]."""
        return float(min(device.memory_bytes for device in self.mesh.cluster.devices))

    def planned(self, **options: Any) -> Plan:
        """Return the plan of one of the product's planners."""
        return plan_graph(self.graph, self.mesh, PlannerOptions(whole_axes=True, **options)).plan

    def by_hand(self) -> Plan:
        """Return the cheapest plan by hand."""
        return plans_by_hand(self.graph, self.own_mesh, memory_bytes=self.memory_bytes, most=1)[0]

    def assigned(self) -> Plan:
        """Return the end of a descent from the assignment."""
        terms = ShardingTerms(self.graph, self.own_mesh)
        plan = descend(assigned_plan(terms, Limits(time_s=ASSIGNED_S)), terms).plan
        return hide_moves([plan], terms)[0] if overlaps(self.graph, self.mesh) else plan

    def step_s(self, plan: Plan) -> float:
        """Return the time of a step as the product tells it [s]."""
        cost = cost_of(plan)
        return timeline_of(plan, cost).step_time_s if overlaps(self.graph, self.mesh) else cost.step_time_s


PLANNERS: Mapping[str, Callable[[Problem], Plan]] = {
    "by hand": Problem.by_hand,
    "recursive": lambda problem: problem.planned(planner="recursive"),
    "descent": lambda problem: problem.planned(),
    "trees": lambda problem: problem.planned(effort=EFFORT),
    "default": lambda problem: problem.planned(
        assigned=ASSIGNED, effort=EFFORT if overlaps(problem.graph, problem.mesh) else 0
    ),
    "toast": lambda problem: problem.planned(planner="toast"),
    "assignment": Problem.assigned,
}
"""Planners by name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    return answer("contest", parser().parse_args(argv), measure, show)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    found = benchmark_parser("judges.contest", __doc__)
    found.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of programs (all)")
    found.add_argument("--programs", nargs="+", default=[], help="names of programs (all)")
    found.add_argument("--meshes", nargs="+", default=list(MESHES), help=f"axes of each mesh ({' '.join(MESHES)})")
    found.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS), help="planners (all)")
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute a row for each program, mesh and planner, and where a planner beats the descent.

    Raises:
        ConfigError: There is no such program or mesh.
    """
    builders = {name: (kind, build) for kind in given.kinds for name, build in KINDS[kind]()}
    for name in given.programs:
        if name not in builders:
            raise ConfigError(
                "must be a program", key="--programs", value=name, nearest=did_you_mean(name, list(builders))
            )
    meshes = [mesh_from(text) for text in given.meshes]
    rows = []
    for name in given.programs or builders:
        kind, build = builders[name]
        graph = build()
        for mesh in meshes:
            problem = Problem(graph=graph, mesh=mesh)
            told = {"program": name, "kind": kind, "mesh": mesh.in_words, "operators": len(graph.ops)}
            rows += [told | _row(problem, planner) for planner in dict.fromkeys(("descent", *given.planners))]
            tell(f"{name} on {mesh.in_words}: " + _line(rows[-len({"descent", *given.planners}) :]))
    beats = _beating(rows)
    return {"rows": rows, "beats": beats, "together": _together(rows, beats)}


def show(figures: dict[str, Any]) -> None:
    """Print where the descent is beaten, and each planner's summary."""
    if figures["beats"]:
        publish(figures["beats"], as_json=False)
    publish(figures["together"], as_json=False)


def _row(problem: Problem, planner: str) -> dict[str, Any]:
    began_s = time.process_time()
    plan = PLANNERS[planner](problem)
    seconds = time.process_time() - began_s
    needs_bytes = cost_of(plan).peak_memory_bytes
    return {
        "planner": planner,
        "step_ms": 1e3 * problem.step_s(plan),
        "gib": needs_bytes / GIB,
        "fits": needs_bytes <= problem.memory_bytes,
        "seconds": seconds,
    }


def _line(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of a case in words; a star marks plans that do not fit."""
    return ", ".join(
        f"{row['planner']} {row['step_ms']:.6g}{'' if row['fits'] else '*'} ms {row['seconds']:.1f} s" for row in rows
    )


def _beating(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each planner, program and mesh where the descent is beaten."""
    of_descent = {(row["program"], row["mesh"]): row for row in rows if row["planner"] == "descent"}
    found = []
    for row in rows:
        other = of_descent[row["program"], row["mesh"]]
        is_faster = row["step_ms"] < other["step_ms"] * (1 - LEAST_GAIN) and row["fits"] >= other["fits"]
        if is_faster or row["fits"] > other["fits"]:
            told = {key: row[key] for key in ("program", "mesh", "operators", "planner")}
            told |= {"step_ms": row["step_ms"], "descent_ms": other["step_ms"]}
            told |= {"gain_percent": 100 * (1 - row["step_ms"] / other["step_ms"])}
            fits = "both" if row["fits"] and other["fits"] else "alone" if row["fits"] else "neither"
            found.append(told | {"fits": fits, "seconds": row["seconds"], "descent_s": other["seconds"]})
    return found


def _together(rows: Sequence[dict[str, Any]], beats: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarise each planner beside the descent."""
    of_descent = {(row["program"], row["mesh"]): row for row in rows if row["planner"] == "descent"}
    found = []
    for planner in dict.fromkeys(row["planner"] for row in rows):
        own = [row for row in rows if row["planner"] == planner]
        ratios = [row["step_ms"] / of_descent[row["program"], row["mesh"]]["step_ms"] for row in own]
        wins = [each for each in beats if each["planner"] == planner]
        found.append(
            {
                "planner": planner,
                "cases": len(own),
                "beats": len(wins),
                "programs": len({each["program"] for each in wins}),
                "most_percent": max((each["gain_percent"] for each in wins), default=0.0),
                "loses": sum(ratio > 1 + LEAST_GAIN for ratio in ratios),
                "mean_step": statistics.geometric_mean(ratios),
                "worst_step": max(ratios),
                "fits": sum(row["fits"] for row in own),
                "seconds": sum(row["seconds"] for row in own),
                "median_s": statistics.median(row["seconds"] for row in own),
            }
        )
    return found


def _jax() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Yield the programs in JAX."""
    from benchmarks.judges.gpu_schedules import programs  # noqa: PLC0415 # JAX may be missing
    from benchmarks.support.referee_cases import MODELS  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.graph import graph_of_jax  # noqa: PLC0415 # as above

    def graph(build: Callable[[], Any]) -> Graph:
        function, arguments, donated = build()
        return graph_of_jax(function, *arguments, donated=donated)

    for name, build in (dict(MODELS) | programs()).items():
        yield name, lambda build=build: graph(build)  # type: ignore[misc] # mypy sees no default


def _torch() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Yield the torch modules of the zoo, named apart from programs in JAX."""
    from benchmarks.zoo.torch_modules import FACTORIES  # noqa: PLC0415 # torch may be missing

    for name, build in FACTORIES.items():
        yield f"torch {name}", lambda build=build: _graph_of_module(*build())  # type: ignore[misc] # as above


def _transformers() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Yield models of transformers."""
    from benchmarks.support.changed_layouts import OF_TRANSFORMERS  # noqa: PLC0415 # torch may be missing

    for name in OF_TRANSFORMERS:
        yield f"transformers {name}", lambda name=name: _of_transformers(name)  # type: ignore[misc] # as above


def _of_transformers(name: str) -> Graph:
    """Return the graph of a model's training step; nothing is allocated."""
    import torch  # noqa: PLC0415 # torch may be missing
    import transformers  # noqa: PLC0415 # as above

    from benchmarks.support import changed_layouts  # noqa: PLC0415 # as above

    small = changed_layouts.SIZES | changed_layouts.OF_TRANSFORMERS[name]
    config = getattr(transformers, f"{name}Config")(**{size: SIZES[size] for size in small})
    auto = transformers.AutoModelForMaskedLM if name == "Bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        module = auto.from_config(config, dtype="bfloat16").train()
    # Values of tokens are read from the sample, where code asks for them.
    tokens = torch.zeros((TEXTS, TOKENS), dtype=torch.int64)
    return _graph_of_module(module, (tokens,), lambda module, ids: module(input_ids=ids, labels=ids).loss)


def _graph_of_module(module: Any, inputs: tuple[Any, ...], loss: Any = None) -> Graph:
    from costmodels.sharding.frontends.torch.graph import graph_of  # noqa: PLC0415 # torch may be missing
    from costmodels.sharding.frontends.torch.program import trace_module  # noqa: PLC0415 # as above

    return graph_of(trace_module(module, inputs, loss))


def _catalog() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Yield layers of the catalog's models, as few as show every kind."""
    for name in model_names():
        yield name, lambda name=name: layers_of(name, None, SEQUENCES)  # type: ignore[misc] # mypy sees no default


def _where(library: str, programs: Callable[[], Iterator[tuple[str, Callable[[], Graph]]]]) -> Any:
    """Return the programs of a kind, none where its library is not installed."""
    return programs if find_spec(library) is not None else lambda: iter(())


KINDS: Mapping[str, Callable[[], Iterator[tuple[str, Callable[[], Graph]]]]] = {
    "jax": _where("jax", _jax),
    "torch": _where("torch", _torch),
    "transformers": _where("transformers", _transformers),
    "catalog": _catalog,
}
"""Programs by their kind."""


if __name__ == "__main__":
    raise SystemExit(main())
