"""Time the frontend for JAX on the zoo: tracing the programs, and making the planners' graphs of the traces.

    python -m benchmarks.speed.jax_graphs [--repeats 3] [--json]

Target: under 2 s on 2 cores for a Gemma 2B training step of 18 layers, without tracing (median of 3). JAX must be
installed.
"""

from __future__ import annotations

import importlib.util
import sys
import time

from benchmarks.support.timing import arguments, median_s, publish


def main() -> None:
    """Time every full-size program."""
    options = arguments(__doc__ or "", repeats=3)
    if importlib.util.find_spec("jax") is None:
        print("JAX is not installed: pip install 'meshtune[jax]'", file=sys.stderr)
        return
    from benchmarks.zoo import FACTORIES  # noqa: PLC0415  # without JAX this can't be imported
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415  # as above
    from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415  # as above

    rows = []
    for name, factory in FACTORIES.items():
        if "small" in name:
            continue
        start = time.perf_counter()
        function, shapes, donated = factory()
        program = trace_function(function, *shapes, donated=donated)
        trace_s = time.perf_counter() - start  # timed once, since JAX caches traces
        graph = graph_of(program)
        rows.append(
            {
                "program": name,
                "equations": len(program.jaxpr.jaxpr.eqns),
                "ops": len(graph.ops),
                "unknown": sum(count for _, count in graph.unknown),
                "pflop": sum(op.flop * op.times for op in graph.ops) / 1e15,
                "trace_s": trace_s,
                "graph_s": median_s(lambda program=program: graph_of(program), options.repeats),
            }
        )
    publish(rows, as_json=options.json)


if __name__ == "__main__":
    main()
