"""Time the frontend for torch on the zoo: tracing modules, making the planners' graphs, and planning these by D-Rec.

    python -m benchmarks.speed.torch_graphs [--repeats 3] [--json]

Target: under 2 s on 2 cores for the graph of 18 layers of Llama's size without tracing, and under 1 s to plan it in one
order (medians of 3). Plans are for one DGX H100 as `data=2,model=4`. torch must be installed.
"""

from __future__ import annotations

import importlib.util
import sys
import time

from benchmarks.support.timing import arguments, median_s, publish
from costmodels.sharding.device_mesh import mesh_of
from hardware.cluster_file import find_cluster
from tuner.planners.sharding.recursive import recursive_plan, refine_mesh


def main() -> None:
    """Time every full-size module except the largest, whose graph only has more layers."""
    options = arguments(__doc__ or "", repeats=3)
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: pip install 'meshtune[torch]'", file=sys.stderr)
        return
    from benchmarks.zoo.torch_modules import FACTORIES  # noqa: PLC0415  # without torch this can't be imported
    from costmodels.sharding.frontends.torch.graph import graph_of  # noqa: PLC0415  # as above
    from costmodels.sharding.frontends.torch.program import trace_module  # noqa: PLC0415  # as above

    mesh, levels = refine_mesh(mesh_of("data=2,model=4", find_cluster("dgx-h100")))
    rows = []
    for name, factory in FACTORIES.items():
        if "small" in name or name == "llama_70b":
            continue
        start = time.perf_counter()
        program = trace_module(*factory())
        trace_s = time.perf_counter() - start
        graph = graph_of(program)
        rows.append(
            {
                "module": name,
                "nodes": len(program.trace.graph.nodes),
                "ops": len(graph.ops),
                "unknown": sum(count for _, count in graph.unknown),
                "pflop": sum(op.flop for op in graph.ops) / 1e15,
                "trace_s": trace_s,
                "graph_s": median_s(lambda program=program: graph_of(program), options.repeats),
                "plan_s": median_s(lambda graph=graph: recursive_plan(graph, mesh, levels), options.repeats),
            }
        )
    publish(rows, as_json=options.json)


if __name__ == "__main__":
    main()
