"""Compare predictions with those of Calculon (Isaev et al. 2023) on every measured run that Calculon can express.

    git clone https://github.com/calculon-ai/calculon
    python -m benchmarks.papers.calculon --calculon calculon [--measured A.csv ...] [--cache DIR] [--json]

Calculon is not on PyPI: the package of that name is another one. It is fitted to nothing here and uses its own files of
A100 and H100, with the hosts and adapters of each run (calculon_inputs.py). Meshtune predicts each run with the profile
of its own runtime, after everything that was fitted to the run's publisher has been fitted again without it, as in
benchmarks.strangers. Both are judged on the same runs: the median error of the step time, and the bias, the median of
predicted over measured. `nearly` names what Calculon has no words for and is expressed as the nearest that it has.

The speeds are predictions per CPU second on exactly these runs, from the setting of each to its time. Runs
that share a setting are one call of Meshtune; benchmarks.speed.predictions counts those of a whole grid.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.calculon_inputs import (
    SYSTEMS,
    application_of,
    approximations,
    device_of,
    execution_of,
    inexpressible,
    system_of,
)
from benchmarks.strangers.left_out import CACHE_HELP, profiles_without, strange_setting
from benchmarks.support.fidelity_figures import error_figures
from benchmarks.support.problems import read_runs
from benchmarks.support.timing import answer, searching, tell
from benchmarks.support.workers import mapper
from costmodels.calibration.fidelity import is_clean, predict, settings_of
from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import MeasuredSetting, publisher_of, source_of
from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError

REPOSITORY = "https://github.com/calculon-ai/calculon"
A100 = "A100-SXM-80"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calculon:
    """Calculon from a checkout of its repository.

    Attributes:
        systems: Its folder of system files.
        system: Its class of a system.
        llm: Its class of a model on a system.
    """

    systems: Path
    system: Any
    llm: Any

    def step_time_s(self, run: MeasuredRun, setting: Setting) -> float:
        """Predict the time of one step [s].

        Raises:
            ValueError: Calculon refuses the run; the message is its own.
        """
        published = _read_json(self.systems / SYSTEMS[device_of(setting)])
        try:
            system = self.system(system_of(setting, published))
            model = self.llm(self.llm.Application(application_of(run)), logging.getLogger(__name__))
            model.compile(system, self.llm.Execution.from_json(execution_of(run, setting)))
            model.run(system)
        except (self.llm.Error, AssertionError) as refusal:  # it checks its inputs with assertions
            raise ValueError(str(refusal)) from refusal
        return float(model.get_total_time())


@cache
def _read_json(file: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def load_calculon(folder: Path) -> Calculon:
    """Import Calculon from a checkout.

    Raises:
        ConfigError: The folder is no checkout, or a library that it needs is missing.
    """
    folder = folder.resolve()
    needed = (folder / "calculon" / "llm" / "llm.py", *(folder / "systems" / name for name in SYSTEMS.values()))
    if not all(file.is_file() for file in needed):
        get_it = f"git clone {REPOSITORY}"
        raise ConfigError("must be a checkout of Calculon", key="--calculon", value=str(folder), nearest=get_it)
    sys.path.insert(0, str(folder))
    try:
        package, llm = importlib.import_module("calculon"), importlib.import_module("calculon.llm")
    except ImportError as error:
        raise ConfigError(f"cannot be imported ({error})", key="--calculon", value=str(folder)) from error
    finally:
        sys.path.remove(str(folder))
    return Calculon(systems=folder / "systems", system=package.System, llm=llm.Llm)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    parser = searching("papers.calculon", __doc__)
    parser.add_argument("--calculon", type=Path, required=True, metavar="DIR", help=f"checkout of {REPOSITORY}")
    parser.add_argument("--cache", type=Path, metavar="DIR", help=CACHE_HELP)
    return answer("papers.calculon", parser.parse_args(argv), _measure, _print)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute all figures.

    Raises:
        ConfigError: The arguments cannot be used, or Calculon can express none of the runs.
    """
    calculon = load_calculon(given.calculon)
    every_run, _ = read_runs(given.measured)
    clean = [run for run in every_run if not run.is_failed and is_clean(run)]
    known, shipped, _ = settings_of(clean, {})
    refused, chosen = Counter[str](), []
    for run, measured in zip(known, shipped, strict=True):
        if run.step_time_s is None:
            continue
        if reason := inexpressible(run, measured.setting):
            refused[reason] += 1
        else:
            chosen.append(run)
    publishers = sorted({publisher_of(run.source) for run in chosen})
    with mapper(given.workers) as each:
        profiles = profiles_without(publishers, every_run, given.cache, each)
    settings = [strange_setting(run, profiles[publisher_of(run.source)][source_of(run).runtime]) for run in chosen]
    tell(f"predicting {len(chosen):,} runs with both")
    start = time.process_time()
    ours_s = predict(chosen, settings).step_time_s
    ours_per_s = len(chosen) / (time.process_time() - start) if chosen else 0.0
    theirs_s, kept = np.full(len(chosen), np.nan), []
    start = time.process_time()
    for place, (run, measured) in enumerate(zip(chosen, settings, strict=True)):
        try:
            theirs_s[place] = calculon.step_time_s(run, measured.setting)
            kept.append(place)
        except ValueError as error:
            refused[f"Calculon: {error}"] += 1
    theirs_per_s = len(chosen) / (time.process_time() - start) if chosen else 0.0
    if not kept:
        raise ConfigError("hold no run that Calculon can express", key=", ".join(map(str, given.measured)))
    compared = [_Compared.of(chosen[at], settings[at], float(theirs_s[at]), float(ours_s[at])) for at in kept]
    return {
        "sources": [{"source": name, "nearly": nearly, **_judge(own)} for (name, nearly), own in _by_source(compared)],
        "multi_node_a100": _judge([each for each in compared if each.is_multi_node_a100]),
        "exactly": _judge([each for each in compared if not each.nearly]),
        "all": _judge(compared),
        "refused": dict(refused.most_common()),
        "predictions_per_cpu_s": {"calculon": theirs_per_s, "meshtune": ours_per_s},
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    """One run and both predictions of its step time [s]."""

    source: str
    nearly: tuple[str, ...]
    is_multi_node_a100: bool
    measured_s: float
    calculon_s: float
    meshtune_s: float

    @classmethod
    def of(cls, run: MeasuredRun, measured: MeasuredSetting, calculon_s: float, meshtune_s: float) -> _Compared:
        setting = measured.setting
        assert run.step_time_s is not None, "only timed runs are compared"
        return cls(
            source=run.source,
            nearly=approximations(run, setting),
            is_multi_node_a100=setting.cluster.num_hosts > 1 and device_of(setting) == A100,
            measured_s=run.step_time_s,
            calculon_s=calculon_s,
            meshtune_s=meshtune_s,
        )


def _by_source(compared: Sequence[_Compared]) -> list[tuple[tuple[str, tuple[str, ...]], list[_Compared]]]:
    """Return the runs of each source that are expressed alike, the exactly expressed ones first."""
    groups: dict[tuple[str, tuple[str, ...]], list[_Compared]] = defaultdict(list)
    for each in compared:
        groups[each.source, each.nearly].append(each)
    return sorted(groups.items(), key=lambda item: (bool(item[0][1]), item[0]))


def _judge(compared: Sequence[_Compared]) -> dict[str, Any]:
    """Return the number of runs and the errors of both."""
    measured_s = np.array([each.measured_s for each in compared])
    return {
        "runs": len(compared),
        "calculon": error_figures(np.array([each.calculon_s for each in compared]), measured_s),
        "meshtune": error_figures(np.array([each.meshtune_s for each in compared]), measured_s),
    }


def _print(result: Mapping[str, Any]) -> None:
    rows = [(row["source"], ", ".join(row["nearly"]), row) for row in result["sources"]]
    rows += [
        ("A100, several hosts", "", result["multi_node_a100"]),
        ("all expressed exactly", "", result["exactly"]),
        ("all", "", result["all"]),
    ]
    print(f"{'source':26} {'runs':>5} {'Calculon':>9} {'bias':>8} {'Meshtune':>9} {'bias':>8}  nearly")
    for name, nearly, row in rows:
        cells = " ".join(
            f"{_percent(row[model]['median_ape']):>9} {_percent(row[model]['bias'], '+'):>8}"
            for model in ("calculon", "meshtune")
        )
        print(f"{name:26} {row['runs']:5,} {cells}  {nearly}".rstrip())
    speed = result["predictions_per_cpu_s"]
    print(f"Predictions per CPU second: Calculon {speed['calculon']:,.0f}, Meshtune {speed['meshtune']:,.0f}")
    for reason, count in result["refused"].items():
        print(f"not expressed {count:,}: {reason}")


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1%}"


if __name__ == "__main__":
    sys.exit(main())
