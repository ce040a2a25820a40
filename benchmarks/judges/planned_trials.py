"""Run sharding plans in real trials, and compare what they gain with what was predicted.

    python -m benchmarks.judges.planned_trials [--backend torch jax] [--models NAME ...] [--rounds N] [--json]

The models are published ones with two layers, a width of 512 and 16 heads, so that eight ranks of one machine train
them. Each case is a model with a layout of eight devices. Its whole step is sharded by hand and by each planner; plans
that equal an earlier one are not run again. Trials train a few steps by the backend's virtual clock, in turns: one
round after the other runs all plans of a case.

`predicted` and `measured` are the step time of a plan over that of the plan by hand: by `cost_of`, which the planners
minimise, and by the trials. A sign agrees if both say that the plan is faster, or both that it is slower. `tie` marks
plans whose measured ratio lies within --tie of 1, which trials cannot tell apart from the plan by hand. `loss_error` is
the difference of the last loss from that by hand, and `bytes` says whether all ranks sent what the plan's list says,
byte for byte (torch).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.support.planned_runs import DEVICES, Kind, Runs, cpu_host, distinct, run_plans, sign_of, small
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish
from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import HAND, ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.plan import Plan, cost_of
from hardware.io.errors import ConfigError, did_you_mean
from tuner.planners.planning import Planner, PlannerOptions, plan_graph
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_plans import plan_step

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
PLANNERS: tuple[Planner, ...] = ("recursive", "descent", "toast")
HIDDEN, SEQUENCE_LENGTH, SEQUENCES, LAYERS = 512, 128, 8, 2
DENSE = {
    "gpt2": {"tp": 4},
    "gpt-neox-20b": {"tp": 8},
    "llama-7b": {"tp": 4},
    "llama-2-13b": {"cp": 4},
    "llama-3-8b": {"tp": 8},
    "llama-3.1-70b": {"up": 4},
    "llama-3.1-405b": {"tp": 4, "cp": 2},
    "gemma-7b": {"tp": 8},
    "gemma-2-9b": {"tp": 4},
    "qwen2.5-7b": {"tp": 4},
    "qwen2.5-72b": {"tp": 8},
    "qwen3-8b": {"up": 2, "tp": 2},
}
"""Degrees of each model besides `dp`, which takes the other devices."""
EXPERTS = {"mixtral-8x7b": {"up": 4, "ep": 4}, "qwen3-30b-a3b": {"up": 4, "ep": 4}, "qwen1.5-moe-a2.7b": {"tp": 4}}
"""The same for models with experts."""
CASES = DENSE | EXPERTS


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios of all plans and return the exit status."""
    parser = benchmark_parser("judges.planned_trials", __doc__)
    parser.add_argument("--backend", choices=("torch", "jax"), nargs="+", default=["torch"], help="backends (torch)")
    parser.add_argument("--models", nargs="+", default=list(CASES), metavar="NAME", help="models (all)")
    parser.add_argument("--planners", choices=PLANNERS, nargs="+", default=list(PLANNERS), help="planners (all)")
    parser.add_argument("--rounds", type=count_at_least(1), default=2, help="trials of each plan (2)")
    parser.add_argument("--tie", type=float, default=0.02, help="difference that trials cannot tell from none (0.02)")
    return answer("planned_trials", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run all cases."""
    for name in given.models:
        if name not in CASES:
            raise ConfigError("is not a model here", key="--models", value=name, nearest=did_you_mean(name, CASES))
    rows = [row for kind in given.backend for name in given.models for row in run_case(kind, name, given)]
    return {"rows": rows, "agreement": agreement(rows)}


def show(figures: dict[str, Any]) -> None:
    """Print all plans and the agreement of the signs."""
    publish(figures["rows"], as_json=False)
    print()
    publish(figures["agreement"], as_json=False)


def run_case(kind: Kind, name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the plans of one case, and return a row for each plan other than the one by hand."""
    plans = plans_of(name, given.planners)
    runs = run_plans(kind, job_of(name), plans, rounds=given.rounds)
    return [
        row_of(kind, name, planner, predicted=ratio(plans, planner), runs=runs, tie=given.tie)
        for planner in plans
        if planner != HAND
    ]


def plans_of(name: str, planners: Sequence[Planner]) -> dict[str, Plan]:
    """Return the plan by hand of a case and those of planners that differ from all before them."""
    by_hand = plan_step(job_of(name), cpu_host(), config_of(name), LayerPlanning())
    options = {planner: PlannerOptions(planner=planner, whole_axes=True) for planner in planners}
    found = ((planner, plan_graph(by_hand.graph, by_hand.mesh, one).plan) for planner, one in options.items())
    return distinct(name, [(HAND, by_hand), *found])


def ratio(plans: dict[str, Plan], planner: str) -> float:
    """Return the predicted step time of a plan over that of the plan by hand."""
    return cost_of(plans[planner]).step_time_s / cost_of(plans[HAND]).step_time_s


def row_of(
    kind: Kind, name: str, planner: str, *, predicted: float, runs: dict[str, Runs], tie: float
) -> dict[str, Any]:
    """Return the figures of one plan."""
    measured = runs[planner].step_s / runs[HAND].step_s
    return {
        "backend": kind,
        "model": name,
        "layout": ",".join(f"{axis}={size}" for axis, size in {"dp": config_of(name).dp, **CASES[name]}.items()),
        "planner": planner,
        "hand_s": runs[HAND].step_s,
        "predicted": predicted,
        "measured": measured,
        "sign": sign_of(predicted, measured, tie=tie),
        "loss_error": abs(runs[planner].loss - runs[HAND].loss),
        "bytes": "" if kind == "jax" else "equal" if runs[planner].sends_as_planned else "differ",
    }


def agreement(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the signs that agree, by backend and planner."""
    found = []
    for kind in dict.fromkeys(row["backend"] for row in rows):
        for planner in (*dict.fromkeys(row["planner"] for row in rows), "all"):
            own = [row for row in rows if row["backend"] == kind and planner in (row["planner"], "all")]
            told = [row for row in own if row["sign"] != "tie"]
            agree = sum(row["sign"] == "agrees" for row in told)
            errors = [abs(math.log(row["predicted"] / row["measured"])) for row in own]
            found.append(
                {
                    "backend": kind,
                    "planner": planner,
                    "plans": len(own),
                    "ties": len(own) - len(told),
                    "agree": agree,
                    "share": agree / len(told) if told else 1.0,
                    "median_error": statistics.median(errors) if errors else 0.0,
                }
            )
    return found


def config_of(name: str) -> ParallelConfig:
    """Return the layout of a case, sharded by hand."""
    degrees = CASES[name]
    dp = DEVICES // math.prod(size for axis, size in degrees.items() if axis != "ep")
    by_hand = ParallelConfig(dp=dp, mbs=SEQUENCES // dp, zero_stage=1, sequence_parallel="tp" in degrees)
    return replace(by_hand, **degrees)


def job_of(name: str) -> TrainingJob:
    """Return the job of a case."""
    model = small(
        load_model(f"{name}.json", MODELS), hidden_size=HIDDEN, sequence_length=SEQUENCE_LENGTH, layers=LAYERS
    )
    return TrainingJob(
        model=model, sequence_length=SEQUENCE_LENGTH, global_batch_size=SEQUENCES, precision="fp32", optimizer="adam"
    )


if __name__ == "__main__":
    raise SystemExit(main())
