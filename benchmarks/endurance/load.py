"""Measure the driver's cost of a study with 10,000 trials among about 80,000 candidates, 64 in flight, over time.

    python -m benchmarks.endurance.load [--trials 10000] [--storages sqlite postgresql] [--parallel 64] [--seeded N]
        [--folder DIR] [--json]

The study tunes Pangu-135B for 6,144 devices. FlexParallel's Table 2 counts 58,205 configurations for it; our nearest
larger space has 79,509 candidates that may fit, on H200 with a batch of 2,304. The driver runs as in `meshtune run`,
with the ordinary sampler and its ordinary draws. Only Ray is left out, since 64 workers need more memory than the
driver: one process of simulated trials measures the configurations of all slots, and any slot may end next. Trials
report their first steps one poll before they end, so that the driver can stop them.

The driver's own time is measured in seconds per trial: its CPU time, and the wall time without the waits for simulated
trials. Both are means over the trials of a window that ends at 10, 300, 1,000, 3,000 and 10,000 trials. The table also
shows the parts spent inside the storage, in choosing (`ask`) and in storing results (`record`), and the resident
memory. Growth of memory is given per 1,000 further trials. Afterwards the study is opened by separate processes:
`meshtune status`, `meshtune report`, a driver that resumes it with nothing left to do, and `meshtune dashboard` until
the list of its trials has been served. If Chromium is installed, it renders the report.

With `--folder` the study and the figures so far are kept there, and a second call continues. `--seeded N` begins with N
trials of random candidates that are written at once, so that late windows can be measured without running the trials
before them. Their step times are those of the simulated world; their operator times are copied from a few simulated
trials. A PostgreSQL server is started if one is installed, and its study is deleted at the end. Progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import wraps
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import urlopen

import numpy as np
import optuna
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import TrialState
from sqlalchemy import insert

from benchmarks.endurance.storage_cost import PASSWORD, Stopwatch
from benchmarks.support.postgresql_server import postgresql_server, server_programs
from benchmarks.support.timing import answer, count_at_least, publish, tell
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.proxy_job import Reduction
from trials.backend import AbstractBackend, Observation, Status
from trials.simulated.backend import SimulatedBackend
from tuner.forecast.candidates import candidates_of, plan_of, prediction_json
from tuner.run.ledger import Ledger
from tuner.run.loop import Loop, run_study
from tuner.run.studies import make_sampler, open_study, prepared_of
from tuner.search.observations import OBSERVATION, STATUS
from tuner.search.parameters import distribution_of, params_of
from tuner.storage.history import make_tables
from tuner.storage.opening import open_store
from tuner.storage.record import PREDICTION
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest
from tuner.study_file.storage_address import StorageAddress
from tuner.subject.problem import Problem

STORAGES = ("sqlite", "postgresql")
MARKS = (10, 300, 1000, 3000, 10000)
"""Numbers of trials at which a window ends."""
WINDOW = 50
"""Number of trials in a window; the first window has fewer."""
FIRST_STEPS = 2
"""Number of steps that a running trial has reported when the driver polls."""
NUM_MEASURED = 20
"""Number of seeded trials whose operator times are simulated; the others copy them."""
TELL_EVERY = 100
STUDY = """
name: load
model: pangu-135b
cluster: {name: dgx-h200, hosts: 768}
job: {sequence_length: 4096, global_batch_size: 2304, precision: bf16, zero_stage: 1}
runtime: mindspeed
space: {rules: flexparallel}
search: {confidence: 1.0, baseline: false}
trial: {backend: simulated}
"""


@dataclass
class SimulatedSlots:
    """Executor whose trials are simulated by another process; any trial in flight may end next.

    Attributes:
        backend: Backend that measures the trials.
        slots: Maximum number of trials in flight.
        on_end: Callback that is called after each trial, before the driver sees its result.
        seed: Seed of the order in which trials end.
        waited_s: Time that the driver has waited for simulated trials [s].
        slots_note: Note on the slots for the driver; always empty here.
        reported: Step times of the trial that ends next, by its number [s].
    """

    backend: AbstractBackend
    slots: int
    on_end: Callable[[], None]
    seed: int = 0
    waited_s: float = 0.0
    slots_note: str = ""
    reported: dict[int, tuple[float, ...]] = field(default_factory=dict)
    _running: dict[int, Future[Observation]] = field(default_factory=dict)
    _stopped: dict[int, str] = field(default_factory=dict)

    def __enter__(self) -> SimulatedSlots:
        self._random = random.Random(self.seed)  # noqa: S311 # which trial ends next is no secret
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def queued(self) -> tuple[int, ...]:
        """Numbers of the trials that wait in a queue: none."""
        return ()

    @property
    def num_free_slots(self) -> int:
        """Number of slots without a trial."""
        return self.slots - len(self._running)

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the trials in flight."""
        return tuple(self._running)

    def submit(self, trial_number: int, config: ParallelConfig, _reduction: Reduction | None, /) -> None:
        """Start a trial in the other process."""
        self._running[trial_number] = self._pool.submit(self.backend.measure, config, trial_number=trial_number)

    def stop(self, trial_number: int, reason: str, /) -> None:
        """Mark a trial to end as pruned."""
        self._stopped[trial_number] = reason

    def cancel(self, trial_number: int, reason: str, /) -> None:
        """Fail, because the study has no budget of time."""
        raise AssertionError(f"cancelled trial {trial_number}: {reason}")

    def poll(self, _timeout_s: float, /) -> list[tuple[int, Observation]]:
        """Report the first steps of a random trial, or at the next call its observation."""
        if self.reported:
            (number,) = self.reported
        elif self._running:
            number = self._random.choice(list(self._running))
        else:
            return []
        before_s = time.perf_counter()
        observation = self._running[number].result()
        self.waited_s += time.perf_counter() - before_s
        if not self.reported and observation.status is Status.OK:
            self.reported = {number: observation.step_times_s[:FIRST_STEPS]}
            return []
        if reason := self._stopped.pop(number, None):
            observation = replace(
                observation,
                status=Status.PRUNED,
                step_times_s=observation.step_times_s[:FIRST_STEPS],
                expected_steps=len(observation.step_times_s),
                reason=reason,
                operator_samples=(),
            )
        self.reported = {}
        del self._running[number]
        self.on_end()
        return [(number, observation)]


@dataclass
class Meter:
    """Record of the driver's time and memory per ended trial.

    Attributes:
        path: File that gets a line for every trial.
        ended: Number of trials that have ended so far.
        stopwatch: Stopwatch of the time inside storages.
        parts_s: Time of each part of the driver in the current trial [s].
        slots: Executor whose waits are subtracted.
    """

    path: Path
    ended: int
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    parts_s: dict[str, float] = field(default_factory=dict)
    slots: SimulatedSlots | None = None

    def __post_init__(self) -> None:
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._before = (time.perf_counter(), time.process_time(), 0.0)

    def lap(self) -> None:
        """Write a line with what was spent since the previous trial ended."""
        waited_s = self.slots.waited_s if self.slots else 0.0
        now = (time.perf_counter(), time.process_time(), waited_s)
        # Counters only grow, so the differences to the previous trial are what this trial cost.
        wall_s, cpu_s, wait_s = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        self.ended += 1
        self.stopwatch.lap()
        row = {
            "ended": self.ended,
            "wall_s": wall_s - wait_s,
            "cpu_s": cpu_s,
            "storage_s": self.stopwatch.taken[-1][0],
            "storage_cpu_s": self.stopwatch.taken[-1][1],
            **{f"{name}_s": self.parts_s.get(name, 0.0) for name in ("ask", "record")},
            "rss_mib": rss_mib(),
            "load": os.getloadavg()[0],
        }
        self.parts_s.clear()
        self._file.write(json.dumps(row) + "\n")
        if self.ended % TELL_EVERY == 0:
            tell(f"{self.ended:,} trials, {row['wall_s']:.2f} s of the last, {row['rss_mib']:.0f} MiB")

    @contextmanager
    def on(self) -> Iterator[None]:
        """Time the driver inside the block."""
        before = {"ask": (Loop, Loop.ask), "record": (Ledger, Ledger.record)}
        for name, (owner, function) in before.items():
            setattr(owner, name, self._timed(name, function))
        try:
            with self.stopwatch.on():
                yield
        finally:
            for name, (owner, function) in before.items():
                setattr(owner, name, function)
            self._file.close()

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts_s[name] = self.parts_s.get(name, 0.0) + time.perf_counter() - before_s

        return call


def rss_mib() -> float:
    """Return the resident memory of this process [MiB]."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def seed(config: StudyRequest, count: int) -> None:
    """Write `count` ended trials of random candidates in one transaction."""
    candidates = candidates_of(config.problem)
    grid = candidates.space.grid
    store = open_store(config.storage)
    make_tables(store)
    sampler = make_sampler(config)
    study = open_study(prepared_of(config), sampler, store.storage)
    assert isinstance(store.storage, RDBStorage), "seeded are databases"
    # Optuna stores the distribution of each parameter as JSON beside its value.
    distributions = {
        name: optuna.distributions.distribution_to_json(distribution_of(name, grid)) for name in grid.dimensions
    }
    rng = np.random.default_rng(1)
    positions = rng.choice(len(grid), count, replace=False)
    observations = _simulate_observations(config.trials.backend, grid.take(positions), rng)
    with store.storage.engine.begin() as connection:
        for number, (position, observation) in enumerate(zip(positions.tolist(), observations, strict=True)):
            _write_trial(
                connection, config.problem, candidates, study._study_id, number, position, observation, distributions
            )
    store.close()


def _simulate_observations(
    backend: AbstractBackend, grid: ConfigGrid, rng: np.random.Generator
) -> Iterator[Observation]:
    """Yield observations of trials in the simulated world.

    Step times are computed for the whole grid at once. Operator times of a few trials are reused for the others.
    """
    assert isinstance(backend, SimulatedBackend), "the benchmark's own study"
    memory, step_s = backend.hidden_memory(grid), backend.hidden_step(grid).step_time_s
    # The same multiplicative lognormal noise as the backend adds to each step.
    noise = np.exp(backend.noise * rng.standard_normal((len(grid), backend.num_steps)))
    few = [backend.measure(grid.config(position), trial_number=0) for position in range(min(NUM_MEASURED, len(grid)))]
    sampled = [observation.operator_samples for observation in few if observation.operator_samples]
    for position in range(len(grid)):
        needed, capacity = float(memory.needed_bytes[position]), float(memory.capacity_bytes[position])
        if needed > capacity:
            yield Observation(status=Status.OUT_OF_MEMORY, peak_memory_bytes=round(needed), origin="synthetic")
            continue
        yield Observation(
            status=Status.OK,
            step_times_s=tuple((step_s[position] * noise[position]).tolist()),
            peak_memory_bytes=round(min(float(memory.peak_bytes[position]), capacity)),
            operator_samples=sampled[position % len(sampled)],
            origin="synthetic",
        )


def _write_trial(
    connection: Any,
    problem: Problem,
    candidates: Any,
    study_id: int,
    number: int,
    position: int,
    observation: Observation,
    distributions: dict[str, str],
) -> None:
    grid = candidates.space.grid
    is_ok = observation.step_time_s is not None
    row = connection.execute(
        insert(models.TrialModel).values(
            number=number,
            study_id=study_id,
            state=TrialState.COMPLETE if is_ok else TrialState.FAIL,
            datetime_start=datetime.now(),
            datetime_complete=datetime.now(),
        )
    )
    (trial_id,) = row.inserted_primary_key
    params = params_of(grid.values(position))
    connection.execute(
        insert(models.TrialParamModel),
        [
            {
                "trial_id": trial_id,
                "param_name": name,
                "param_value": distribution_of(name, grid).to_internal_repr(value),
                "distribution_json": distributions[name],
            }
            for name, value in params.items()
        ],
    )
    if is_ok:
        connection.execute(
            insert(models.TrialValueModel).values(
                trial_id=trial_id,
                objective=0,
                value=observation.step_time_s,
                value_type=models.TrialValueModel.TrialValueType.FINITE,
            )
        )
        connection.execute(
            insert(models.TrialIntermediateValueModel),
            [
                {
                    "trial_id": trial_id,
                    "step": step,
                    "intermediate_value": step_s,
                    "intermediate_value_type": models.TrialIntermediateValueModel.TrialIntermediateValueType.FINITE,
                }
                for step, step_s in enumerate(observation.step_times_s[:FIRST_STEPS], start=1)
            ],
        )
    prediction = prediction_json(problem, candidates.estimate, candidates.space.memory, position)
    prediction |= plan_of(problem, grid.config(position))
    attributes = {PREDICTION: prediction, STATUS: observation.status.value, OBSERVATION: observation.as_json()}
    connection.execute(
        insert(models.TrialUserAttributeModel),
        [{"trial_id": trial_id, "key": key, "value_json": json.dumps(value)} for key, value in attributes.items()],
    )


def run(config: StudyRequest, parallel: int, seeded: int, rows: Path) -> None:
    """Run the study up to its budget, and append a line to `rows` for every trial that was not seeded."""
    meter = Meter(rows, seeded + len(rows.read_text(encoding="utf-8").splitlines()) if rows.exists() else seeded)
    slots = SimulatedSlots(config.trials.backend, parallel, meter.lap)
    meter.slots = slots
    with meter.on():
        run_study(config, on_progress=lambda _: None, executor=slots)


def windows(rows: list[dict[str, Any]], storage: str) -> list[dict[str, Any]]:
    """Compute the means over the trials of each window."""
    found = []
    for mark in MARKS:
        of_window = [row for row in rows if mark - min(WINDOW, mark) < row["ended"] <= mark]
        if of_window and max(row["ended"] for row in of_window) == mark:
            # Figures are means over the trials of the window, as one trial alone is too noisy.
            means = {
                name: sum(row[name] for row in of_window) / len(of_window)
                for name in of_window[0]
                if name not in {"ended"}
            }
            found.append({"storage": storage, "at": mark, "trials": len(of_window), **means})
    return found


def growth_mib(rows: list[dict[str, Any]]) -> float | None:
    """Return the growth of resident memory per 1,000 trials [MiB], by a line fitted after the first 1,000 trials."""
    # The first trials fill caches and allocate the arrays of all candidates, which is no growth.
    later = [(row["ended"], row["rss_mib"]) for row in rows if row["ended"] > 1000]
    if len(later) < 100:
        return None
    ended, mib = np.array(later).T
    return 1000 * float(np.polyfit(ended, mib, 1)[0])


def opened(study: Path, storage: str, folder: Path, trials: int) -> list[dict[str, Any]]:
    """Measure seconds and peak memory of each command that opens the study."""
    program = [sys.executable, "-m", "tuner"]
    at = [str(study), "--storage", storage]
    report = folder / "report.html"
    done = [
        _time_command("status", [*program, "status", *at, "--json"]),
        _time_command("report", [*program, "report", *at, "--out", str(report)]),
        _time_command("resume", [*program, "run", *at, "--set", f"search.max_trials={trials}", "--json"]),
        _time_dashboard([*program, "dashboard", *at]),
    ]
    done[1]["mib"] = report.stat().st_size / 2**20
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            page = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
            rendered = _time_command("chromium", [*page, "--dump-dom", report.as_uri()])
        rendered["mib"] = report.stat().st_size / 2**20
        done.append(rendered)
    return done


def _time_command(name: str, command: list[str]) -> dict[str, Any]:
    begin_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    size = len(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "opened": name,
        "status": process.returncode,
        "seconds": time.perf_counter() - begin_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
        "mib": size / 2**20,
    }


def _time_dashboard(command: list[str]) -> dict[str, Any]:
    """Measure the time until the first page and the list of trials have been served."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin_s = time.perf_counter()
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            _fetch(f"{url}/dashboard")
            break
        except OSError:
            assert process.poll() is None, "the dashboard runs until it is stopped"
            time.sleep(0.1)
    first_s = time.perf_counter() - begin_s
    number = json.loads(_fetch(f"{url}/api/studies"))["study_summaries"][0]["study_id"]
    trials = _fetch(f"{url}/api/studies/{number}?after=0")
    seconds = time.perf_counter() - begin_s
    again_s = time.perf_counter()
    _fetch(f"{url}/api/studies/{number}?after=0")
    again_s = time.perf_counter() - again_s
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text(encoding="ascii"))
    process.terminate()
    process.wait(30)
    return {
        "opened": "dashboard",
        "status": 0,
        "seconds": seconds,
        "first_page_s": first_s,
        "again_s": again_s,
        "peak_mib": int(peak[1]) / 1024 if peak else 0.0,
        "mib": len(trials) / 2**20,
    }


def _fetch(url: str) -> bytes:
    with urlopen(url) as served:  # noqa: S310 # our own server
        return bytes(served.read())


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all storages."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found: dict[str, Any] = {"rows": [], "opened": [], "growth_mib": {}, "database_mib": {}}
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        study = folder / "load.yaml"
        study.write_text(STUDY, encoding="utf-8")
        server = stack.enter_context(postgresql_server(PASSWORD)) if "postgresql" in given.storages else ""
        for storage in given.storages:
            url = server if storage == "postgresql" else f"sqlite:///{folder.resolve() / 'load.db'}"
            config = load_study(study, storage=url)
            config = replace(
                config,
                search=config.search.model_copy(update={"max_trials": given.trials, "parallel_trials": given.parallel}),
            )
            rows = folder / f"{storage}.jsonl"
            if given.seeded and not rows.exists():
                tell(f"{storage}: writing {given.seeded:,} trials")
                seed(config, given.seeded)
                rows.touch()
            run(config, given.parallel, given.seeded, rows)
            lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
            found["rows"] += windows(lines, storage)
            found["growth_mib"][storage] = growth_mib(lines)
            found["database_mib"][storage] = _size_mib(url, folder)
            if not given.unopened:
                found["opened"] += [{"storage": storage, **row} for row in opened(study, url, folder, given.trials)]
    return found


def _size_mib(url: str, folder: Path) -> float:
    if url.startswith("sqlite"):
        return sum(file.stat().st_size for file in folder.glob("load.db*")) / 2**20
    store = open_store(StorageAddress.parse(url))
    assert isinstance(store.storage, RDBStorage), "a database"
    with store.storage.engine.connect() as connection:
        size = connection.exec_driver_sql("select pg_database_size(current_database())").scalar_one()
    store.close()
    return float(size) / 2**20


def _show(figures: dict[str, Any]) -> None:
    if figures["rows"]:
        publish(figures["rows"], as_json=False)
    for storage, grown in figures["growth_mib"].items():
        print(f"{storage}: {figures['database_mib'][storage]:.0f} MiB", end="")
        print("" if grown is None else f"; the driver grows by {grown:.1f} MiB for each further 1,000 trials")
    for row in figures["opened"]:
        print(
            "  ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )


def main() -> int:
    """Measure, print the tables and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endurance.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = [name for name in STORAGES if name != "postgresql" or server_programs() is not None]
    parser.add_argument("--trials", type=count_at_least(1), default=10000, help="trials of the study (10000)")
    parser.add_argument(
        "--storages", nargs="+", choices=STORAGES, default=usual, help="storages to measure (all that can run here)"
    )
    parser.add_argument("--parallel", type=count_at_least(1), default=64, help="trials in flight (64)")
    parser.add_argument(
        "--seeded", type=count_at_least(0), default=0, help="trials written at once before the study starts (0)"
    )
    parser.add_argument("--folder", type=Path, help="folder that keeps the study (a temporary folder)")
    parser.add_argument("--unopened", action="store_true", help="do not measure the commands that open the study")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return answer("load", parser.parse_args(), measured, _show)


if __name__ == "__main__":
    sys.exit(main())
