"""Compare operators in real training with the same operators in isolation: FlexParallel's Figures 3 and 7 as tables.

    python -m benchmarks.calibration.training_operators configs/studies/cpu-gpt.yaml [--configs 8] [--json]

Some configurations of the study are trained with a profiler, which gives the median time of each of their operators in
training. Then each of these operators is run in isolation on arbitrary data. Figure 3 compares the isolated time with
the time in training, and gives the error of the cost model's formula. Figure 7 fits a surrogate to the operators in
training, without a third of a size's range, and predicts that third: it gives the share inside the 95% interval, and
the error. The second table is empty if no kind has enough operators.

Operators that cannot run in isolation (embedding, permutation) are left out, and so are collectives.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration.measured_operators import MeasuredOperators
from benchmarks.calibration.operator_calibration import FEWEST_MEASURED, by_kind, held_out
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from costmodels.blocks.operator import OpKind, Phase
from costmodels.operators.isolated import IsolatedCall, isolated_call_s, isolated_role
from hardware.io.errors import ConfigError
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from trials.torch_training.backend import TorchBackend
from trials.torch_training.benchmarks.device import DeviceBenchmarks
from trials.torch_training.benchmarks.messages import Timing
from trials.torch_training.rank_setup import TORCH_RANKS
from tuner.study_file.config import load_study
from tuner.subject.problem import Problem

MOST_SHAPES = 64
"""Maximum number of shapes that a surrogate sees."""

Times = dict[IsolatedCall, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables and return the exit status."""
    parser = benchmark_parser("calibration.training_operators", __doc__)
    parser.add_argument("study", type=Path, help="study file with trial: {backend: torch}")
    parser.add_argument("--configs", type=count_at_least(1), default=8, help="configurations to train (8)")
    return answer("training_operators", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    config = load_study(given.study)
    if not isinstance(config.trials.backend, TorchBackend):
        raise ConfigError("trains nothing for real", key="trial.backend", nearest="backend: torch")
    with RankProcesses(TORCH_RANKS) as ranks:
        training_s = _time_in_training(
            config.problem, OpenBackend(backend=config.trials.backend, ranks=ranks), given.configs
        )
        tell(f"{len(training_s)} operators in training; running them alone")
        alone_s = _time_isolated(
            DeviceBenchmarks(processes=ranks, device=config.trials.backend.device), list(training_s)
        )
    # Some operators fail in isolation; both columns use those with both times.
    calls = [call for call in training_s if call in alone_s]
    formula_s = {call: isolated_call_s(call, config.problem.setting.cluster) or np.nan for call in calls}
    unseen = held_out(
        [
            _measured(kind, phase, some, training_s, formula_s)
            for (kind, phase), some in _by_kind(calls).items()
            if len(some) >= FEWEST_MEASURED
        ],
        MOST_SHAPES,
        as_unlisted=False,
    )
    return {
        "alone_against_in_training": [
            _row(kind, phase, some, training_s, alone_s, formula_s) for (kind, phase), some in _by_kind(calls).items()
        ],
        "surrogate_of_unseen_sizes": by_kind(unseen) if unseen else [],
    }


def _time_in_training(problem: Problem, backend: OpenBackend, count: int) -> Times:
    """Return the median time of each operator in the training of some configurations."""
    grid, model, precision = problem.space().grid, problem.setting.job.model, problem.setting.job.precision
    times: dict[IsolatedCall, list[float]] = defaultdict(list)
    for position in np.random.default_rng(0).permutation(len(grid))[:count].tolist():
        chosen = grid.config(position)
        observation = backend.measure(chosen, trial_number=position)
        tell(f"{chosen}: {observation.status}, {len(observation.operator_samples)} operators")
        for sample in observation.operator_samples:
            role = isolated_role(sample.name, sample.kind, model)
            if role is not None:
                call = IsolatedCall(
                    kind=sample.kind, phase=sample.phase, role=role, precision=precision, shape=sample.shape
                )
                times[call].append(sample.time_s)
    return {call: float(np.median(each)) for call, each in times.items()}


def _time_isolated(benchmarks: DeviceBenchmarks, calls: Sequence[IsolatedCall]) -> Times:
    return {call: found.time_s for call, found in benchmarks.measure(calls) if isinstance(found, Timing)}


def _by_kind(calls: Sequence[IsolatedCall]) -> dict[tuple[OpKind, Phase], list[IsolatedCall]]:
    found: dict[tuple[OpKind, Phase], list[IsolatedCall]] = defaultdict(list)
    for call in calls:
        found[call.kind, call.phase].append(call)
    return found


def _row(
    kind: OpKind, phase: Phase, calls: Sequence[IsolatedCall], training_s: Times, alone_s: Times, formula_s: Times
) -> dict[str, Any]:
    # Ratios of the same operator, so that sizes cancel; quartiles show the spread over shapes.
    ratio = np.array([alone_s[call] / training_s[call] for call in calls])
    of_formula = np.array([formula_s[call] / training_s[call] for call in calls])
    return {
        "kind": str(kind),
        "phase": str(phase),
        "operators": len(calls),
        "alone_over_training": float(np.median(ratio)),
        "lower_quartile": float(np.quantile(ratio, 0.25)),
        "upper_quartile": float(np.quantile(ratio, 0.75)),
        "formula_error": float(np.nanmedian(np.abs(of_formula - 1))),
    }


def _measured(
    kind: OpKind, phase: Phase, calls: Sequence[IsolatedCall], training_s: Times, formula_s: Times
) -> MeasuredOperators:
    return MeasuredOperators(
        source="training",
        device="this machine's",
        kind=kind,
        phase=phase,
        shape=np.array([call.shape for call in calls]),
        measured_s=np.array([training_s[call] for call in calls]),
        predicted_s=np.array([formula_s[call] for call in calls]),
        unlisted_s=np.array([formula_s[call] for call in calls]),
    )


def _print(figures: Mapping[str, Any]) -> None:
    for name, rows in figures.items():
        print(f"\n{name.replace('_', ' ')}")
        if rows:
            publish(rows, as_json=False)
        else:
            print("too few operators: train more configurations")


if __name__ == "__main__":
    sys.exit(main())
