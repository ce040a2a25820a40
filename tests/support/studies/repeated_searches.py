"""Program that runs searches and plans from one seed and prints their decisions, which must repeat, as one JSON object.

    python -m tests.support.studies.repeated_searches FOLDER [--impatient]

FOLDER must be empty. With `--impatient`, the clock advances by an hour at every reading, as on a very slow machine.
Trials are measured in this process, with one or two pending, so that they always end in the same order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from threadpoolctl import threadpool_info

REPLAYED = """
name: replayed
cluster: {name: dgx-h100, hosts: 1}
search: {confidence: 1.0, max_trials: 6, draws: 20}
trial: {backend: replay, measured: [rows.csv]}
"""
SIMULATED = """
name: simulated
model: llama3-8b
cluster: {name: dgx-h100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
space: {tp: [2, 4, 8], mbs: [1, 2], cp: [1], up: [1], vpp: [1]}
search: {confidence: 1.0, max_trials: 4, draws: 20, parallel_trials: 2}
trial: {backend: simulated, seed: 2}
history: [HISTORY]
"""
DEGREES = [(tp, mbs) for tp in (8, 4, 2, 1) for mbs in (1, 2)]


def replayed(folder: Path) -> Path:
    """Return a study of eight measured rows, one of which ran out of memory."""
    from tests.support.studies.broken_studies import rows

    steps_s = [None if (tp, mbs) == (1, 2) else 1 + tp / 10 + mbs / 100 for tp, mbs in DEGREES]
    measured = [
        {"tp": tp, "dp": 8 // tp, "mbs": mbs, "step_seconds": step_s}
        for (tp, mbs), step_s in zip(DEGREES, steps_s, strict=True)
        if step_s is not None
    ]
    (folder / "rows.csv").write_text(rows(*measured), encoding="utf-8")
    file = folder / "replayed.yaml"
    file.write_text(REPLAYED, encoding="utf-8")
    return file


def simulated(folder: Path, history: str) -> Path:
    """Return a study of a simulated world, with the runs of an earlier study."""
    file = folder / "simulated.yaml"
    file.write_text(SIMULATED.replace("HISTORY", f'"{history}"'), encoding="utf-8")
    return file


def searched(file: Path, storage: str, *, dies_at: int | None = None, overrides: tuple[str, ...] = ()) -> list[object]:
    """Run a study and return its trials in order; the process is killed in trial `dies_at`, if given."""
    from tests.support.studies.in_process_executor import InProcessExecutor
    from tuner.run.loop import run_study
    from tuner.study_file.config import load_study

    config = load_study(file, storage=storage, overrides=list(overrides))
    backend = config.trials.backend if dies_at is None else Deadly(config.trials.backend, dies_at)
    executor = InProcessExecutor(backend, config.search.parallel_trials)
    return sequence(run_study(config, on_progress=lambda _: None, executor=executor).records)


def sequence(records: list[object]) -> list[object]:
    """Convert trials to JSON: ordered parameters, result, and posterior at that time, with all digits."""
    told = [(list(one.params.items()), one.status, one.step_time_s, one.p_star, one.prediction) for one in records]
    return json.loads(json.dumps(told))


class Deadly:
    """Backend that measures as another one does, and kills this process in the middle of one trial."""

    def __init__(self, backend: object, dies_at: int) -> None:
        self.backend, self.dies_at = backend, dies_at

    def measure(self, config: object, *, trial_number: int) -> object:
        """Measure a trial as the executor requests."""
        if trial_number == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.backend.measure(config, trial_number=trial_number)


def plans() -> dict[str, object]:
    """Return the plans of all planners for a perceptron of two layers on four devices."""
    from tests.support.graphs.random_graphs import mesh_of
    from tests.support.graphs.small_graphs import mlp
    from tuner.planners.planning import PlannerOptions, plan_graph
    from tuner.planners.sharding.sharding_milp import shard_by_milp

    graph, mesh = mlp(num_layers=2), mesh_of(2, 2)
    found: dict[str, object] = {}
    for planner in ("recursive", "descent", "toast"):
        one = plan_graph(graph, mesh, PlannerOptions(planner=planner))
        found[planner] = [one.plan.served.tolist(), one.cost.step_time_s, one.bound_s, one.order]
    found["program"] = shard_by_milp(graph, mesh).best.solution.served.tolist()
    return json.loads(json.dumps(found))


def become_impatient() -> None:
    """Advance the clock by an hour at each reading, in all modules that are imported from now on."""
    hours = itertools.count()
    time.perf_counter = time.monotonic = lambda: 3600.0 * next(hours)


def main(arguments: list[str]) -> None:
    """Run all searches and plans, and print their decisions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--impatient", action="store_true")
    given = parser.parse_args(arguments)
    if given.impatient:
        become_impatient()
    folder = given.folder.resolve()
    storage = f"sqlite:///{folder / 'study.db'}"
    told = {
        "replayed": searched(replayed(folder), storage),
        "simulated": searched(simulated(folder, storage), f"sqlite:///{folder / 'second.db'}"),
        "plans": plans(),
    }
    # scikit-learn brings OpenMP as well, which computes nothing of ours
    threads = [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]
    print(json.dumps({"told": told, "threads": threads}))  # noqa: T201 # the test reads it


if __name__ == "__main__":
    main(sys.argv[1:])
