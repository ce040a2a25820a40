"""Run the plans of ManuMatic's Tables 1 to 3 in trials on eight ranks, beside what the evaluator says of them.

    python -m benchmarks.papers.manumatic_trials [--table 1 2 3] [--order price reverse] [--backend torch] [--json]

The tables' models with six layers, a width of 256 and 16 heads train on eight processor cores, in fp32,
with as many tokens per unit of width as in the table. The virtual clock has the links of a 910B host, slowed until a
step's FLOPs and its elements on a link have the same ratio as in the table. All rows find their plans as in
`benchmarks.papers.manumatic_tables`, in one micro-batch and one stage without recomputation, since trials run nothing
else: Table 3's row with BMPipe is left out, and its eight devices are those of one of eight stages. Each row runs the
plan that the evaluator finds fastest, with ZeRO 1 (3 has the same plan of the forward pass).

`predicted` and `measured` are speed-ups over D-Rec with the same order: by `cost_of` on the cores' cluster, and by the
virtual clock of trials.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.manumatic_rows import D_REC, EXPERT, FULL, MEGATRON, PIN, SCENARIOS, WIDE, Scenario, candidates
from benchmarks.papers.manumatic_tables import PAPER, swapped
from benchmarks.support.planned_runs import cpu_host, run_plans, small
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.plan import Plan, cost_of
from tuner.planners.sharding.recursive import ORDERS

ROWS = (MEGATRON, D_REC, FULL, PIN, EXPERT, WIDE)
HIDDEN, LAYERS, VOCABULARY = 256, 6, 512
BATCHES = {1: (8, 256), 2: (4, 512), 3: (2, 1024)}
"""Sequences of a step and their length, by table."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows and return the exit status."""
    parser = benchmark_parser("papers.manumatic_trials", __doc__)
    parser.add_argument(
        "--table", type=int, choices=tuple(SCENARIOS), nargs="+", default=list(SCENARIOS), help="tables (all)"
    )
    parser.add_argument(
        "--order", choices=ORDERS, nargs="+", default=["price"], help="orders of D-Rec's visits (price)"
    )
    parser.add_argument("--row", choices=ROWS, nargs="+", default=list(ROWS), help="rows beside D-Rec's (all)")
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch", help="backend of the trials (torch)")
    parser.add_argument("--rounds", type=count_at_least(1), default=2, help="trials of each plan (2)")
    return answer("manumatic_trials", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run the rows of every table and order."""
    rows, orders = [], []
    for table in given.table:
        for order in given.order:
            scenario = scenario_of(table, order)
            chosen = [row for row in ROWS if row in (D_REC, *given.row)]
            plans = {row: fastest(scenario, row) for row in chosen}
            runs = run_plans(given.backend, job_of(scenario), plans, rounds=given.rounds)
            predicted = {
                row: cost_of(plans[D_REC]).step_time_s / cost_of(plan).step_time_s for row, plan in plans.items()
            }
            measured = {row: runs[D_REC].step_s / found.step_s for row, found in runs.items()}
            rows += [
                {
                    "table": table,
                    "order": order,
                    "row": row,
                    "paper": PAPER[table].get(row),
                    "predicted": predicted[row],
                    "measured": measured[row],
                    "step_s": runs[row].step_s,
                    "loss_error": abs(runs[row].loss - runs[D_REC].loss),
                }
                for row in chosen
            ]
            orders.append(
                {
                    "table": table,
                    "order": order,
                    "swapped, predicted": in_words(table, predicted),
                    "swapped, measured": in_words(table, measured),
                }
            )
    return {"rows": rows, "orders": orders}


def show(figures: dict[str, Any]) -> None:
    """Print the rows, and which of the paper's rows change places."""
    publish(figures["rows"], as_json=False)
    print()
    publish(figures["orders"], as_json=False)


def in_words(table: int, speed_up: dict[str, float]) -> str:
    """Return the pairs of the paper's rows that change places."""
    return "; ".join(swapped(table, speed_up)) or "none"


def scenario_of(table: int, order: Any) -> Scenario:
    """Return a table's scenario with a small model on processor cores."""
    scenario = SCENARIOS[table]
    sequences, length = BATCHES[table]
    return replace(
        scenario,
        model=small(scenario.model, hidden_size=HIDDEN, sequence_length=length, layers=LAYERS).changed(
            vocab_size=VOCABULARY
        ),
        layers=LAYERS,
        planned_layers=LAYERS,
        sequences=sequences,
        sequence_length=length,
        hosts=1,
        stages=(1,),
        order=order,
        width_share=HIDDEN / scenario.model.hidden_size,
        core_flop_per_s=cpu_host().devices[0].peak_flop_per_s("fp32"),
        precision="fp32",
    )


def job_of(scenario: Scenario) -> TrainingJob:
    """Return the job of a scenario."""
    return TrainingJob(
        model=scenario.model,
        sequence_length=scenario.sequence_length,
        global_batch_size=scenario.sequences,
        precision=scenario.precision,
    )


def fastest(scenario: Scenario, row: str) -> Plan:
    """Return the plan of a row that the evaluator finds fastest."""
    found = [each for each in candidates(scenario, row, 1, scenario.sequences) if each.zero_stage == 1]
    best = min(found, key=lambda each: cost_of(each.plan).step_time_s)
    tell(f"table {scenario.table}, {row}: {best.in_words}")
    return best.plan


if __name__ == "__main__":
    raise SystemExit(main())
