"""Plan training steps of networks that other packages bring, and hold the plans to XLA's programs for eight H100.

    pip install transformers==4.56.2 penzai dm-haiku esm2quinox jraph e3x e3nn-jax diffrax numpyro dm-pix optax
    pip install jax-cuda12-pjrt jax-cuda12-plugin   # of the version of jax; XLA's compiler for GPUs, which needs none
    JAX_PLATFORMS=cpu python -m benchmarks.judges.package_steps [--only NAME ...] [--path FOLDER ...] [--json]

`--path` adds a folder of packages. Each step gives a row: CPU seconds to trace and to plan it on two by four devices;
the largest difference of loss and moments (which hold the gradients) of two plans by hand to the unplanned step, over
the largest element, of a small network on eight virtual devices; the bytes that XLA's partitioner sends over the
plan's; and six plans, the planners', data parallelism and others by hand, as `gpu_schedules order` compares them.
`over best`, `over data` and `over propagated` are the schedule of the plan with the lowest price over that of the
best of the six, of data parallelism, and of the better of data parallelism and the first plan's arguments where XLA
propagates their layouts to all else. `CPU memory` is the first plan's price for processors over XLA's. A step that is
refused says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.support.timing import answer, benchmark_parser, publish, tell

COLUMNS = (
    *("program", "ops", "planned [s]", "difference", "bytes", "Spearman", "step over XLA's", "farthest", "over best"),
    *("over data", "over propagated", "memory over XLA's", "memory, farthest", "CPU memory", "told"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each step and return the exit status."""
    parser = benchmark_parser("judges.package_steps", __doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="steps (all)")
    parser.add_argument("--path", nargs="+", default=[], metavar="FOLDER", help="folders of packages")
    given = parser.parse_args(argv)
    sys.path[:0] = given.path
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    os.environ["JAX_PLATFORMS"] = "cpu"
    return answer("package_steps", given, measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the rows.

    Raises:
        ConfigError: There is no such step.
    """
    from benchmarks.support.package_steps import STEPS  # noqa: PLC0415 # JAX starts
    from hardware.io.errors import ConfigError, did_you_mean  # noqa: PLC0415

    rows = []
    for name in given.only or STEPS:
        if name not in STEPS:
            raise ConfigError("must be a step", key="--only", value=name, nearest=did_you_mean(name, list(STEPS)))
        began_s, found = time.process_time(), dict.fromkeys(COLUMNS)
        found["program"] = name
        try:
            _fill(found, STEPS[name])
        except Exception as error:  # noqa: BLE001 # whatever a package, JAX or XLA refuses is a row
            found["told"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        rows.append(found)
        tell(f"{time.process_time() - began_s:.0f} CPU s: {json.dumps(found)}")
    return {"rows": rows}


def show(figures: dict[str, Any]) -> None:
    """Print all rows."""
    rows = [{name: "" if cell is None else cell for name, cell in row.items()} for row in figures["rows"]]
    publish(rows, as_json=False)


def _fill(row: dict[str, Any], factory: Any) -> None:
    """Fill the columns of a row one after the other, so that what is known before a refusal remains."""
    import jax  # noqa: PLC0415 # it may be missing

    from benchmarks.judges.gpu_schedules import CLUSTER, ORDER_MESH, compiled_under, order_of, six_plans  # noqa: PLC0415 # as above
    from benchmarks.support.sent_bytes import planned_bytes, reordered_bytes  # noqa: PLC0415 # as above
    from benchmarks.support.xla_program import compiled  # noqa: PLC0415 # as above
    from costmodels.sharding.device_mesh import mesh_from  # noqa: PLC0415 # as above
    from costmodels.sharding.exports.axis_order import axis_orders  # noqa: PLC0415 # as above
    from costmodels.sharding.exports.jax_apply import apply_plan, shardings  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415 # as above
    from costmodels.sharding.fusion import unfused  # noqa: PLC0415 # as above
    from costmodels.sharding.plan import cost_of  # noqa: PLC0415 # as above
    from tuner.planners.planning import WHOLE_AXES, plan_graph  # noqa: PLC0415 # as above

    mesh = mesh_from(ORDER_MESH, CLUSTER)
    made = factory(small=False)
    arguments, began_s = jax.eval_shape(made.start), time.process_time()
    program = trace_function(made.step, *arguments, donated=made.donated)
    graph = graph_of(program)
    first = plan_graph(graph, mesh, WHOLE_AXES).plan
    row |= {"ops": len(graph.ops), "planned [s]": time.process_time() - began_s}
    row["difference"] = _difference(factory(small=True))
    inputs, outputs = shardings(made.step, first, *arguments)
    jitted = jax.jit(
        apply_plan(made.step, first), in_shardings=inputs, out_shardings=outputs, donate_argnums=program.donated
    )
    on_cpu = compiled(jitted.lower(*arguments), dict(zip(first.mesh.names, first.mesh.sizes, strict=True)))
    planned = sum((planned_bytes(cost_of(first), first.mesh) + reordered_bytes(axis_orders(first))).values())
    row["bytes"] = sum(on_cpu.device.sent.values()) / planned if planned else None
    row["CPU memory"] = cost_of(replace(first, graph=unfused(graph))).peak_memory_bytes / on_cpu.memory_bytes
    plans = six_plans(graph, mesh)
    figures, ours, theirs = order_of(made.step, program, arguments, plans)
    chosen = theirs[ours.index(min(ours))]
    data = next(plan for plan in plans if plan.served.tobytes() == _data_parallel(graph, first.mesh))
    propagated = min(
        compiled_under(made.step, program, arguments, plan).replayed.step_time_s for plan in (data, plans[0])
    )
    row |= figures | {
        "over best": chosen / min(theirs),
        "over data": chosen / theirs[plans.index(data)],
        "over propagated": chosen / propagated,
    }


def _data_parallel(graph: Any, mesh: Any) -> bytes:
    from tuner.planners.toast.by_hand import data_parallel  # noqa: PLC0415 # JAX may be missing

    return data_parallel(graph, mesh).served.tobytes()


def _difference(made: Any) -> float:
    """Return the largest difference of moments and loss to those of the unplanned step, over the largest element.

    Planners leave a small network whole, so data parallelism and the dearest plan by hand are run, which cut it.
    """
    import jax  # noqa: PLC0415 # it may be missing
    import numpy as np  # noqa: PLC0415 # as above

    from benchmarks.judges.gpu_schedules import CLUSTER, ORDER_MESH  # noqa: PLC0415 # as above
    from costmodels.sharding.device_mesh import mesh_from  # noqa: PLC0415 # as above
    from costmodels.sharding.exports.jax_apply import apply_plan, shardings  # noqa: PLC0415 # as above
    from costmodels.sharding.frontends.jax.graph import graph_of_jax  # noqa: PLC0415 # as above
    from tuner.planners.toast.by_hand import data_parallel, plans_by_hand  # noqa: PLC0415 # as above

    arguments = made.start()
    graph, mesh = graph_of_jax(made.step, *arguments, donated=made.donated), mesh_from(ORDER_MESH, CLUSTER)
    exact = jax.tree.leaves(jax.jit(made.step)(*arguments)[1:])
    found = []
    for plan in (data_parallel(graph, mesh), plans_by_hand(graph, mesh, memory_bytes=80e9, most=1000)[-1]):
        inputs, outputs = shardings(made.step, plan, *arguments)
        step = jax.jit(apply_plan(made.step, plan), in_shardings=inputs, out_shardings=outputs)
        # The parameters are left out: AdamW's first step is nearly the sign of a gradient, which rounding can turn.
        for pair in zip(jax.tree.leaves(step(*arguments)[1:]), exact, strict=True):
            one, other = (np.asarray(each, dtype=np.float64) for each in pair)
            apart, most = np.max(np.abs(one - other), initial=0.0), np.max(np.abs(other), initial=0.0)
            found.append(float(apart / max(most, 1e-12)))
    return max(found)


if __name__ == "__main__":
    sys.exit(main())
