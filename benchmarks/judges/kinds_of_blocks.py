"""Judge step times by kind of block, with profiles that have never seen the publisher of a run.

    python -m benchmarks.judges.kinds_of_blocks [A.csv ...] [--cache DIR] [--rows] [--json]

The runs are those of configs/measured/kinds, to which nothing is ever fitted; models.yaml beside them says which kinds
of blocks each model has. Whatever was fitted to other runs of the same publisher is fitted again without them
(benchmarks/strangers/left_out.py). A run counts in each of its model's kinds. The columns are the rows of the kind,
those that were predicted, their median error, the median of predicted over measured less 1, and the shares inside the
stated intervals of 68% and 95%. A row whose model no reader knows, or that is not a whole run, is counted by its
reason. --rows prints each prediction with its interval of 95%. Progress goes to stderr; exit status 2 reports a mistake
in the arguments.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.strangers.left_out import CACHE_HELP, Without, profile_without
from benchmarks.support.fidelity_figures import error_figures, log_errors
from benchmarks.support.problems import read_runs, strange_setting
from benchmarks.support.shipped_runs import FOLDER, shipped_runs
from benchmarks.support.timing import answer, benchmark_parser
from costmodels.calibration.fidelity import predict, settings_of
from costmodels.calibration.measured_runs import RECOMPUTE_NOT_STATED, MeasuredRun, read_measured_and_unstated
from costmodels.calibration.sources import publisher_of, source_of
from hardware.arrays import FloatArray
from hardware.io.config_file import read_mapping, read_text
from hardware.io.errors import ConfigError, did_you_mean

KINDS_FOLDER = FOLDER.parent / "kinds"
KIND_NAMES = (
    "full attention",
    "window",
    "latent attention",
    "sparse attention",
    "linear attention",
    "state space",
    "experts",
    "multimodal",
    "multi-token prediction",
)
"""Kinds of blocks, in the order of the table."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judged:
    """Predictions of n runs by profiles that have not seen their publishers.

    Attributes:
        runs: Timed runs [n].
        step_time_s: Predicted step times [n].
        half_width: Half-widths of the intervals of their logarithm, under `covered_68` and `covered_95`, each [n].
    """

    runs: tuple[MeasuredRun, ...]
    step_time_s: FloatArray
    half_width: Mapping[str, FloatArray]

    def figures(self, at: np.ndarray) -> dict[str, float | None]:
        """Return the errors of the runs where `at` [n] holds, and the shares of them inside the intervals."""
        measured = np.array([run.step_time_s for run in self.runs], dtype=np.float64)[at]
        predicted = self.step_time_s[at]
        away = np.abs(np.log(measured / predicted))
        covered = {
            name: float(np.mean(away <= width[at])) if len(away) else None for name, width in self.half_width.items()
        }
        return {**error_figures(predicted, measured), **covered}


def kinds_of_models() -> dict[str, tuple[str, ...]]:
    """Return the kinds of blocks of each model, by the name of its file without ending.

    Raises:
        ConfigError: a kind is none of KIND_NAMES.
    """
    path = KINDS_FOLDER / "models.yaml"
    kinds = {name: tuple(entry["kinds"]) for name, entry in read_mapping(path).items()}
    for model, own in kinds.items():
        for kind in own:
            if kind not in KIND_NAMES:
                nearest = did_you_mean(kind, KIND_NAMES)
                raise ConfigError("is no kind of block", key=model, value=kind, nearest=nearest, file=str(path))
    return kinds


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    return answer("kinds_of_blocks", _arguments(argv), _measure, _print)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("judges.kinds_of_blocks", __doc__)
    files = sorted(KINDS_FOLDER.glob("*.csv"))
    help_text = "measured runs (all of configs/measured/kinds)"
    parser.add_argument("measured", nargs="*", type=Path, default=files, metavar="CSV", help=help_text)
    parser.add_argument("--cache", type=Path, metavar="DIR", help=CACHE_HELP)
    parser.add_argument("--rows", action="store_true", help="print each run")
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute all figures.

    Raises:
        ConfigError: a file cannot be read, or holds no run of a known model.
    """
    kinds = kinds_of_models()
    rows = Counter(kind_key for path in given.measured for kind_key in _models_of_rows(path, kinds))
    runs, unstated, skipped = read_measured_and_unstated(given.measured, Path())
    known, _, fallen = settings_of([run for run in runs if run.step_time_s], {})
    if unstated:
        fallen[RECOMPUTE_NOT_STATED] += len(unstated)
    judged = judge_runs(known, given.cache)
    models = np.array([_model(run) for run in judged.runs])
    return {
        "by_kind": {
            kind: _line(judged, rows, models, [name for name, own in kinds.items() if kind in own])
            for kind in KIND_NAMES
        },
        "by_model": {name: _line(judged, rows, models, [name]) for name in sorted(rows)},
        "overall": _line(judged, rows, models, list(kinds)),
        "rows": _rows(judged, kinds),
        "shows_rows": given.rows,
        "skipped": dict(Counter(skipped) + fallen),
    }


def judge_runs(runs: Sequence[MeasuredRun], cache: Path | None) -> Judged:
    """Predict each run by its runtime's profile without the run's publisher."""
    needed = [(publisher_of(run.source), source_of(run).runtime) for run in runs]
    others = read_runs(shipped_runs())[0]
    profiles = {
        (publisher, runtime): profile_without(Without(runtime=runtime, publisher=publisher, runs=others, cache=cache))
        for publisher, runtime in sorted(set(needed))
    }
    settings = [strange_setting(run, profiles[key]) for run, key in zip(runs, needed, strict=True)]
    return Judged(
        runs=tuple(runs), step_time_s=predict(runs, settings).step_time_s, half_width=log_errors(runs, settings).step
    )


def _models_of_rows(path: Path, kinds: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the model of each row of a file.

    Raises:
        ConfigError: a row names no model of models.yaml.
    """
    models = [
        Path(row.get("architecture") or row["model"]).stem for row in csv.DictReader(io.StringIO(read_text(path)))
    ]
    for line, model in enumerate(models, start=2):
        if model not in kinds:
            nearest = did_you_mean(model, kinds)
            rule = f"has no kinds of blocks in {KINDS_FOLDER / 'models.yaml'}"
            raise ConfigError(rule, key="architecture", value=model, nearest=nearest, file=f"{path}:{line}")
    return models


def _model(run: MeasuredRun) -> str:
    return Path(run.architecture).stem


def _line(judged: Judged, rows: Mapping[str, int], models: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the counts and figures of the runs of some models; `models` are those of all runs [n]."""
    at = np.isin(models, names)
    return {"rows": sum(rows.get(name, 0) for name in names), "predicted": int(at.sum()), **judged.figures(at)}


def _rows(judged: Judged, kinds: Mapping[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    wide = np.exp(judged.half_width["covered_95"])
    return [
        {
            "place": run.place,
            "model": _model(run),
            "kinds": list(kinds[_model(run)]),
            "devices": run.devices,
            "device": run.device,
            "measured_s": run.step_time_s,
            "predicted_s": float(predicted),
            "low_s": float(predicted / factor),
            "high_s": float(predicted * factor),
            "error": float(predicted / run.step_time_s - 1) if run.step_time_s else None,
        }
        for run, predicted, factor in zip(judged.runs, judged.step_time_s, wide, strict=True)
    ]


COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("rows", "rows", "{:,}".format),
    ("predicted", "predicted", "{:,}".format),
    ("median_ape", "median error", "{:.1%}".format),
    ("bias", "bias", "{:+.1%}".format),
    ("covered_68", "in 68%", "{:.0%}".format),
    ("covered_95", "in 95%", "{:.0%}".format),
)
"""Keys of the columns, their headings and formats."""


def _print(result: Mapping[str, Any]) -> None:
    for title, lines in (("kind of block", result["by_kind"]), ("model", result["by_model"])):
        table = [(title, *(heading for _, heading, _ in COLUMNS))]
        for name, figures in [*lines.items(), ("all", result["overall"])]:
            table.append((name, *("-" if figures[key] is None else form(figures[key]) for key, _, form in COLUMNS)))
        _print_table(table)
        print()
    if result["shows_rows"]:
        table = [("row", "model", "devices", "measured", "predicted", "interval of 95%", "error")]
        for row in result["rows"]:
            interval = f"{row['low_s']:.3g} to {row['high_s']:.3g} s"
            times = (f"{row['measured_s']:.3g} s", f"{row['predicted_s']:.3g} s", interval, f"{row['error']:+.1%}")
            table.append((row["place"], row["model"], f"{row['devices']:,} {row['device']}", *times))
        _print_table(table)
        print()
    for reason, count in sorted(result["skipped"].items()):
        print(f"skipped {count:,}: {reason}")


def _print_table(table: Sequence[tuple[str, ...]]) -> None:
    """Print columns as wide as their widest cell, the first left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *rest in table:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))


if __name__ == "__main__":
    sys.exit(main())
