import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import select

from tests.support.studies.driver_process import ROOT
from tests.support.studies.repeated_searches import replayed
from tests.support.studies.shared_driver import LEASE_S
from tuner.storage.history.tables import METADATA, RUNS
from tuner.storage.opening import find_study, reading
from tuner.storage.record import STOP_REASON
from tuner.study_file.storage_address import StorageAddress

LIMIT_S = 90


@pytest.fixture
def short(tmp_path):
    """A study of seven measured rows."""
    return replayed(tmp_path)


@contextmanager
def driver(short, storage, host, budget, notes):
    """A driver that gets ready to begin."""
    program = "tests.support.studies.shared_driver"
    process = subprocess.Popen(
        [sys.executable, "-m", program, str(short), storage, host, str(budget), str(notes)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def begin(*processes):
    """Lets drivers begin at the same moment, when all are ready."""
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


def starts(notes):
    """The trials that were started, as (host, number, configuration)."""
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def wait_for_starts(notes, count):
    """Waits until so many trials were started."""
    deadline_s = time.monotonic() + LIMIT_S
    while len(starts(notes)) < count:
        assert time.monotonic() < deadline_s, starts(notes)
        time.sleep(0.01)


def assert_each_once(storage, budget):
    """The study has as many trials as it may, each of another configuration, all ended and kept once."""
    trials = find_study(StorageAddress.parse(storage), "replayed").get_trials()
    assert [trial.state.is_finished() for trial in trials] == [True] * budget
    assert len({json.dumps(trial.params, sort_keys=True) for trial in trials}) == budget
    with reading(StorageAddress.parse(storage), METADATA) as connection:
        kept = connection.execute(select(RUNS.c.trial, RUNS.c.config)).all()
    assert sorted(trial for trial, _ in kept) == list(range(budget))
    assert len({config for _, config in kept}) == budget


def test_of_two_drivers_one_runs(short, database, tmp_path):
    """Of two drivers that start at the same moment on different hosts one runs the study and the other is refused; no
    configuration is run twice.
    """
    notes = tmp_path / "notes"
    with ExitStack() as stack:
        both = [stack.enter_context(driver(short, database, host, 4, notes)) for host in ("one", "two")]
        begin(*both)
        told = {process: process.communicate(timeout=LIMIT_S) for process in both}
        statuses = sorted(process.returncode for process in both)

    assert statuses == [0, 2], told
    assert next("is being run by process" in told[process][0] for process in both if process.returncode == 2)
    assert len({host for host, _, _ in starts(notes)}) == 1
    assert set(Counter(config for _, _, config in starts(notes)).values()) == {1}
    assert_each_once(database, 4)


def test_a_driver_that_slept_writes_nothing_more(short, tmp_path):
    """A driver that was stopped in a trial for longer than its lease, and goes on after another has taken the study
    over, ends without a trace: the other's study has each configuration once, and only what was in flight ran twice.
    """
    notes, storage = tmp_path / "notes", f"journal:///{tmp_path / 'study.journal'}"
    with driver(short, storage, "one", 4, notes) as first, driver(short, storage, "two", 4, notes) as second:
        begin(first)
        wait_for_starts(notes, 2)  # the second one sleeps in its measurement
        first.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_S + 0.5)
        begin(second)
        wait_for_starts(notes, 3)
        first.send_signal(signal.SIGCONT)
        told, errors = first.communicate(timeout=LIMIT_S)
        second_told = second.communicate(timeout=LIMIT_S)

    assert (first.returncode, second.returncode) == (2, 0), (told, errors, second_told)
    assert f"is being run by process {second.pid} on two" in told
    by_host = {host: [number for other, number, _ in starts(notes) if other == host] for host in ("one", "two")}
    assert by_host == {"one": [0, 1], "two": [1, 2, 3]}
    assert_each_once(storage, 4)
    assert find_study(StorageAddress.parse(storage), "replayed").user_attrs[STOP_REASON] == "max_trials"
