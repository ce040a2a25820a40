"""Studies side by side and slow storages: many drivers on one database, and writes that take long."""

import json
import multiprocessing
import os
import sqlite3
import time
import traceback
from contextlib import closing

import optuna
import pytest
from optuna.trial import TrialState

from tests.support.studies.commits import before_each_commit
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.repeated_searches import replayed
from tuner.run.driver import DRIVER
from tuner.run.loop import run_study
from tuner.search.observations import OBSERVATION
from tuner.storage.opening import find_study
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress

NUM_STUDIES = 20
WRITE_S = 0.2
TRIALS = 3


def run_one(file, storage, name, failed):
    """Runs one study to its end; of a failure it keeps the traceback."""
    try:
        overrides = [f"name={name}", f"search.max_trials={TRIALS}", "search.draws=10"]
        config = load_study(file, overrides=overrides, storage=storage)
        run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(config.trials.backend))
    except BaseException:  # noqa: BLE001 # whatever it is, the test tells it
        failed.put(f"{name}: {traceback.format_exc()}")


def assert_complete(storage, name):
    """The study holds its trials, each once and whole, and nobody claims it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    stored = find_study(StorageAddress.parse(storage), name)
    trials = stored.get_trials()
    assert [trial.number for trial in trials] == [*range(TRIALS)]
    assert all(trial.state.is_finished() and OBSERVATION in trial.user_attrs for trial in trials)
    assert len({json.dumps(trial.params, sort_keys=True) for trial in trials}) == TRIALS
    assert stored.user_attrs[DRIVER] is None
    return trials


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_twenty_studies_share_a_storage(tmp_path, kind):
    """Twenty drivers that write to one SQLite database or journal at once each complete their own study."""
    file, storage = replayed(tmp_path), f"{kind}:///{tmp_path / 'shared'}"
    run_one(file, storage, "first", failed := multiprocessing.get_context("fork").SimpleQueue())
    fork = multiprocessing.get_context("fork")  # the libraries are loaded already
    drivers = [fork.Process(target=run_one, args=(file, storage, f"study-{at}", failed)) for at in range(NUM_STUDIES)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join()

    assert failed.empty(), failed.get()
    same = [[trial.params for trial in assert_complete(storage, f"study-{at}")] for at in range(NUM_STUDIES)]
    assert all(params == same[0] for params in same)
    if kind == "sqlite":
        with closing(sqlite3.connect(tmp_path / "shared")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.slow
def test_a_storage_with_slow_writes_costs_time_and_nothing_else(tmp_path):
    """Where each write takes a fifth of a second, a study makes the trials that it makes elsewhere."""
    file, failed = replayed(tmp_path), multiprocessing.get_context("fork").SimpleQueue()
    quick, slow = (f"sqlite:///{tmp_path / name}" for name in ("quick.db", "slow.db"))
    run_one(file, quick, "same", failed)
    writes = []

    def wait():
        writes.append(os.getpid())
        time.sleep(WRITE_S)

    begin_s = time.monotonic()
    with before_each_commit(wait):
        run_one(file, slow, "same", failed)
    spent_s = time.monotonic() - begin_s

    assert failed.empty(), failed.get()
    assert len(writes) > 5 * TRIALS
    assert spent_s >= WRITE_S * len(writes)
    expected, found = (
        [(trial.params, trial.value, trial.state) for trial in assert_complete(storage, "same")]
        for storage in (quick, slow)
    )
    assert found == expected
    assert {state for _, _, state in found} <= {TrialState.COMPLETE, TrialState.FAIL}
