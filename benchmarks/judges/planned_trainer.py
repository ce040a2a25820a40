"""Tune the training of docs/examples/hugging-face on two hosts with slow links, and time the best against plain ways.

    python -m benchmarks.judges.planned_trainer [--mbit 1000] [--rounds 5] [--json]

Hosts are network namespaces of this machine with one rank each, whose adapters `tc` shapes, which needs root. The study
is written by `meshtune init` and run by `meshtune run`. Then transformers' Trainer trains in turns with DDP, with
transformers' own FSDP, and by each of the study's other plans. A row has the median, the least and the most over the
rounds of a run's median step, and how far losses are from those of one process, which are printed with four digits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.shaped_hosts import ROOT, ShapedHosts, missing
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from hardware.io.errors import ConfigError
from trials.command.backend import CommandBackend
from tuner.own_step.plans import words_of
from tuner.planners.loaded_plan import load_plan
from tuner.study_file.config import load_study
from tuner.subject.own_step import OwnStepSubject

EXAMPLE = ROOT / "docs/examples/hugging-face/finetune.py"
WARMUP, STEPS = 2, 6
LATENCY_US = 60
"""Latency of a message between the hosts (measured: half of a `ping` of 0.1 ms)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows and return the exit status."""
    parser = benchmark_parser("judges.planned_trainer", __doc__)
    parser.add_argument("--mbit", type=count_at_least(1), default=1000, help="bandwidth of a host [Mbit/s] (1000)")
    parser.add_argument("--rounds", type=count_at_least(1), default=5, help="runs of each way (5)")
    return answer("planned_trainer", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run the study, and all ways in turns."""
    if lacks := missing():
        raise ConfigError(f"needs {lacks}, which this machine or user lacks")
    with tempfile.TemporaryDirectory() as place, ShapedHosts(2, given.mbit) as hosts:
        folder = Path(place)
        shutil.copy(EXAMPLE, folder)
        link = {"kind": "ethernet", "bandwidth_gb_per_s": given.mbit / 8000, "latency_us": LATENCY_US}
        cluster = {"device": "cpu-core", "hosts": 2, "devices_per_host": 1, "nic_links": [link]}
        (folder / "hosts.yaml").write_text(yaml.safe_dump(cluster))
        ranks = [sys.executable, "-m", "benchmarks.support.ranks_on_hosts", *hosts.names, "--", EXAMPLE.name]
        options = ["--plan", "{plan}", "--own-way", "--steps", "{total_steps}"]
        _meshtune(folder, "init", "--from-torch", "finetune:step", "--cluster", "hosts.yaml", "--", *ranks, *options)
        tell("running the study")
        set_once = ("--set", "trial.launch=once", "--set", "search.max_trials=12")
        _meshtune(folder, "run", "study.yaml", *set_once)
        best = json.loads(_meshtune(folder, "best", "study.yaml", *set_once, "--json"))
        rows = _rows(folder, ranks, given.rounds)
    return {"mbit_per_s": given.mbit, "study_best": best["config"], "study": best, "rows": rows}


def show(figures: dict[str, Any]) -> None:
    """Print all rows."""
    print(f"{figures['mbit_per_s']:,} Mbit/s; the study's best: {figures['study_best']}")
    publish(figures["rows"], as_json=False)


def _rows(folder: Path, ranks: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Time each way in turns, and one process for its losses."""
    ways = _ways(folder)
    alone, _ = _train(folder, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", EXAMPLE.name])
    times: dict[str, list[float]] = defaultdict(list)
    losses: dict[str, list[float]] = {}
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        for name, words in ways.items():
            losses[name], steps_s = _train(folder, [*ranks, *words])
            times[name].append(statistics.median(steps_s[WARMUP:]))
            tell(f"{name}: {times[name][-1]:.3f} s, losses {losses[name]}")
    plain_s = statistics.median(times["DDP"])
    return [
        {
            "way": name,
            "step_s": statistics.median(found),
            "least_s": min(found),
            "most_s": max(found),
            "gain_over_ddp": plain_s / statistics.median(found),
            "loss_off": max(abs(one - other) for one, other in zip(losses[name], alone, strict=True)),
        }
        for name, found in sorted(times.items(), key=lambda item: statistics.median(item[1]))
    ]


def _ways(folder: Path) -> dict[str, list[str]]:
    """Return the words by which the program trains as each plan of the study, and with DDP or FSDP in their place."""
    study = load_study(folder / "study.yaml")
    subject, backend = study.problem.subject, study.trials.backend
    assert isinstance(subject, OwnStepSubject), "a study of the example's step"
    assert isinstance(backend, CommandBackend), "a study of its command"
    assert backend.plans is not None, "its command takes plans"
    found = {}
    for tp in subject.plans.degrees:
        for candidate in subject.plans.on(tp).candidates:
            config = candidate.config
            file = folder / f"{words_of(config)}.json"
            file.write_text(backend.plans.text(config))
            name = {"ddp": "DDP", "fsdp": "FSDP"}.get(load_plan(file).own_way or "", words_of(config))
            found[name] = ["--plan", file.name, "--own-way"]
    return found


def _train(folder: Path, words: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the loss and the time [s] of each step of a run."""
    text = _run(folder, [*words, "--steps", str(WARMUP + STEPS)])
    losses = [float(each) for each in re.findall(r"'loss': '?([\d.]+)", text)]
    return losses, [float(each) for each in re.findall(r"took ([\d.]+) s", text)]


def _meshtune(folder: Path, *words: str) -> str:
    return _run(folder, [sys.executable, "-m", "tuner", *words])


def _run(folder: Path, words: Sequence[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MESHTUNE_STORAGE": f"sqlite:///{folder}/study.db"}
    run = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{words} ended with {run.returncode}: {run.stderr[-2000:]}{run.stdout[-1000:]}")
    return run.stdout


if __name__ == "__main__":
    sys.exit(main())
