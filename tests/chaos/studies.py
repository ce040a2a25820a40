"""The studies that are disturbed: what a round is, its study file, and what an undisturbed one records."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.chaos.invariants import outcome
from tests.chaos.stored import read_stored
from tests.support.studies.driver_process import ROOT
from tests.support.studies.in_process_executor import InProcessExecutor
from tuner.run.loop import run_study
from tuner.study_file.config import load_study

STORAGES = ("sqlite", "postgresql", "journal")
TRIALS = ("command", "slurm", "torch", "replay", "simulated")
PROGRAMS = ("command", "slurm")
"""Trials that run PROGRAM, which keeps the ledger."""

RAYS = ("local", "nodes")
DIMENSIONS = ("pp", "tp", "dp", "cp", "up", "vpp", "ep", "mbs")
PUBLISHED = ROOT / "configs" / "studies" / "ultrascale-llama-8b-128.yaml"
PROGRAM = Path(__file__).with_name("trial_program.py")
SMALL = """
name: {name}
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 64, global_batch_size: 16, precision: fp32}}
search: {{max_trials: 1, prune: false, confidence: 1.0, repeats: 0, baseline: false}}
trial: {trial}
"""
COMMAND = "{{backend: command, launch: {launch}, steps: 5, warmup_steps: 2, logs: {logs}, command: [{command}]}}"
TORCH = "{backend: torch, warmup_steps: 1, min_steps: 4, max_steps: 4}"
SIMULATED = "{{backend: simulated, seconds_per_trial: {seconds}}}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One fault of a schedule.

    Attributes:
        fault: Its name.
        is_early: Whether it comes while the driver still starts, and not while trials run.
        delay_s: How long after that moment.
        hold_s: How long until it is undone.
        pick: Which of several victims it takes, by the remainder.
    """

    fault: str
    is_early: bool
    delay_s: float
    hold_s: float
    pick: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One study and what disturbs it.

    Attributes:
        number: From 0; with the seed of all rounds it makes everything else.
        storage: What holds it.
        trials: What its trials are.
        ray: Whether its driver starts Ray by itself, or joins a cluster of several nodes.
        budget: Trials.
        seed: Of its search.
        seconds: That a replayed or simulated trial takes [s].
        strikes: The faults, in their order.
    """

    number: int
    storage: str
    trials: str
    ray: str
    budget: int
    seed: int
    seconds: float
    strikes: tuple[Strike, ...]

    @property
    def name(self) -> str:
        """Name of the study; a replay has that of its file."""
        return f"chaos-{self.number}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the study file: one trial at a time in a replay, so that its search does not depend on who comes first."""
        search = {
            "max_trials": self.budget,
            "parallel_trials": 1 if self.trials == "replay" else 2,
            "confidence": 1.0,
            "prune": "false",
            "repeats": 0,
            "seed": self.seed,
        }
        told = tuple(f"search.{key}={value}" for key, value in search.items())
        own = {"replay": (f"trial.seconds_per_trial={self.seconds}",), "torch": ("runtime=torch-reference",)}
        return (*told, *own.get(self.trials, ()))


def write_study(which: Round, folder: Path, ledger: Path, logs: Path) -> Path:
    """The study file of a round."""
    if which.trials == "replay":
        return PUBLISHED
    arguments = [sys.executable, PROGRAM, ledger, "'{trial}'", *(f"'{name}={{{name}}}'" for name in DIMENSIONS)]
    launch = "slurm" if which.trials == "slurm" else "once"
    trial = {"torch": TORCH, "simulated": SIMULATED.format(seconds=which.seconds)}.get(
        which.trials, COMMAND.format(logs=logs, launch=launch, command=", ".join(map(str, arguments)))
    )
    path = folder / "chaos.yaml"
    path.write_text(
        SMALL.format(name=which.name, model=ROOT / "configs" / "models" / "gpt-small.yaml", trial=trial),
        encoding="utf-8",
    )
    return path


@cache
def undisturbed(budget: int, seed: int) -> tuple[tuple[str, str, float | None], ...]:
    """What a replay records that nobody disturbs."""
    which = Round(
        number=0, storage="sqlite", trials="replay", ray="local", budget=budget, seed=seed, seconds=0.0, strikes=()
    )
    with tempfile.TemporaryDirectory(prefix="meshtune-") as folder:
        storage = f"sqlite:///{folder}/study.db"
        config = load_study(PUBLISHED, overrides=which.overrides, storage=storage)
        run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(config.trials.backend))
        return tuple(outcome(trial) for trial in read_stored(storage).trials)
