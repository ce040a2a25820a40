"""Repeat Tables 1 to 3 of ManuMatic by simulation: planners count volumes, the evaluation uses links and devices.

    python -m benchmarks.papers.manumatic_tables [--table 1 2 3] [--order price reverse] [--sweep] [--json]

Every row is one way to find a plan of the forward pass. The rest of the step follows from it in the same way for all
rows (`tuner.planners.sharding.forward_plans`). D-Rec counts volumes (`symbolic_prices`). Plans are scored by
`plan.cost_of` on links and rooflines of the paper's cluster, layer by layer (`benchmarks.papers.layer_figures`), and
in a pipeline if there is one. Choices that the paper leaves open and no planner of its rows makes are optimised for
each row: the micro-batch, the stages, ZeRO's stage 1 or 3, and whether all layers are recomputed or none. A plan that
does not fit counts only if none fits.

`price` is the order of visits in the paper, `reverse` the one that MindSpore ships. `--sweep` changes one assumption at
a time. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.manumatic_rows import (
    D_REC,
    EXPERT,
    MEGATRON,
    PIN,
    PLANNED_STAGES,
    SCENARIOS,
    Scenario,
    Scored,
    rows_of,
)
from benchmarks.support.timing import answer, benchmark_parser, publish, tell
from tuner.planners.sharding.recursive import ORDERS

PAPER: dict[int, dict[str, float]] = {
    1: {MEGATRON: 0.93, D_REC: 1.0, PIN: 2.24, EXPERT: 2.49},
    2: {MEGATRON: 0.98, D_REC: 1.0, EXPERT: 1.98, PIN: 2.04},
    3: {MEGATRON: 0.95, D_REC: 1.0, EXPERT: 1.11, PIN + PLANNED_STAGES: 1.45},
}
"""Speed-ups over D-Rec, the slowest first (ManuMatic, Tables 1 to 3)."""
TIE = 0.01
"""Relative difference up to which rows count as equal."""

ANY: dict[str, dict[str, Any]] = {
    "collectives once a step overlap": {"overlaps": True},
    "half of the peak FLOP/s": {"flop_share": 0.5},
    "392 GB/s each way": {"link_share": 2.0},
    "redistribution by kind": {"reading": "by_kind"},
}
CHANGES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        **{f"{count} sequences": {"sequences": count} for count in (1, 2, 4, 16, 32)},
        "8 sequences as one micro-batch": {"micro_batch": 8},
        **{f"{count} layers": {"layers": count} for count in (8, 32)},
        **{f"{count} tokens": {"sequence_length": count} for count in (2048, 8192)},
        **{f"pin {ways} ways": {"pinned_ways": ways} for ways in (2, 4)},
        "pin on the first BMM alone": {"pinned_ops": ("*.moe_mlp.up",)},
        **ANY,
    },
    2: {
        **{f"{count} sequences": {"sequences": count} for count in (1, 2, 8, 16)},
        "8 micro-batches of 1": {"sequences": 8, "micro_batch": 1},
        "1 sequence, overlap": {"sequences": 1, "overlaps": True},
        **{f"pin {ways} ways": {"pinned_ways": ways} for ways in (2, 4)},
        **ANY,
    },
    3: {
        **{f"{count} sequences": {"sequences": count} for count in (8, 32)},
        **{f"{count} stages": {"stages": (count,)} for count in (2, 4, 8)},
        **{f"{count} stages, pin inside hosts": {"stages": (count,), "pinned_axis": "npu"} for count in (2, 4)},
        **ANY,
    },
}
"""Assumptions that a sweep changes one at a time, by table."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    parser = benchmark_parser("papers.manumatic_tables", __doc__)
    parser.add_argument(
        "--table", type=int, choices=tuple(SCENARIOS), nargs="+", default=list(SCENARIOS), help="tables (all)"
    )
    parser.add_argument(
        "--order",
        choices=ORDERS,
        nargs="+",
        default=["price", "reverse"],
        help="orders of D-Rec's visits (price reverse)",
    )
    parser.add_argument("--sweep", action="store_true", help="change one assumption at a time; takes minutes")
    return answer("manumatic_tables", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the rows of every table and order, and of every changed assumption."""
    rows, changed = [], []
    for table in given.table:
        for order in given.order:
            scenario = replace(SCENARIOS[table], order=order)
            tell(f"table {table}, order {order}")
            found = rows_of(scenario)
            rows += shown(scenario, found)
            changed.append(summary(scenario, "as assumed", found))
            for label, changes in CHANGES[table].items() if given.sweep else ():
                tell(f"table {table}, order {order}: {label}")
                other = replace(scenario, **changes)
                changed.append(summary(other, label, rows_of(other)))
    return {"rows": rows, "assumptions": changed}


def show(figures: dict[str, Any]) -> None:
    """Print the rows and the assumptions as tables."""
    publish(figures["rows"], as_json=False)
    for table in sorted({row["table"] for row in figures["assumptions"]}):
        print()
        publish([row for row in figures["assumptions"] if row["table"] == table], as_json=False)


def shown(scenario: Scenario, found: dict[str, Scored]) -> list[dict[str, Any]]:
    """Return the rows of one table beside the paper's."""
    base_s = found[D_REC].score.step_s
    return [
        {
            "table": scenario.table,
            "order": scenario.order,
            "row": row,
            "speed_up": base_s / each.score.step_s,
            "paper": PAPER[scenario.table].get(row),
            "tokens_per_s": round(each.tokens_per_s),
            "peak_gib": each.score.peak_bytes / 2**30,
            "fits": each.score.fits,
            "pp": each.pp,
            "micro_batch": each.micro_batch,
            "zero": each.zero_stage,
            "recomputed": sum(each.score.recomputed),
            "layers": "/".join(map(str, dict.fromkeys(each.score.layers))),
            "degrees": each.in_words,
        }
        for row, each in found.items()
    ]


def summary(scenario: Scenario, label: str, found: dict[str, Scored]) -> dict[str, Any]:
    """Return the speed-ups under one set of assumptions, and the paper's rows that change places."""
    base_s = found[D_REC].score.step_s
    speed_up = {row: base_s / each.score.step_s for row, each in found.items()}
    return {
        "table": scenario.table,
        "order": scenario.order,
        "assumption": label,
        **speed_up,
        "all_fit": all(found[row].score.fits for row in PAPER[scenario.table]),
        "swapped": "; ".join(swapped(scenario.table, speed_up)) or "none",
    }


def swapped(table: int, speed_up: dict[str, float]) -> list[str]:
    """Return the pairs of the paper's rows of which the first should be slower but is faster by more than TIE."""
    rows = [row for row in PAPER[table] if row in speed_up]
    return [
        f"{slow} > {fast}"
        for at, slow in enumerate(rows)
        for fast in rows[at + 1 :]
        if speed_up[slow] > speed_up[fast] * (1 + TIE)
    ]


if __name__ == "__main__":
    raise SystemExit(main())
