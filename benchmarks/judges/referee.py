"""Judge sharding plans by XLA and Shardy: compare the bytes that a planned JAX program sends with those of its plan.

    python -m benchmarks.judges.referee [--model NAME ...] [--planner descent|recursive|toast ...]
        [--mesh data=4,model=2 ...]
                                 [--judge xla|shardy|both] [--json]

Each program, planner and mesh gives one row: the bytes that a device sends by kind (reduced, gathered, exchanged), the
floating-point operations of its products, its memory, and the largest relative difference between the numbers of the
sharded and the plain step. The judge xla compiles for as many virtual devices of the CPU as the mesh has. Only programs
of small and medium size are run, in float32. The judge shardy runs only the passes of Shardy, which takes a second.
docs/research/referee.md lists the conventions that are normalised. JAX must be installed.

Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.sent_bytes import KINDS, Axes, by_kind, planned_bytes, planned_flop, reordered_bytes
from benchmarks.support.timing import answer, benchmark_parser, tell

MESHES = ("data=4,model=2",)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status."""
    parser = benchmark_parser("judges.referee", __doc__)
    parser.add_argument("--model", nargs="+", default=[], help="names of programs (all small and medium ones)")
    parser.add_argument("--planner", nargs="+", default=["descent"], help="names of planners (descent)")
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), help=f"axes of each mesh ({' '.join(MESHES)})")
    parser.add_argument("--judge", choices=("xla", "shardy", "both"), default="both", help="judges to ask (both)")
    parser.add_argument("--no-numbers", action="store_true", help="do not run the programs to compare their numbers")
    given = parser.parse_args(argv)
    _begin_jax(given.mesh)
    return answer("referee", given, measure, show)


def _begin_jax(meshes: Sequence[str]) -> None:
    """Set JAX's environment before it starts: as many virtual devices as the largest mesh, little optimisation."""
    sizes = [[part.partition("=")[2] for part in mesh.split(",")] for mesh in meshes]
    count = max(math.prod(int(size) for size in mesh if size.isdigit()) for mesh in sizes)
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0 "
        + os.environ.get("XLA_FLAGS", "")
    )
    os.environ["JAX_PLATFORMS"] = "cpu"


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the rows.

    Raises:
        ConfigError: There is no such program, planner or mesh.
    """
    from benchmarks.support.referee_cases import DEFAULT_MODELS, PLANNERS, mesh_of_text, program_of  # noqa: PLC0415 # JAX starts
    from hardware.io.errors import ConfigError, did_you_mean  # noqa: PLC0415

    for planner in given.planner:
        if planner not in PLANNERS:
            raise ConfigError(
                "must be a planner", key="--planner", value=planner, nearest=did_you_mean(planner, list(PLANNERS))
            )
    meshes = [mesh_of_text(mesh) for mesh in given.mesh]
    programs = {name: program_of(name) for name in given.model or DEFAULT_MODELS}
    rows = []
    for name, program in programs.items():
        for mesh in meshes:
            for planner in given.planner:
                began_s = time.process_time()
                runs = name in DEFAULT_MODELS and given.judge != "shardy" and not given.no_numbers
                rows.append({"model": name, **judged(program, mesh, planner, judge=given.judge, runs=runs)})
                tell(f"{name}, {planner}, {mesh.in_words}: {time.process_time() - began_s:.1f} CPU s")
    return {"settings": {name: value for name, value in vars(given).items() if name != "json"}, "rows": rows}


def judged(program: Any, mesh: Any, planner: str, *, judge: str = "both", runs: bool = False) -> dict[str, Any]:
    """Compute one row: the figures of a planner's plan for a program, and those of the judges."""
    import jax  # noqa: PLC0415 # as in `measure`

    from benchmarks.papers.shardy_program import shardy_bytes  # noqa: PLC0415
    from benchmarks.support.planned_numbers import difference  # noqa: PLC0415
    from benchmarks.support.referee_cases import plan_of  # noqa: PLC0415
    from benchmarks.support.xla_program import compiled  # noqa: PLC0415
    from costmodels.sharding.exports.axis_order import axis_orders  # noqa: PLC0415
    from costmodels.sharding.exports.jax_apply import apply_plan, shardings  # noqa: PLC0415
    from costmodels.sharding.plan import cost_of  # noqa: PLC0415

    function, arguments, donated = program
    plan = plan_of(program, mesh, planner)
    cost, axes = cost_of(plan), dict(zip(mesh.names, mesh.sizes, strict=True))
    inputs, outputs = shardings(function, plan, *arguments)
    lowered = jax.jit(
        apply_plan(function, plan), in_shardings=inputs, out_shardings=outputs, donate_argnames=donated
    ).lower(*arguments)
    # A framework deals contiguous parts in one order of axes, so that some tensors are permuted beyond the plan.
    orders = axis_orders(plan)
    permuted = reordered_bytes(orders)
    sent = {"plan": planned_bytes(cost, plan.mesh) + permuted}
    flop = {"plan": planned_flop(plan)}
    memory = {"plan": cost.peak_memory_bytes}
    apart = None
    if judge != "xla":
        sent["shardy"] = shardy_bytes(lowered, axes)
    if judge != "shardy":
        found = compiled(lowered, axes)
        sent["xla"] = found.device.sent
        flop |= {"xla": found.device.flop, "xla_all": found.counted_flop}
        memory["xla"] = found.memory_bytes
        apart = difference(function, found.run, arguments) if runs else None
    return {
        "planner": planner,
        "mesh": mesh.in_words,
        "bytes": {who: by_kind(each) for who, each in sent.items()},
        "bytes_by_axes": {who: _named(each) for who, each in sent.items()},
        "flop": flop,
        "memory_bytes": memory,
        "difference": apart,
        "reordered": {"places": len(orders.broken), "bytes": sum(permuted.values())},
    }


def _named(sent: Mapping[tuple[str, Axes], float]) -> dict[str, float]:
    return {f"{kind} {'*'.join(axes)}": num_bytes for (kind, axes), num_bytes in sorted(sent.items()) if num_bytes}


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table, with a line for each row and kind."""
    lines = [("model", "planner", "mesh", "what", "plan", "shardy", "xla", "shardy/plan", "xla/plan")]
    for row in figures["rows"]:
        head = (row["model"], row["planner"], row["mesh"])
        for kind in KINDS:
            sent = {who: each[kind] for who, each in row["bytes"].items()}
            if any(sent.values()):
                lines.append((*head, f"{kind} MB", *_cells(sent, 1e6)))
        lines.append((*head, "GFLOP", *_cells(row["flop"], 1e9)))
        lines.append((*head, "memory MB", *_cells(row["memory_bytes"], 1e6)))
        if row["reordered"]["bytes"]:
            lines.append((*head, "of these reordered MB", f"{row['reordered']['bytes'] / 1e6:.4g}", *[""] * 4))
        if row["difference"] is not None:
            lines.append((*head, "difference", "", "", f"{row['difference']:.1e}", "", ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cells(figures: Mapping[str, float], unit: float) -> tuple[str, ...]:
    """Format the figures of the plan, Shardy and XLA, and the ratios of the latter two to the plan's."""
    plan = figures["plan"]
    judges = [figures.get(who) for who in ("shardy", "xla")]
    shown = ["" if each is None else f"{each / unit:.4g}" for each in judges]
    ratios = ["" if each is None or not plan else f"{each / plan:.3f}" for each in judges]
    return f"{plan / unit:.4g}", *shown, *ratios


if __name__ == "__main__":
    raise SystemExit(main())
