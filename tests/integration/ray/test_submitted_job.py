"""Studies as Ray jobs, on a cluster of two raylets."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from benchmarks.endurance.lost_node import COMMAND, MODEL, PROGRAM, STUDY
from benchmarks.support.ray_nodes import RayNodes
from tests.integration.studies.test_resume import assert_complete, assert_continued, trials_in, whole
from tuner.run.driver import DRIVER
from tuner.storage.opening import find_study
from tuner.storage.record import STOP_REASON
from tuner.study_file.storage_address import StorageAddress

ROOT = Path(__file__).resolve().parents[3]
TRIALS = 7
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def nodes():
    """A head without CPUs, and a node with room for two trials."""
    pytest.importorskip("opencensus", reason="ray[default] is not installed")
    with RayNodes(0, 4, jobs=True) as running:
        yield running


@pytest.fixture
def study(tmp_path):
    """A study whose trials run a command, which leaves a child in a session of its own."""
    program = tmp_path / "program.py"
    # longer steps: Ray's command that ends a job may take ten seconds to start on a busy machine
    program.write_text(PROGRAM.replace("time.sleep(0.4)", "time.sleep(1.2)"), encoding="utf-8")
    file = tmp_path / "study.yaml"
    trial = COMMAND.format(python=sys.executable, program=program, folder=tmp_path)
    file.write_text(STUDY.format(model=MODEL, trials=TRIALS, seed=0, trial=trial), encoding="utf-8")
    return file


def submit(nodes, name, *command, wait=True):
    """`ray job submit` of the checkout; its exit status and what it printed."""
    done = nodes.ray(
        *("job", "submit", "--address", nodes.jobs_address, "--submission-id", name, "--working-dir", str(ROOT)),
        *(() if wait else ("--no-wait",)),
        *("--", "python", "-m", "tuner", *command),
    )
    return done.returncode, done.stdout + done.stderr


def wait_until(holds, limit_s=LIMIT_S):
    """Waits for a condition."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.3)


def at_work(nodes):
    """What trials run: their workers, commands, and the children of these."""
    words = ("ray::Slot", "ray::lost-node/", "trials.ranks.server", "program.py", "sleep 3600")
    return [command for command in nodes.processes().values() if any(word in command for word in words)]


def is_under_way(nodes, storage, least):
    """Whether at least so many trials have ended and the commands of two others run."""
    ended = sum(trial.state.is_finished() for trial in trials_in(storage, "lost-node").values())
    return ended >= least and sum("sleep 3600" in command for command in at_work(nodes)) == 2


def copies(nodes):
    """Databases in what Ray has unpacked for jobs."""
    return [path for path in nodes.folder.rglob("*.db") if "runtime_resources" in path.parts]


def test_a_relative_database_is_refused(nodes):
    """A study that would be kept in the job's throw-away directory fails the job at once, with the way out."""
    status, told = submit(nodes, "relative", "run", "configs/studies/llama3-8b-dgx-h100.yaml")

    assert status == 1
    assert "failed with exit code 2" in told
    assert (
        "storage = 'sqlite:///configs/studies/meshtune.db': would be written into the working directory of this Ray job"
        in told
    )
    assert "sqlite:////data/meshtune.db, journal:////data/study.log), or PostgreSQL" in told
    assert "Traceback" not in told
    assert copies(nodes) == []


def test_a_job_that_is_ended_leaves_nothing_and_is_resumed(nodes, study, tmp_path):
    """A SIGKILL of the driver, and `ray job stop`, end the workers and all that they run; the same job submitted again
    goes on, loses nothing, and starts again only what was in flight.
    """
    storage = f"sqlite:///{tmp_path}/study.db"
    command = ("run", str(study), "--storage", storage, "--set", "search.parallel_trials=2", "--json")
    in_flight, before = [], {}
    for end, least in (("kill", 1), ("stop", 3)):
        status, told = submit(nodes, end, *command, wait=False)
        assert status == 0, told
        wait_until(lambda least=least: is_under_way(nodes, storage, least))
        if end == "stop":
            stopped = nodes.ray("job", "stop", "--address", nodes.jobs_address, end)
            assert stopped.returncode == 0, stopped.stderr
            assert "was stopped" in stopped.stdout + stopped.stderr
        else:
            for process, text in nodes.processes().items():
                if f"tuner run {study}" in text:
                    with contextlib.suppress(ProcessLookupError):  # it may end with the one killed before
                        os.kill(process, signal.SIGKILL)
        wait_until(lambda: not at_work(nodes))
        after = trials_in(storage, "lost-node")
        assert_continued(before, after)
        before = after
        # of a killed driver they stay as running, of one that was told to end they wait
        open_states = (TrialState.RUNNING, TrialState.WAITING)
        in_flight += [trial.number for trial in whole(before) if trial.state in open_states]
    assert in_flight
    stored = find_study(StorageAddress.parse(storage), "lost-node")
    assert (stored.user_attrs[STOP_REASON], stored.user_attrs[DRIVER]) == ("interrupted", None)

    status, told = submit(nodes, "last", *command)

    assert status == 0, told
    assert "\r" not in told
    after = trials_in(storage, "lost-node")
    assert_continued(before, after)
    assert_complete(after, TRIALS)
    starts = {int(file.name.partition("-")[2]): len(file.read_text().splitlines()) for file in tmp_path.glob("trial-*")}
    assert starts.keys() == after.keys()
    for number, count in starts.items():  # a trial may have been asked for whose command was not there yet
        assert 1 <= count <= 1 + in_flight.count(number), (number, starts)
    printed = json.loads(told[told.index("\n{") : told.rindex("\n}") + 2])
    assert (printed["trials"], printed["stop_reason"]) == (TRIALS, "max_trials")
    wait_until(lambda: not at_work(nodes))
