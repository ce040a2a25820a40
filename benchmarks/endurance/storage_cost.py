"""Measure the storage time of a study's driver per trial, for each kind of storage.

    python -m benchmarks.endurance.storage_cost [--storages sqlite postgresql journal] [--at 0 300 1000] [--trials 30]
        [--folder DIR] [--json]

The driver runs as in `meshtune run`, with two exceptions. Trials end at once. Random draws replace the draws of the
surrogate, which would take minutes at 1,000 trials and use no storage. For each trial the driver asks with all
parameters and the prediction, reports steps, stores the observation and the rows for later studies, and tells the
result. Only the time inside Optuna's storages and studies, the database and the journal is measured. The driver's clock
advances by one second per trial, so that its claim on the study is renewed as in real trials of that length.

For comparison, a loop of plain Optuna runs on the same storage with the same settings, 8 parameters, the same steps and
two attributes, and once more in memory. Studies that have just begun and studies that already hold the number of trials
in `--at` are measured over `--trials` trials. The table shows median and mean of the wall time, which includes flushing
the disk, and the median of the driver's CPU time, in milliseconds.

The target is a tenth of a trial of one second. A PostgreSQL server is started if one is installed. Progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna import Study
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, Engine
from sqlalchemy.engine import Transaction

from benchmarks.support.postgresql_server import postgresql_server, server_programs
from benchmarks.support.timing import answer, count_at_least, publish, tell
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import Observation, Status
from tuner.forecast.candidates import candidates_of
from tuner.run.loop import run_study
from tuner.search.observations import Observations
from tuner.search.parameters import params_of
from tuner.search.posterior import Posterior
from tuner.storage.journal_file import JournalFile
from tuner.storage.opening import open_store
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest
from tuner.study_file.storage_address import StorageAddress

STORAGES = ("sqlite", "postgresql", "journal")
TARGET_S = 0.1
STEPS_S = (1.0, 1.02, 0.99, 1.01)
PASSWORD = "benchmark"  # noqa: S105 # of a server that lives as long as the benchmark
STUDY = """
name: cost
model: llama-7b
cluster: {name: dgx-a100, hosts: 16}
job: {sequence_length: 4096, global_batch_size: 1024}
search: {confidence: 1.0, baseline: false}
trial: {backend: simulated}
"""

TIMED = (
    _CachedStorage,
    RDBStorage,
    JournalStorage,
    InMemoryStorage,
    JournalFile,
    Connection,
    Engine,
    Transaction,
    Study,
)
NOT_TIMED = {"ask", "tell", "optimize", "begin", "together", "transaction"}
"""Methods of these classes that are not timed, because they call back or only open a context for a block."""


@dataclass
class Stopwatch:
    """Time spent inside storages, per trial.

    Attributes:
        depth: Number of nested storage calls under way; only the outermost is timed.
        wall_s: Wall time of the current trial so far [s].
        cpu_s: CPU time of this thread for the current trial so far [s].
        taken: Wall and CPU time of each trial that has ended [s].
    """

    depth: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    taken: list[tuple[float, float]] = field(default_factory=list)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is counted."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.wall_s += time.perf_counter() - wall_s
                    self.cpu_s += time.thread_time() - cpu_s

        return call

    def lap(self) -> None:
        """Record the times of the trial that has just ended."""
        self.taken.append((self.wall_s, self.cpu_s))
        self.wall_s = self.cpu_s = 0.0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Time all storage calls inside the block."""
        # Optuna's and SQLAlchemy's classes are patched themselves, so that calls from any place are timed.
        before = [
            (owner, name, member)
            for owner in TIMED
            for name, member in vars(owner).items()
            if name not in NOT_TIMED and (not name.startswith("_") or name in {"__exit__", "_append"})
        ]
        for owner, name, member in before:
            if isinstance(member, property) and member.fget is not None:
                setattr(owner, name, property(self.timed(member.fget)))
            elif callable(member) and not isinstance(member, type | staticmethod | classmethod):
                setattr(owner, name, self.timed(member))
        try:
            yield
        finally:
            for owner, name, member in before:
                setattr(owner, name, member)


class EndingTrials:
    """Executor whose trials report their steps at the first poll, end at the second, and take no time."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.slots_note = ""
        self.now_s = time.time()
        self.reported: dict[int, tuple[float, ...]] = {}
        self._waiting: int | None = None

    def __enter__(self) -> EndingTrials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: no trial is running."""

    @property
    def queued(self) -> tuple[int, ...]:
        """Numbers of the trials that wait in a queue: none."""
        return ()

    @property
    def num_free_slots(self) -> int:
        """Number of free slots, 0 or 1."""
        return int(self._waiting is None)

    @property
    def pending(self) -> tuple[int, ...]:
        """Number of the submitted trial, or an empty tuple."""
        return () if self._waiting is None else (self._waiting,)

    def submit(self, trial_number: int, _config: ParallelConfig, _reduction: Reduction | None, /) -> None:
        """Accept a trial; storage time spent since the previous trial ended counts for this one."""
        self._waiting = trial_number

    def stop(self, trial_number: int, reason: str, /) -> None:
        """Fail, because trials with equal step times must not be stopped."""
        raise AssertionError(f"stopped trial {trial_number} of equals: {reason}")

    def cancel(self, trial_number: int, reason: str, /) -> None:
        """Fail, because the study has no budget of time."""
        raise AssertionError(f"cancelled trial {trial_number}: {reason}")

    def poll(self, _timeout_s: float, /) -> list[tuple[int, Observation]]:
        """Report the first steps of the submitted trial, or its observation at the second call."""
        number = self._waiting
        if number is None:
            return []
        if number not in self.reported:
            self.reported = {number: STEPS_S}
            return []
        self.now_s += 1.0
        self._waiting, self.reported = None, {}
        self.stopwatch.lap()
        return [(number, Observation(status=Status.OK, step_times_s=STEPS_S, origin="synthetic"))]


def cost_of_a_run(config: StudyRequest, at: int, trials: int) -> Stopwatch:
    """Run `trials` trials of the study after `at` earlier ones and return their storage times."""
    if at:
        _fill(config, at)
    stopwatch = Stopwatch()
    executor = EndingTrials(stopwatch)
    with stopwatch.on(), drawn_at_random():
        result = run_study(config, on_progress=lambda _: None, executor=executor, clock=lambda: executor.now_s)
    assert sum(record.finished for record in result.records) == at + trials
    return stopwatch


@contextmanager
def drawn_at_random() -> Iterator[None]:
    """Let random numbers take the place of draws inside the block."""
    ordinary = Posterior.draw

    def draw(
        posterior: Posterior, _observations: Observations, num_draws: int, rng: np.random.Generator
    ) -> NDArray[np.float32]:
        return rng.standard_normal((num_draws, len(posterior.predicted)), dtype=np.float32)

    setattr(Posterior, "draw", draw)  # noqa: B010 # mypy refuses to assign to a method
    try:
        yield
    finally:
        setattr(Posterior, "draw", ordinary)  # noqa: B010 # as above


def _fill(config: StudyRequest, at: int) -> None:
    """Fill a study up to `at` trials: the first five are run, the others are copies of the last of these."""
    with drawn_at_random():
        run_study(_with(config, 5), on_progress=lambda _: None, executor=EndingTrials(Stopwatch()))
    store, grid = open_store(config.storage), candidates_of(config.problem).space.grid
    study = optuna.load_study(study_name=config.name, storage=store.storage)
    done = study.get_trials()
    # A study does not try a candidate twice, so the copies get parameters of untried candidates.
    known = {tuple(trial.params.values()) for trial in done}
    pattern = done[-1]
    for position in range(len(grid)):
        params = params_of(grid.values(position))
        if len(known) >= at:
            break
        if tuple(params.values()) not in known:
            known.add(tuple(params.values()))
            study.add_trial(_copy_trial(pattern, params))
    assert len(known) == at, "the space is large enough"
    store.close()


def _copy_trial(pattern: FrozenTrial, params: Mapping[str, Any]) -> FrozenTrial:
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE,
        value=pattern.value,
        params=dict(params),
        distributions=pattern.distributions,
        user_attrs=pattern.user_attrs,
        intermediate_values=pattern.intermediate_values,
    )


def cost_of_plain_optuna(storage: BaseStorage, at: int, trials: int) -> Stopwatch:
    """Run a loop of plain Optuna and return its storage times.

    It has 8 parameters, the same number of steps as a trial of ours, and two attributes.
    """
    study = optuna.create_study(storage=storage, sampler=RandomSampler(seed=0), study_name=f"plain-{at}")
    stopwatch = Stopwatch()
    for _ in range(at):
        study.add_trial(
            optuna.trial.create_trial(
                value=1.0,
                params={f"p{place}": 1 for place in range(8)},
                distributions={f"p{place}": optuna.distributions.IntDistribution(1, 64) for place in range(8)},
                user_attrs={"prediction": {"step_time_s": 1.0}, "observation": list(STEPS_S)},
            )
        )
    with stopwatch.on():
        for _ in range(trials):
            trial = study.ask()
            for place in range(8):
                trial.suggest_int(f"p{place}", 1, 64)
            trial.set_user_attr("prediction", {"step_time_s": 1.0})
            for step, step_time_s in enumerate(STEPS_S, start=1):
                trial.report(step_time_s, step)
            trial.set_user_attr("observation", list(STEPS_S))
            study.tell(trial, 1.0)
            stopwatch.lap()
    return stopwatch


def _with(config: StudyRequest, max_trials: int) -> StudyRequest:
    return replace(config, search=config.search.model_copy(update={"max_trials": max_trials}))


def _row(loop: str, storage: str, at: int, stopwatch: Stopwatch) -> dict[str, Any]:
    """Summarise the trials except the first, which includes the time of opening the study."""
    # The first trial is dropped: it includes opening the study.
    wall_s, cpu_s = zip(*stopwatch.taken[1:], strict=True)
    return {
        "loop": loop,
        "storage": storage,
        "at": at,
        "trials": len(wall_s),
        "median_ms": 1e3 * statistics.median(wall_s),
        "mean_ms": 1e3 * statistics.fmean(wall_s),
        "cpu_ms": 1e3 * statistics.median(cpu_s),
        "load": os.getloadavg()[0],
    }


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all storages at all study sizes."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        (folder / "cost.yaml").write_text(STUDY, encoding="utf-8")
        server = stack.enter_context(postgresql_server(PASSWORD)) if "postgresql" in given.storages else ""
        for at in given.at:
            rows.append(
                _row("plain Optuna", "memory", at, cost_of_plain_optuna(InMemoryStorage(), at, given.trials + 1))
            )
            for storage in given.storages:
                tell(f"{storage} at {at} trials, load {os.getloadavg()[0]:.1f}")
                url = server if storage == "postgresql" else f"{storage}:///{folder / f'{at}.{storage}'}"
                config = load_study(folder / "cost.yaml", overrides=[f"name=cost-{at}"], storage=url)
                config = _with(config, at + given.trials + 1)
                rows.append(_row("meshtune", storage, at, cost_of_a_run(config, at, given.trials + 1)))
                store = open_store(StorageAddress.parse(url))
                plain = cost_of_plain_optuna(store.storage, at, given.trials + 1)
                rows.append(_row("plain Optuna", storage, at, plain))
                store.close()
    ours = [row["mean_ms"] for row in rows if row["loop"] == "meshtune"]
    return {"rows": rows, "target_ms": 1e3 * TARGET_S, "worst_ms": max(ours), "met": max(ours) < 1e3 * TARGET_S}


def _show(figures: dict[str, Any]) -> None:
    publish(figures["rows"], as_json=False)
    verdict = "met" if figures["met"] else "missed"
    print(f"worst mean of a run: {figures['worst_ms']:.1f} ms; under {figures['target_ms']:.0f} ms wanted: {verdict}")


def main() -> int:
    """Measure, print the table and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endurance.storage_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = [name for name in STORAGES if name != "postgresql" or server_programs() is not None]
    parser.add_argument(
        "--storages", nargs="+", choices=STORAGES, default=usual, help="storages to measure (all that can run here)"
    )
    parser.add_argument(
        "--at",
        nargs="+",
        type=count_at_least(0),
        default=[0, 300, 1000],
        help="trials that the study already holds (0 300 1000)",
    )
    parser.add_argument("--trials", type=count_at_least(2), default=30, help="trials measured at each size (30)")
    parser.add_argument("--folder", type=Path, help="folder for the files (the usual temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return answer("storage_cost", parser.parse_args(), measured, _show)


if __name__ == "__main__":
    sys.exit(main())
