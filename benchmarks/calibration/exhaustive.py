"""Measure every candidate of a study with real training several times, and judge predictions by the measurements.

    python -m benchmarks.calibration.exhaustive configs/studies/cpu-gpt.yaml --out cpu-gpt.csv [--repeats 2] [--json]

Each round measures all candidates once in an order of its own, so that a change of the machine does not affect only one
part of the space. Every trial is appended to the CSV file (in the format of configs/measured), and its observation to a
file of JSON lines beside it. A second call continues where the first one stopped. The clock is the study's
(`trial.clock`); CPU seconds of all ranks and the wall clock are stored in the notes.

The figures are: the agreement of the rounds on the ranking (Kendall's tau-b); tau and median error of the shipped
profile's predictions; and the same for a profile whose constants were fitted to one half of the candidates, judged on
the other half, each half in turn. A virtual clock takes its collectives from the same link model as the predictions, so
a tau against it is partly circular.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from costmodels.calibration.fitting import calibrate
from costmodels.calibration.measured_runs import COLUMNS, GIB, MeasuredRun, read_measured
from costmodels.job.parallel_config import DEGREES, ConfigGrid
from costmodels.surrogates.predicted import predict
from hardware.io.errors import ConfigError
from trials.backend import CLOCK_WORDS, Observation
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from trials.torch_training.backend import TorchBackend
from trials.torch_training.framework import TORCH
from trials.torch_training.rank_setup import TORCH_RANKS
from trials.training.backend import AbstractTrainingBackend
from trials.training.planned import PlannedBackend
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem


def main(argv: Sequence[str] | None = None) -> int:
    """Measure missing trials, print the figures and return the exit status."""
    return answer("exhaustive", _arguments(argv), _measure, _print)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("calibration.exhaustive", __doc__)
    parser.add_argument("study", type=Path, help="study file with trial: {backend: torch}")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write or to continue")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a key of the study")
    parser.add_argument("--repeats", type=count_at_least(1), default=2, help="number of rounds (2)")
    parser.add_argument("--source", default="meshtune-cpu", help="value of the column `source` (meshtune-cpu)")
    parser.add_argument("--judge-only", action="store_true", help="judge the file without measuring missing trials")
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    config = load_study(given.study, overrides=given.set)
    backend = config.trials.backend
    if not isinstance(backend, TorchBackend | PlannedBackend) or backend.framework is not TORCH:
        raise ConfigError("trains nothing for real", key="trial.backend", nearest="backend: torch")
    grid = config.problem.space().grid
    if not given.judge_only:
        _measure_rounds(config.problem, backend, grid, given)
    return _judge(config, grid, given.out)


def _measure_rounds(
    problem: Problem, backend: AbstractTrainingBackend, grid: ConfigGrid, given: argparse.Namespace
) -> None:
    done = _done(given.out)
    # Each round has a seeded order, so that a continued run measures exactly what is missing.
    todo = [
        (number, position)
        for number in range(given.repeats)
        for position in np.random.default_rng(number).permutation(len(grid)).tolist()
        if (number, _key(grid.config(position).values(DEGREES))) not in done
    ]
    tell(f"{len(grid)} candidates, {given.repeats} rounds: {len(done)} trials known, {len(todo)} to measure")
    began_s = time.monotonic()
    with RankProcesses(TORCH_RANKS) as ranks:
        opened = OpenBackend(backend=backend, ranks=ranks)
        for count, (number, position) in enumerate(todo, start=1):
            chosen = grid.config(position)
            trial_began_s = time.monotonic()
            observation = opened.measure(chosen, trial_number=position)
            elapsed_s = time.monotonic() - trial_began_s
            _write(given.out, _row(problem, backend, chosen.values(DEGREES), observation, number, given.source))
            with given.out.with_suffix(".jsonl").open("a", encoding="utf-8") as lines:
                told = {"round": number, "config": chosen.values(DEGREES), "elapsed_s": elapsed_s}
                lines.write(json.dumps(observation.as_json() | told) + "\n")
            left_s = (time.monotonic() - began_s) / count * (len(todo) - count)
            step = f"{observation.step_time_s:.4f} s" if observation.step_time_s else str(observation.status)
            tell(f"{count}/{len(todo)} {chosen}: {step} ({elapsed_s:.1f} s; {left_s / 60:.0f} min left)")


def _row(
    problem: Problem,
    backend: AbstractTrainingBackend,
    degrees: Mapping[str, Any],
    observation: Observation,
    number: int,
    source: str,
) -> dict[str, Any]:
    job, model = problem.setting.job, problem.setting.job.model
    step_s = observation.step_time_s
    conditions = "; ".join(f"{name}={value:.4g}" for name, value in observation.conditions)
    ended = "" if step_s else f"FAILED {observation.status}: {observation.reason}; "
    return dict.fromkeys(COLUMNS, "") | {
        "source": source,
        "source_url_or_repo_path": "benchmarks/calibration/exhaustive.py",
        "model": model.name,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.plain.num_heads,
        "kv_heads": model.plain.num_kv_heads,
        "ffn": model.plain.ffn_size,
        "vocab": model.vocab_size,
        "experts": model.num_experts or "",
        "topk": model.top_k or "",
        "moe_ffn": model.plain.expert_ffn_size or "",
        "seq_len": job.sequence_length,
        "gbs": job.global_batch_size,
        "devices": problem.setting.cluster.num_devices,
        "device": problem.setting.cluster.devices[0].name,
        **degrees,
        "recompute": job.recompute,
        "zero_stage": job.zero_stage,
        "seq_parallel": int(bool(problem.subject.defaults["sequence_parallel"]) and degrees["tp"] > 1),
        "precision": job.precision,
        "step_seconds": f"{step_s:.6g}" if step_s else "",
        "peak_mem_gib": f"{observation.peak_memory_bytes / GIB:.4g}" if observation.peak_memory_bytes else "",
        "notes": f"{ended}clock={backend.clock}; round={number}; {conditions}",
    }


def _write(path: Path, row: Mapping[str, Any]) -> None:
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def _key(degrees: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(degrees[name]) for name in DEGREES)


def _done(path: Path) -> dict[tuple[int, tuple[int, ...]], dict[str, str]]:
    """Read the rows of the file, by round and degrees."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        return {(int(_parse_notes(row)["round"]), _key(row)): row for row in csv.DictReader(lines)}


def _parse_notes(row: Mapping[str, str]) -> dict[str, str]:
    """Parse the `name=value` entries of a row's notes."""
    pairs = (entry.partition("=") for entry in row["notes"].split("; "))
    return {name: value for name, equals, value in pairs if equals}


def _judge(config: StudyRequest, grid: ConfigGrid, path: Path) -> dict[str, Any]:
    """Compute all figures over the candidates that every round measured."""
    rows = _done(path)
    rounds = sorted({number for number, _ in rows})
    keys = [_key(grid.config(position).values(DEGREES)) for position in range(len(grid))]
    timed = [
        position
        for position, key in enumerate(keys)
        if rounds and all((number, key) in rows and rows[number, key]["step_seconds"] for number in rounds)
    ]
    if not timed:
        raise ConfigError("holds no candidate that was measured in every round", key="--out", value=str(path))
    # Rounds by candidates [rounds, n]; the median over rounds is the reference of all predictions.
    steps_s = np.array([[float(rows[number, keys[at]]["step_seconds"]) for at in timed] for number in rounds])
    cpus_s = np.array([[float(_parse_notes(rows[number, keys[at]])["cpu_s"]) for at in timed] for number in rounds])
    truth_s = np.median(steps_s, axis=0)
    predicted_s = predict(config.problem.subject.measured_setting, grid).step_time_s[timed]
    others = [float(_parse_notes(row).get("others_cpu_share", "nan")) for row in rows.values()]
    figures: dict[str, Any] = {
        "clock": CLOCK_WORDS[config.trials.backend.clock],
        "candidates": len(grid),
        "measured": len(timed),
        "rounds": len(rounds),
        "failed": sum(not row["step_seconds"] for row in rows.values()),
        "median_others_cpu_share": statistics.median(others),
        "fastest_s": float(truth_s.min()),
        "slowest_s": float(truth_s.max()),
        "prior": _compare(predicted_s, truth_s),
        "fitted_on_other_half": _cross_validate(config.problem, path, grid.take(np.array(timed)), truth_s),
        "cpu_seconds": _compare(cpus_s.mean(axis=0), truth_s),
    }
    if len(rounds) > 1:
        figures["repeatability"] = _compare(steps_s[0], steps_s[1])
        figures["repeatability_of_cpu_seconds"] = _compare(cpus_s[0], cpus_s[1])
    return figures


def _compare(one_s: np.ndarray, other_s: np.ndarray) -> dict[str, float]:
    """Compute Kendall's tau-b, median absolute errors, and the slowdown of the first's best choice.

    The scaled error is the error after division by the median ratio.
    """
    # tau ignores a common factor; the scaled error removes it from the errors too.
    ratio = one_s / other_s
    return {
        "tau": float(kendalltau(one_s, other_s).statistic),
        "median_error": float(np.median(np.abs(ratio - 1))),
        "median_error_scaled": float(np.median(np.abs(ratio / np.median(ratio) - 1))),
        "regret_of_best": float(other_s[one_s.argmin()] / other_s.min() - 1),
    }


def _cross_validate(problem: Problem, path: Path, grid: ConfigGrid, truth_s: np.ndarray) -> dict[str, float]:
    """Compare predictions by constants that were fitted to the other half of the candidates."""
    runs = [run for run in read_measured([path], {}, Path()) if run.step_time_s is not None]
    # Cross-validation with two folds: no candidate is predicted by constants that saw it.
    half = np.random.default_rng(0).permutation(len(grid)) % 2
    keys = [_key(grid.config(position).values(DEGREES)) for position in range(len(grid))]
    in_half = {key: int(half[position]) for position, key in enumerate(keys)}
    predicted_s = np.empty(len(grid))
    for fold in (0, 1):
        seen: list[MeasuredRun] = [run for run in runs if in_half.get(_key(run.config.values(DEGREES))) == 1 - fold]
        profile = calibrate(seen, problem.setting.runtime, on_progress=lambda _: None).profile
        own = np.flatnonzero(half == fold)
        measured = replace(problem.subject.measured_setting, setting=replace(problem.setting, runtime=profile))
        predicted_s[own] = predict(measured, grid.take(own)).step_time_s
    return _compare(predicted_s, truth_s)


def _print(figures: Mapping[str, Any]) -> None:
    print(
        f"{figures['measured']} of {figures['candidates']} candidates in {figures['rounds']} rounds, "
        f"{figures['clock']}: {figures['fastest_s']:.4g} to {figures['slowest_s']:.4g} s; {figures['failed']} failed; "
        f"others used {figures['median_others_cpu_share']:.0%} of the CPU (median)"
    )
    rows = [{"prediction": name, **values} for name, values in figures.items() if isinstance(values, dict)]
    publish(rows, as_json=False)


if __name__ == "__main__":
    sys.exit(main())
