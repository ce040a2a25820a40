import itertools
import json
import shutil
import signal
import sqlite3
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

import optuna
import pytest
from optuna.trial import TrialState

from costmodels.job.parallel_config import ParallelConfig
from tests.support.studies.commits import before_each_commit, kept_at_each_commit
from tests.support.studies.driver_process import LIMIT_S, DriverProcess
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.repeated_searches import replayed
from tests.support.studies.stepping_executor import SteppingExecutor
from trials.backend import Observation, Status
from tuner.run.driver import DRIVER
from tuner.run.loop import run_study
from tuner.search.observations import OBSERVATION
from tuner.storage.opening import find_study
from tuner.storage.record import PREDICTION, STOP_REASON
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress

TRIALS = 6
UNDISTURBED = ("search.confidence=1.0", f"search.max_trials={TRIALS}", "search.parallel_trials=2")
ENDED = (TrialState.COMPLETE, TrialState.FAIL)
WRITES_OF_A_LIFE = 13
"""Commits: enough to settle what an earlier driver left and to ask for a trial, and too few for two."""


def trials_in(storage, name="replayed"):
    """Every trial of the study, as somebody who opens the database from outside reads it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    stored = find_study(StorageAddress.parse(storage), name)
    trials = stored.get_trials() if stored is not None else []
    if stored is not None:
        stored._storage._backend.engine.dispose()
    return {trial.number: trial for trial in trials}


def whole(trials):
    """The trials that have a candidate; the others were killed while they were asked for."""
    return [trial for trial in trials.values() if PREDICTION in trial.user_attrs]


def assert_continued(before, after):
    """What had ended is unchanged, and what was in flight has ended or is in flight under its own number."""
    for number, trial in before.items():
        if trial.state.is_finished():
            assert after[number] == trial
        elif PREDICTION in trial.user_attrs:
            assert after[number].params == trial.params
            assert trial.state == TrialState.WAITING or after[number].datetime_start == trial.datetime_start


def assert_complete(trials, budget):
    """The budget is spent on as many candidates, each finished once, with all that was predicted and observed."""
    asked = whole(trials)
    assert len(asked) == budget
    assert len({json.dumps(trial.params, sort_keys=True) for trial in asked}) == budget
    assert all(trial.state in ENDED for trial in trials.values())
    for trial in asked:
        assert (trial.state == TrialState.COMPLETE) == (trial.user_attrs[OBSERVATION]["status"] == "ok")
    torn = [trial for trial in trials.values() if PREDICTION not in trial.user_attrs]
    assert all(trial.user_attrs[OBSERVATION]["status"] == "cancelled" for trial in torn)


# Killed after every single write: what a kill leaves is the database as it stood after the last commit


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A study without noise of seven measured rows, so that whoever takes it up fifty times waits for few."""
    return replayed(tmp_path_factory.mktemp("replayed"))


def in_process(file, storage, slots, budget):
    """The short study and its executor."""
    overrides = ["search.draws=10", f"search.max_trials={budget}", f"search.parallel_trials={slots}"]
    config = load_study(file, overrides=overrides, storage=storage)
    return config, InProcessExecutor(config.trials.backend, slots)


def run_in_process(file, storage, slots, budget):
    """Runs the short study to its end, with the numbers of the trials that it measured."""
    config, executor = in_process(file, storage, slots, budget)
    result = run_study(config, on_progress=lambda _: None, executor=executor)
    assert result.stop_reason == "max_trials"
    return result, [number for number, _ in executor.seen]


def sequence(records):
    """What a search did, in its order."""
    return [(record.params, record.status, record.step_time_s, record.p_star, record.prediction) for record in records]


@pytest.mark.parametrize(("slots", "budget"), [(1, 2), (2, 2)])
def test_killed_after_any_write_it_continues(tmp_path, short, slots, budget):
    """Wherever a driver dies between two writes, the next one loses and repeats nothing, and, one trial at a time,
    ends with the very same search.
    """
    live, moments = tmp_path / "live.db", []
    with kept_at_each_commit(live, moments):
        undisturbed, seen = run_in_process(short, f"sqlite:///{live}", slots, budget)
    assert len(moments) > 4 * budget, len(moments)
    assert sorted(seen) == list(range(budget))

    for moment in moments:
        before = trials_in(f"sqlite:///{moment}", "replayed")
        result, seen = run_in_process(short, f"sqlite:///{moment}", slots, budget)
        after = trials_in(f"sqlite:///{moment}", "replayed")

        assert_continued(before, after)
        assert_complete(after, budget)
        assert len(result.records) == budget
        observed = {number for number, trial in before.items() if OBSERVATION in trial.user_attrs}
        assert sorted(seen) == sorted({record.number for record in result.records} - observed)
        if slots == 1:
            assert sequence(result.records) == sequence(undisturbed.records), moment.name


@dataclass(frozen=True, kw_only=True, slots=True)
class AllAlike:
    """Every candidate is as fast as the next, and `slow` takes three times as long."""

    slow: ParallelConfig | None = None

    def measure(self, config, **_):
        """As the executor calls it."""
        step_time_s = 3.0 if config == self.slow else 1.0
        return Observation(status=Status.OK, step_times_s=(step_time_s,) * 4, origin="measured")


def test_killed_after_any_write_it_stops_the_same_trial(tmp_path, short):
    """Wherever a driver dies while trials report their steps or are stopped, the next one ends each of them once, as an
    undisturbed one does: the slow one as pruned, all with the steps that they have reported.
    """
    budget = 2

    def run_step_by_step(storage, slow):
        config, _ = in_process(short, storage, 1, budget)
        executor = SteppingExecutor(AllAlike(slow=slow), 1)
        return run_study(config, on_progress=lambda _: None, executor=executor).records, executor.seen

    _, seen = run_step_by_step(f"sqlite:///{tmp_path / 'alike.db'}", None)
    _, slow = seen[1]
    live, moments = tmp_path / "live.db", []
    with kept_at_each_commit(live, moments):
        undisturbed, _ = run_step_by_step(f"sqlite:///{live}", slow)
    assert [record.status for record in undisturbed] == [Status.OK, Status.PRUNED]

    for moment in moments:
        before = trials_in(f"sqlite:///{moment}", "replayed")
        records, seen = run_step_by_step(f"sqlite:///{moment}", slow)
        after = trials_in(f"sqlite:///{moment}", "replayed")

        assert_continued(before, after)
        assert sequence(records) == sequence(undisturbed), moment.name
        observed = {number for number, trial in before.items() if OBSERVATION in trial.user_attrs}
        assert sorted(number for number, _ in seen) == sorted({record.number for record in records} - observed)
        for trial in whole(after):
            steps_s = trial.user_attrs[OBSERVATION]["step_times_s"]
            assert len(steps_s) == (2 if trial.state == TrialState.PRUNED else 4)
            assert trial.intermediate_values == dict(enumerate(steps_s, start=1))


def test_killed_again_while_it_adopts(tmp_path, short):
    """Drivers that die one after the other, each after a few writes, still finish the search of an undisturbed one."""
    undisturbed, _ = run_in_process(short, f"sqlite:///{tmp_path / 'undisturbed.db'}", 1, 4)
    live, kept = tmp_path / "live.db", tmp_path / "kept.db"

    lives = 0
    while lives < 20:
        lives += 1
        writes = itertools.count()

        def keep(writes=writes):
            # what this driver leaves; all that it goes on to do is lost
            if next(writes) == WRITES_OF_A_LIFE and live.exists():
                with closing(sqlite3.connect(live)) as source, closing(sqlite3.connect(kept)) as target:
                    source.backup(target)

        kept.unlink(missing_ok=True)
        with before_each_commit(keep):
            result, _ = run_in_process(short, f"sqlite:///{live}", 1, 4)
        if not kept.exists():
            break
        for suffix in ("", "-wal", "-shm"):
            live.with_name(f"live.db{suffix}").unlink(missing_ok=True)
        shutil.move(kept, live)

    assert 3 <= lives < 20, lives
    assert sequence(result.records) == sequence(undisturbed.records)


# Killed for real


def driven(short, storage, seconds_per_trial):
    """A driver of the short study, whose trials last a while."""
    return DriverProcess(storage, *UNDISTURBED, f"trial.seconds_per_trial={seconds_per_trial}", study=short)


def num_in(storage, *states):
    """The number of trials in these states."""
    return sum(trial.state in states for trial in whole(trials_in(storage)))


def wait_until(holds):
    """Waits for a condition."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.3)


def assert_all_end(driver):
    """What a killed driver had started ends by itself, while the next one is at work already."""
    assert not driver.processes_after(10)


def test_killed_twice_it_completes(tmp_path, short):
    """A driver that is killed while it starts, and again while it runs, completes its study trial by trial."""
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    before = {}
    with ExitStack() as killed:
        for has_begun in (False, True):
            driver = killed.enter_context(driven(short, storage, 4.0))
            killed.callback(assert_all_end, driver)
            driver.wait_for("trying first")
            wait_until(lambda has_begun=has_begun: not has_begun or num_in(storage, *ENDED))
            driver.end(signal.SIGKILL)
            after = trials_in(storage)
            assert_continued(before, after)
            before = after
        assert 1 <= num_in(storage, *ENDED) < TRIALS

        with driven(short, storage, 0.0) as driver:
            status, out, err = driver.end()
            assert not driver.processes_after(20)
    after = trials_in(storage)

    assert status == 0, err
    assert_continued(before, after)
    assert_complete(after, TRIALS)
    printed = json.loads(out)
    assert printed["trials"] == TRIALS
    assert printed["stop_reason"] == "max_trials"
    times = [trial.value for trial in whole(after) if trial.state == TrialState.COMPLETE]
    assert printed["step_time_s"] == min(times)


def test_terminated_run_lets_its_trials_wait(tmp_path, short):
    """SIGTERM ends a run with status 75 and lets its trials in flight wait for the next driver, with no process behind;
    while it ran, a second driver was refused.
    """
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    with driven(short, storage, 300) as driver:  # the signal has to come within a trial
        wait_until(lambda: num_in(storage, TrialState.RUNNING) == 2)
        with driven(short, storage, 300) as second:
            second_status, second_out, second_err = second.end()
        status, out, err = driver.end(signal.SIGTERM)
        assert not driver.processes_after(20)
    before = trials_in(storage)

    assert (second_status, second_out) == (2, "")
    assert f"is being run by process {driver.process.pid} on " in second_err
    assert status == 75, err
    assert json.loads(out)["stop_reason"] == "interrupted"
    assert "Traceback" not in err
    assert (num_in(storage, TrialState.RUNNING), num_in(storage, TrialState.WAITING)) == (0, 2)
    stored = find_study(StorageAddress.parse(storage), "replayed")
    assert (stored.user_attrs[STOP_REASON], stored.user_attrs[DRIVER]) == ("interrupted", None)

    run_in_process(short, storage, 2, 4)
    after = trials_in(storage)
    assert_continued(before, after)
    assert_complete(after, 4)


def test_interrupt_while_ray_starts(tmp_path, short):
    """Ctrl-C while Ray starts ends the run with status 130, too, and leaves no process behind."""
    with driven(short, f"sqlite:///{tmp_path / 'study.db'}", 1.0) as driver:
        wait_until(lambda: any("raylet" in command for command in driver.processes().values()))
        status, out, err = driver.end(signal.SIGINT)
        assert not driver.processes_after(20)

    assert status == 130, err
    assert json.loads(out)["stop_reason"] == "interrupted"
