"""Compare predicted with measured step times and memory of JAX trials, by micro-batch size and precision.

    python -m benchmarks.judges.micro_batches [--rounds N] [--json]

A small model of two layers, GPT-2's with a width of 256, is trained by hand with dp=2 and tp=4 on eight virtual devices
of one machine. Each trial takes another micro-batch size, from the smallest to the whole batch. Step times are those of
the virtual clock, and memory is XLA's analysis for one device. A ratio is predicted over measured. `relative` is the
predicted change of the step time from the whole batch in one micro-batch, over the measured change: an error that all
micro-batch sizes share is not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.judges.planned_trials import LAYERS, MODELS, SEQUENCE_LENGTH
from benchmarks.support.planned_runs import backend_of, cpu_host, run_backends, small
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish
from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_plans import plan_step

HIDDEN, SEQUENCES = 256, 16
MIB = 2**20
PRECISIONS = ("fp32", "bf16")
CONFIGS = tuple(ParallelConfig(dp=2, tp=4, mbs=mbs, zero_stage=1) for mbs in (1, 2, 4, 8))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios and return the exit status."""
    parser = benchmark_parser("judges.micro_batches", __doc__)
    parser.add_argument("--rounds", type=count_at_least(1), default=2, help="trials of each configuration (2)")
    return answer("micro_batches", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run all trials."""
    return {"rows": [row for precision in PRECISIONS for row in rows_of(precision, given.rounds)]}


def show(figures: dict[str, Any]) -> None:
    """Print all rows."""
    publish(figures["rows"], as_json=False)


def rows_of(precision: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each micro-batch size in one precision."""
    setting = setting_of(precision)
    grid = ConfigGrid.from_configs(CONFIGS)
    predicted_s = estimate_step(setting, grid).step_time_s
    predicted_bytes = estimate_memory(setting, grid).peak_bytes
    plans = {str(one.mbs): plan_step(setting.job, setting.cluster, one, LayerPlanning()) for one in CONFIGS}
    backends = {mbs: backend_of("jax", setting.job, plan) for mbs, plan in plans.items()}
    runs = list(run_backends(f"jax {precision}, mbs", backends, rounds=rounds).values())
    measured_bytes = [run.found[0].peak_memory_bytes or 0 for run in runs]
    return [
        {
            "precision": precision,
            "mbs": config.mbs,
            "micro_batches": SEQUENCES // (config.dp * config.mbs),
            "predicted_s": float(predicted_s[at]),
            "measured_s": runs[at].step_s,
            "ratio": float(predicted_s[at] / runs[at].step_s),
            "relative": float(predicted_s[at] / predicted_s[-1] / (runs[at].step_s / runs[-1].step_s)),
            "predicted_mib": float(predicted_bytes[at] / MIB),
            "measured_mib": measured_bytes[at] / MIB,
            "memory_ratio": float(predicted_bytes[at] / measured_bytes[at]),
            "loss": runs[at].loss,
        }
        for at, config in enumerate(CONFIGS)
    ]


def setting_of(precision: str) -> Setting:
    """Return the small model's setting."""
    model = small(load_model("gpt2.json", MODELS), hidden_size=HIDDEN, sequence_length=SEQUENCE_LENGTH, layers=LAYERS)
    job = TrainingJob(
        model=model, sequence_length=SEQUENCE_LENGTH, global_batch_size=SEQUENCES, precision=precision, optimizer="adam"
    )
    return Setting(job=job, cluster=cpu_host(), runtime=find_runtime("jax-reference"))


if __name__ == "__main__":
    raise SystemExit(main())
