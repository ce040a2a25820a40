"""Hold the cost of JAX steps to the programs that XLA's compiler makes for eight H100; no GPU is needed.

    pip install jax-cuda12-pjrt jax-cuda12-plugin   # of the version of jax; XLA's compiler for GPUs
    JAX_PLATFORMS=cpu python -m benchmarks.judges.gpu_schedules traffic [unet ...]
    JAX_PLATFORMS=cpu python -m benchmarks.judges.gpu_schedules overlap [gemma ...] [--planner descent]
    JAX_PLATFORMS=cpu python -m benchmarks.judges.gpu_schedules order [gemma ...]

`traffic`: the bytes that the kernels of an unsharded step of the zoo move, and how many times as many a plan's cost
counts, with and without fusion. `overlap`: a planned step on three meshes; the share of its collectives that XLA's
schedule hides behind kernels, beside that of the plan's timeline. `order`: six plans of a step, the planners', data
parallelism and others by hand; whether XLA's schedules have their order, and time and memory over XLA's. All are
priced alike: kernels by the roofline of an H100, collectives by the links of its host. Matrix products are left to the
library, as XLA's own refuse some shapes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.support.timing import USERS_MISTAKE, benchmark_parser, publish, tell
from costmodels.sharding.device_mesh import DeviceMesh, mesh_from
from costmodels.sharding.fusion import traffic_of, unfused
from costmodels.sharding.graph import Graph
from costmodels.sharding.overlap import timeline_of
from costmodels.sharding.plan import Plan, cost_of
from costmodels.xla.compiler import OPTIONS, has_gpu_compiler
from costmodels.xla.schedule import kernels_of, without_comments

if TYPE_CHECKING:  # JAX may be missing
    from tuner.planners.jax_judge import Compiled

TRAFFIC = ("unet", "graph_network", "moe", "gemma_2b")
OVERLAP = ("gemma", "llama", "mixture")
MESHES: tuple[Mapping[str, int], ...] = ({"data": 8}, {"data": 2, "model": 4}, {"model": 8})
CLUSTER, DEVICE = "dgx-h100", "h100"
ORDER_MESH: Mapping[str, int] = {"data": 2, "model": 4}


def main() -> None:
    """Print a table."""
    parser = benchmark_parser("judges.gpu_schedules", __doc__)
    parser.add_argument("what", choices=("traffic", "overlap", "order"))
    parser.add_argument("programs", nargs="*", help=f"default: {', '.join(TRAFFIC)}, or {', '.join(OVERLAP)}")
    parser.add_argument("--planner", default="descent", help="default: descent")
    given = parser.parse_args()
    if not has_gpu_compiler():
        tell("XLA's compiler for GPUs is missing: pip install jax-cuda12-pjrt jax-cuda12-plugin")
        sys.exit(USERS_MISTAKE)
    if given.what == "traffic":
        rows = [traffic(name) for name in given.programs or TRAFFIC]
    elif given.what == "order":
        rows = [order(name) for name in given.programs or OVERLAP]
    else:
        rows = [row for name in given.programs or OVERLAP for row in overlap(name, given.planner)]
    publish(rows, as_json=given.json)


def traffic(name: str) -> dict[str, Any]:
    """Compare the traffic of an unsharded program of the zoo."""
    import jax  # noqa: PLC0415 # JAX may be missing
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415 # JAX may be missing

    from benchmarks.zoo import FACTORIES  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.graph import graph_of_jax  # noqa: PLC0415 # as above
    from tuner.planners.jax_judge import judge_of  # noqa: PLC0415 # as above

    function, arguments, donated = FACTORIES[name]()
    devices = judge_of(DEVICE, mesh_from({"one": 1}, CLUSTER)).devices
    whole = NamedSharding(Mesh(np.array(devices), ("one",)), PartitionSpec())
    lowered = jax.jit(function, in_shardings=whole, out_shardings=whole, donate_argnames=donated).lower(*arguments)
    kernels = kernels_of(without_comments(str(lowered.compile(compiler_options=dict(OPTIONS)).as_text())))
    graph = graph_of_jax(function, *arguments, donated=donated)

    def counted(graph: Graph, *, is_product: bool) -> float:
        return sum(
            op.times * (sum(one.reads) + sum(one.writes))
            for op, one in zip(graph.ops, traffic_of(graph), strict=True)
            if not op.is_free and (op.flop > 0) == is_product
        )

    of_products, of_others = (
        sum(k.times * k.num_bytes for k in kernels if k.is_product == one) for one in (True, False)
    )
    return {
        "program": name,
        "XLA [GB]": (of_products + of_others) / 1e9,
        "products": counted(graph, is_product=True) / of_products,
        "others": counted(graph, is_product=False) / of_others,
        "all": sum(counted(graph, is_product=one) for one in (True, False)) / (of_products + of_others),
        "unfused": sum(counted(unfused(graph), is_product=one) for one in (True, False)) / (of_products + of_others),
    }


def overlap(name: str, planner: Any) -> Iterator[dict[str, Any]]:
    """Compare the overlap of a planned program on each mesh."""
    from tuner.planners import plan_jax  # noqa: PLC0415 # JAX may be missing
    from tuner.planners.jax_judge import Step, judge_of  # noqa: PLC0415 # as above
    from tuner.planners.planning import PlannerOptions  # noqa: PLC0415 # as above

    function, arguments, donated = programs()[name]()
    options = PlannerOptions(planner=planner, whole_axes=True, overlap=True)
    for sizes in MESHES:
        begun_s = time.perf_counter()
        plan = plan_jax(function, *arguments, mesh=sizes, cluster=CLUSTER, donated=donated, options=options)
        planned_s = time.perf_counter() - begun_s
        step = Step(
            function=plan.function,
            arguments=arguments,
            in_specs=plan.in_specs,
            out_specs=plan.out_specs,
            donate_argnums=plan.donate_argnums,
            static_argnums=(),
        )
        cost, timeline, own_mesh = plan.planned.cost, plan.planned.timeline, plan.planned.plan.mesh
        found = judge_of(DEVICE, own_mesh).compile(step, own_mesh).replayed
        assert timeline is not None, "overlap was asked for"
        compute_s = float(cost.compute_s.sum())
        yield {
            "program": name,
            "mesh": ",".join(f"{axis}={size}" for axis, size in sizes.items()),
            "step [ms]": timeline.step_time_s * 1e3,
            "XLA's [ms]": found.step_time_s * 1e3,
            "sent [ms]": cost.comm_s * 1e3,
            "XLA's sent": found.comm_s * 1e3,
            "hidden": 1 - (timeline.step_time_s - compute_s) / cost.comm_s if cost.comm_s else 1.0,
            "XLA's hidden": 1 - (found.step_time_s - found.compute_s) / found.comm_s if found.comm_s else 1.0,
            "collectives": found.collectives,
            "synchronous": found.synchronous,
            "planned [s]": planned_s,
        }


def order(name: str) -> dict[str, Any]:
    """Compare six plans of a program with what XLA makes of them, on two by four devices."""
    from benchmarks.zoo import FACTORIES  # noqa: PLC0415 # JAX may be missing
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415 # as above

    function, arguments, donated = (programs() | FACTORIES)[name]()
    program = trace_function(function, *arguments, donated=donated)
    plans = six_plans(graph_of(program), mesh_from(ORDER_MESH, CLUSTER))
    return {"program": name, "plans": len(plans), **order_of(function, program, arguments, plans)[0]}


def six_plans(graph: Graph, mesh: DeviceMesh) -> list[Plan]:
    """Return plans of the planners, the best by its price first, data parallelism, and others by hand."""
    from tuner.planners.planning import WHOLE_AXES, plan_graph  # noqa: PLC0415 # JAX may be missing
    from tuner.planners.toast.by_hand import data_parallel, plans_by_hand  # noqa: PLC0415 # as above

    planned = plan_graph(graph, mesh, WHOLE_AXES)
    found = [planned.plan, *([] if planned.unhidden is None else [planned.unhidden.plan])]
    found.append(plan_graph(graph, mesh, replace(WHOLE_AXES, planner="recursive", overlap=False)).plan)
    found.append(data_parallel(graph, planned.plan.mesh))
    plans = {plan.served.tobytes(): plan for plan in found}
    by_hand = plans_by_hand(graph, planned.plan.mesh, memory_bytes=80e9, most=1000)
    others = [plan for plan in by_hand if plan.served.tobytes() not in plans]
    for at in np.linspace(0, len(others) - 1, 6 - len(plans)).round().astype(int).tolist():
        plans[others[at].served.tobytes()] = others[at]
    return list(plans.values())


def order_of(
    function: Any, program: Any, arguments: Any, plans: Sequence[Plan]
) -> tuple[dict[str, float], list[float], list[float]]:
    """Return figures of what XLA makes of plans, their step times by our price, and those by XLA's schedule [s]."""
    from scipy.stats import spearmanr  # noqa: PLC0415 # of this function alone

    from costmodels.sharding.exports.jax_apply import apply_plan  # noqa: PLC0415 # JAX may be missing

    ours, theirs = [], []
    for plan in plans:
        compiled, cost = compiled_under(apply_plan(function, plan), program, arguments, plan), cost_of(plan)
        ours.append((timeline_of(plan, cost).step_time_s, cost.peak_memory_bytes))
        theirs.append((compiled.replayed.step_time_s, compiled.memory_bytes))
    ratios = np.array(ours) / np.array(theirs)
    figures = {
        "Spearman": float(spearmanr([one[0] for one in ours], [one[0] for one in theirs]).statistic),
        "step over XLA's": float(np.median(ratios[:, 0])),
        "farthest": float(ratios[np.abs(np.log(ratios[:, 0])).argmax(), 0]),
        "memory over XLA's": float(np.median(ratios[:, 1])),
        "memory, farthest": float(ratios[np.abs(np.log(ratios[:, 1])).argmax(), 1]),
    }
    return figures, [one[0] for one in ours], [one[0] for one in theirs]


def compiled_under(function: Any, program: Any, arguments: Any, plan: Plan) -> Compiled:
    """Compile a step whose arguments and outputs have the layouts of a plan."""
    from costmodels.sharding.exports.jax_apply import specs_of  # noqa: PLC0415 # JAX may be missing
    from tuner.planners.jax_judge import Step, judge_of  # noqa: PLC0415 # as above

    in_specs, out_specs = specs_of(program, plan)
    step = Step(
        function=function,
        arguments=arguments,
        in_specs=in_specs,
        out_specs=out_specs,
        donate_argnums=program.donated,
        static_argnums=(),
    )
    return judge_of(DEVICE, plan.mesh).compile(step, plan.mesh)


def programs() -> dict[str, Any]:
    """Return factories of training steps of two layers, or of one with experts."""
    from benchmarks.zoo.gemma import GEMMA_2B, Gemma  # noqa: PLC0415 # JAX may be missing
    from benchmarks.zoo.mixtures import FOUR_LAYERS  # noqa: PLC0415 # JAX may be missing

    llama = Gemma(
        layers=2,
        model=4096,
        heads=32,
        head=128,
        hidden=2 * 11008,
        vocabulary=32000,
        batch=8,
        tokens=4096,
        key_heads=32,
        is_tied=False,
    )
    return {
        "gemma": replace(GEMMA_2B, layers=2, batch=16, vocabulary=32768).train_program,
        "llama": llama.train_program,
        "mixture": replace(FOUR_LAYERS, base=replace(FOUR_LAYERS.base, layers=1)).train_program,
    }


if __name__ == "__main__":
    main()
