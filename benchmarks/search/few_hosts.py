"""Compare studies for 512 devices whose trials run on 8 or 16 of them with studies whose trials take all.

    python -m benchmarks.search.few_hosts [--studies llama3-8b ...] [--hosts N] [--set KEY=VALUE] [--seeds 5]
        [--trials 20] [--json]

Each study is searched in simulated worlds of several seeds (trials/simulated/backend.py), in three ways: `alone` runs
smaller jobs only and extrapolates the answer (`trial.proxy: {full_trials: 0}`), `proxies` lets three trials at full
size follow, and `whole` runs all trials at full size. Tuner and world have the same seed. A world has the cost model's
form with other constants, so that errors of equal operators are equal in both sizes: worlds are kinder than clusters.

Regret is the slowdown of the answer against the fastest candidate of the world, both without noise; an answer that
does not fit is marked. A trial costs its devices for --startup-s (assumed: 60 s) and seven steps, and a failed one for
the start alone. Figures are means over seeds, with the largest regret. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.search.simulated_worlds import true_step_s
from benchmarks.support.device_hours import device_hours
from benchmarks.support.here import run_here
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, tell
from costmodels.job.parallel_config import ConfigGrid
from trials.simulated.backend import SimulatedBackend
from tuner.run.progress import RunResult
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest

STUDIES: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {"llama3-8b": (8192, 512, 1), "mixtral-8x7b": (4096, 1024, 1), "llama3-70b": (4096, 1024, 2)}
)
"""Sequence length, global batch, and hosts of the smaller jobs of a model on 64 hosts of 8 H100."""

STUDY = """
name: {model}
model: {model}
cluster: {{name: dgx-h100, hosts: 64}}
job: {{sequence_length: {sequence_length}, global_batch_size: {batch}}}
search: {{max_trials: {trials}, seed: {seed}, baseline: false}}
trial: {{backend: simulated, seed: {seed}, proxy: {{hosts: {hosts}, full_trials: 0}}}}
"""

WAYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"alone": (), "proxies": ("trial.proxy.full_trials=3",), "whole": ("trial.proxy=null",)}
)
"""Changes of a study that make each way."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    return answer("few_hosts", _arguments(argv), _measure, _print)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("search.few_hosts", __doc__)
    parser.add_argument("--studies", nargs="+", choices=tuple(STUDIES), default=tuple(STUDIES), help="models (all)")
    parser.add_argument("--hosts", type=count_at_least(1), help="hosts of smaller jobs (as STUDIES says)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further changes of each study")
    parser.add_argument("--seeds", type=count_at_least(1), default=5, help="worlds of each study (5)")
    parser.add_argument("--trials", type=count_at_least(4), default=20, help="budget of each study (20)")
    parser.add_argument("--startup-s", type=float, default=60.0, help="time that a trial starts before its steps (60)")
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for model in given.studies:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for seed in range(given.seeds):
            for way, changes in WAYS.items():
                hosts = given.hosts or STUDIES[model][2]
                found[way].append(search_in(model, seed, given.trials, (*given.set, *changes), given.startup_s, hosts))
            tell(f"{model}, world {seed}: {', '.join(f'{way} {found[way][-1]}' for way in WAYS)}")
        rows += [_row(model, way, each, found["whole"]) for way, each in found.items()]
    return {"rows": rows}


def _row(
    model: str, way: str, found: Sequence[Mapping[str, float]], whole: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return the figures of one way over all worlds."""
    regrets = [each["regret"] for each in found]
    ran = [regret for regret in regrets if math.isfinite(regret)]
    hours = float(np.mean([each["device_hours"] for each in found]))
    return {
        "study": model,
        "way": way,
        "mean_regret": float(np.mean(ran)) if ran else None,
        "largest_regret": max(ran, default=None),
        "answers_without_room": len(regrets) - len(ran),
        "mean_trials": float(np.mean([each["trials"] for each in found])),
        "mean_device_hours": hours,
        "share_of_device_hours": hours / float(np.mean([each["device_hours"] for each in whole])),
    }


def search_in(
    model: str, seed: int, trials: int, changes: Sequence[str], startup_s: float, hosts: int
) -> dict[str, float]:
    """Run one study in the world of a seed; return its regret, its number of trials and their device-hours."""
    sequence_length, batch, _ = STUDIES[model]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "study.yaml"
        text = STUDY.format(
            model=model, sequence_length=sequence_length, batch=batch, hosts=hosts, trials=trials, seed=seed
        )
        file.write_text(text, encoding="utf-8")
        config = load_study(file, overrides=changes, storage=f"sqlite:///{folder}/study.db")
        result = run_here(config)
    full_size = config.problem.cluster.num_devices
    hours = sum(
        device_hours(record.observation, record.proxy.config.num_devices if record.proxy else full_size, startup_s)
        for record in result.records
        if record.observation is not None
    )
    regret = round(regret_of(config, result), 6) + 0.0  # no -0
    return {"regret": regret, "trials": len(result.records), "device_hours": round(hours, 2)}


def regret_of(config: StudyRequest, result: RunResult) -> float:
    """Return the slowdown of a study's answer in its world; infinite where it does not fit, or there is none."""
    world, params = config.trials.backend, None
    assert isinstance(world, SimulatedBackend), "these studies are simulated"
    if result.best is not None:
        params = result.best.params
    elif result.extrapolated is not None:
        params = result.extrapolated.config
    if params is None:
        return math.inf
    chosen = ConfigGrid.from_configs([config.problem.config_of(params)], config.problem.options.opened)
    fastest_s = float(true_step_s(world, config.problem.space().grid).min())
    return float(true_step_s(world, chosen)[0]) / fastest_s - 1


def _print(result: Mapping[str, Any]) -> None:
    for row in result["rows"]:
        has_any = row["mean_regret"] is not None
        regret = f"{row['mean_regret']:.1%}, at most {row['largest_regret']:.1%}" if has_any else "none"
        print(
            f"{row['study']:>13} {row['way']:>8}: regret {regret}; {row['mean_trials']:.1f} trials, "
            f"{row['mean_device_hours']:.1f} device-hours, {row['share_of_device_hours']:.1%} of whole"
            + (f"; {row['answers_without_room']} answers do not fit" if row["answers_without_room"] else "")
        )


if __name__ == "__main__":
    sys.exit(main())
