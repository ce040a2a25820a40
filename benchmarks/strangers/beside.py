"""Meshtune's predictions beside those of other projects' cost models, on the same runs.

Letters: n runs.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.strangers import calculon, llm_analysis
from benchmarks.strangers.foreign_model import ForeignModel
from benchmarks.strangers.predicting import Predicted
from benchmarks.strangers.tables import over_sources, print_predicted
from benchmarks.support.fidelity_figures import LogErrors, judge
from benchmarks.support.simulated_runs import taken
from benchmarks.support.timing import tell
from costmodels.calibration.fidelity import Predictions
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting
from costmodels.step.error_models import ErrorModels
from hardware.arrays import FloatArray
from hardware.io.errors import ConfigError

OURS = "Meshtune"
PROJECTS = (calculon, llm_analysis)
"""Modules of the cost models, each with FOLDER, MARK, REPOSITORY and `load`."""

PEERS_HELP = "folder with clones of " + ", ".join(each.REPOSITORY for each in PROJECTS)
"""Help of the option `--peers`."""

Opinion = tuple[Predictions, LogErrors]
"""Predictions and the uncertainty that is stated for them."""

_UNSTATED = LogErrors(step={}, memory={})
"""Uncertainty of a model that states none."""


def load_models(folder: Path) -> list[ForeignModel]:
    """Import the cost models whose clones a folder holds.

    Raises:
        ConfigError: It holds none, or a library that one needs is missing.
    """
    folder = folder.resolve()
    found = [each for each in PROJECTS if (folder / each.FOLDER / each.MARK).is_file()]
    if not found:
        get_them = "; ".join(f"git clone {each.REPOSITORY}" for each in PROJECTS)
        raise ConfigError("must hold a clone of a cost model", key="--peers", value=str(folder), nearest=get_them)
    for each in PROJECTS:
        if each not in found:
            tell(f"--peers: no {each.FOLDER}/{each.MARK} in {folder}, so it is left out")
    return [each.load(folder / each.FOLDER) for each in found]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Said:
    """What a cost model says of n runs.

    Attributes:
        step_time_s: Step times; nan for runs that it cannot express [n].
        peak_bytes: Memory peaks, likewise [n].
        left_out: Number of runs that it cannot express, by reason.
        nearly: Number of runs that it expresses only nearly, by what it lacks.
        per_cpu_s: Predictions per CPU second.
    """

    step_time_s: FloatArray
    peak_bytes: FloatArray
    left_out: Counter[str]
    nearly: Counter[str]
    per_cpu_s: float

    def predictions(self, capacity_bytes: FloatArray) -> Predictions:
        """Return all as predictions on devices of this memory [n]."""
        fits = self.peak_bytes <= capacity_bytes
        return Predictions(step_time_s=self.step_time_s, peak_memory_bytes=self.peak_bytes, fits=fits)


def ask(model: ForeignModel, runs: Sequence[MeasuredRun], settings: Sequence[MeasuredSetting]) -> Said:
    """Predict runs by a foreign model.

    Args:
        model: The model.
        runs: Measured runs [n].
        settings: Setting of each run [n].
    """
    step_time_s, peak_bytes = np.full(len(runs), np.nan), np.full(len(runs), np.nan)
    left_out, nearly = Counter[str](), Counter[str]()
    start = time.process_time()
    for place, (run, measured) in enumerate(zip(runs, settings, strict=True)):
        if reason := model.inexpressible(run, measured.setting):
            left_out[reason] += 1
            continue
        try:
            step_time_s[place], peak_bytes[place] = model.predict(run, measured.setting)
        except ValueError as error:
            left_out[f"its own words: {error}"] += 1
            continue
        nearly.update(model.approximations(run, measured.setting))
    spent_s = time.process_time() - start
    known = int(np.isfinite(step_time_s).sum())
    return Said(
        step_time_s=step_time_s,
        peak_bytes=peak_bytes,
        left_out=left_out,
        nearly=nearly,
        per_cpu_s=known / spent_s if spent_s else 0.0,
    )


def compare(
    models: Sequence[ForeignModel], predictions: Mapping[str, Predicted], errors: Mapping[str, ErrorModels]
) -> dict[str, Any]:
    """Compute the figures of Meshtune and of foreign models on the runs that each of them, and that all, can express.

    Args:
        models: Foreign models.
        predictions: Meshtune's predictions, by publisher.
        errors: Error models of the others, by publisher.
    """
    runs = [run for own in predictions.values() for run in own.runs]
    settings = [measured for own in predictions.values() for measured in own.settings]
    tell(f"asking {', '.join(model.name for model in models)} about {len(runs):,} runs")
    said = {model.name: ask(model, runs, settings) for model in models}
    opinions = {OURS: _joined([own.stated(errors[name]) for name, own in predictions.items()])}
    capacity_bytes = np.array([measured.setting.cluster.memory_bytes for measured in settings], dtype=np.float64)
    for name, each in said.items():
        opinions[name] = each.predictions(capacity_bytes), _UNSTATED
    sets = [(name,) for name in said] + ([tuple(said)] if len(said) > 1 else [])
    return {
        "on": [
            {"models": [OURS, *names], **_judge_on(runs, {name: opinions[name] for name in (OURS, *names)})}
            for names in sets
        ],
        "left_out": {name: dict(each.left_out.most_common()) for name, each in said.items()},
        "nearly": {name: dict(each.nearly.most_common()) for name, each in said.items()},
        "predictions_per_cpu_s": {name: each.per_cpu_s for name, each in said.items()},
    }


def _joined(parts: Sequence[Opinion]) -> Opinion:
    """Return the predictions of all publishers, one after another."""
    predictions = Predictions(
        step_time_s=np.concatenate([each.step_time_s for each, _ in parts]),
        peak_memory_bytes=np.concatenate([each.peak_memory_bytes for each, _ in parts]),
        fits=np.concatenate([each.fits for each, _ in parts]),
    )
    widths = LogErrors(
        step={name: np.concatenate([each.step[name] for _, each in parts]) for name in parts[0][1].step},
        memory={name: np.concatenate([each.memory[name] for _, each in parts]) for name in parts[0][1].memory},
    )
    return predictions, widths


def _judge_on(runs: Sequence[MeasuredRun], opinions: Mapping[str, Opinion]) -> dict[str, Any]:
    """Judge all models on the runs that all of them can express: of each source, and all together."""
    known = np.logical_and.reduce([np.isfinite(predictions.step_time_s) for predictions, _ in opinions.values()])
    by_source: dict[str, list[int]] = defaultdict(list)
    for place in np.flatnonzero(known).tolist():
        by_source[runs[place].source].append(place)
    return {
        "sources": {source: _figures(runs, opinions, at) for source, at in sorted(by_source.items())},
        "all": _figures(runs, opinions, np.flatnonzero(known).tolist()),
    }


def _figures(
    runs: Sequence[MeasuredRun], opinions: Mapping[str, Opinion], at: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Return the figures of each model on the runs at some positions."""
    places, own = np.array(at, dtype=np.int64), [runs[place] for place in at]
    return {
        name: judge(own, taken(predictions, places), widths.take(places))[1]
        for name, (predictions, widths) in opinions.items()
    }


def print_beside(beside: Mapping[str, Any]) -> None:
    """Print the tables of `compare`."""
    for part in beside["on"]:
        first, *others = part["models"]
        print(
            f"\n{first} beside {' and '.join(others)}, on the runs that {'both' if others[1:] else 'it'} can express:"
        )
        print_predicted(
            [
                (f"{source}, {name}", part["sources"][source][name])
                for source in part["sources"]
                for name in part["models"]
            ]
            + [(f"all, {name}", part["all"][name]) for name in part["models"]]
            + [
                (f"mean of sources, {name}", over_sources([each[name] for each in part["sources"].values()]))
                for name in part["models"]
            ]
        )
    for name, nearly in beside["nearly"].items():
        print(f"{name} expresses nearly: {', '.join(f'{what} ({count:,})' for what, count in nearly.items())}")
        print(f"{name} makes {beside['predictions_per_cpu_s'][name]:,.0f} predictions per CPU second")
        for reason, count in beside["left_out"][name].items():
            print(f"{name} cannot express {count:,}: {reason}")
