import itertools
import json
import sqlite3
import statistics
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
from optuna.trial import TrialState

from hardware.io.errors import ConfigError
from tests.support.studies.driver_process import DriverProcess
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.in_process_executor import run_here as run
from tests.support.studies.stepping_executor import SteppingExecutor
from trials.backend import Observation, Status
from tuner.run.driver import DRIVER
from tuner.run.loop import run_study
from tuner.run.studies import is_running, stored_study
from tuner.search.observations import OBSERVATION
from tuner.search.population import read_moments
from tuner.search.pruning import MARGIN, MAX_REPORTS
from tuner.search.stopping import StopReason
from tuner.search.waiting import SLOTS, Slots, Wait
from tuner.storage.opening import find_study
from tuner.storage.record import MEANING, ORIGIN, SPENT_S, STOP_REASON, num_failed, num_pruned, read_records, saved_s
from tuner.study_file.config import load_study

SMALL = """
name: small
model: llama-7b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
space: {pp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1]}
search: {draws: 10, confidence: 1.0}
trial: {backend: simulated}
"""


@pytest.fixture
def study(tmp_path):
    """A function that loads the small study, each time as its own command would."""
    file = tmp_path / "study.yaml"
    file.write_text(SMALL)
    return lambda *overrides: load_study(file, overrides=overrides, storage=f"sqlite:///{tmp_path / 'study.db'}")


@pytest.fixture(scope="module")
def after_one_trial(tmp_path_factory):
    """A database in which the small study has had one trial."""
    folder = tmp_path_factory.mktemp("after_one_trial")
    (folder / "study.yaml").write_text(SMALL)
    database = folder / "study.db"
    run(load_study(folder / "study.yaml", overrides=["search.max_trials=1"], storage=f"sqlite:///{database}"))
    return database


@pytest.fixture
def begun(study, after_one_trial, tmp_path):
    """The function `study`, where the small study has had one trial."""
    with closing(sqlite3.connect(after_one_trial)) as source, closing(sqlite3.connect(tmp_path / "study.db")) as target:
        source.backup(target)
    return study


class Endless:
    """Trials of very many steps of a second each."""

    origin = "synthetic"

    def measure(self, _config, **_):
        """As the executor calls it."""
        return Observation(status=Status.OK, step_times_s=(1.0,) * 10_000, origin="synthetic")


class Dying:
    """The driver dies with its first trial."""

    origin = "synthetic"

    def measure(self, _config, **_):
        """As the executor calls it."""
        raise RuntimeError("dies")


class Scripted:
    """Ends each candidate's attempts as the script says, and well once the script is over."""

    origin = "synthetic"

    def __init__(self, script=()):
        self.script = script
        self.attempts = Counter()

    def measure(self, config, *, trial_number):
        """As the executor calls it."""
        self.attempts[config] += 1
        statuses = self.script[trial_number : trial_number + 1]
        status = statuses[0] if statuses else Status.OK
        times = (1.0 + trial_number,) if status == Status.OK else ()
        return Observation(status=status, step_times_s=times, origin="synthetic")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "is_tried_again"),
    [
        (Status.CRASHED, False),
        (Status.OUT_OF_MEMORY, False),
        (Status.TIMEOUT, False),
        (Status.PRUNED, False),
        (Status.INCIDENT, True),
        (Status.CANCELLED, True),
    ],
)
def test_what_a_failure_means_for_its_candidate(study, status, is_tried_again):
    """A candidate that cannot run, or is known to be slow, is not tried again; one whose machine failed is."""
    backend = Scripted([status])

    result, executor = run(study("search.max_trials=100"), backend)

    assert result.stop_reason == "exhausted"
    failed = executor.seen[0][1]
    assert backend.attempts[failed] == (2 if is_tried_again else 1)
    assert len(backend.attempts) == result.num_candidates
    assert [record.status for record in result.records] == [status] + [Status.OK] * (len(result.records) - 1)
    assert result.best.number == 1
    assert result.records[0].step_time_s is None


def test_how_trials_end_in_optuna(study):
    """Only a trial that ended well is complete for Optuna, and the observation stands beside it."""
    config = study("search.max_trials=3")
    states = {Status.OK: TrialState.COMPLETE, Status.TIMEOUT: TrialState.FAIL, Status.PRUNED: TrialState.PRUNED}

    run(config, Scripted([*states]))

    told = {trial.user_attrs["status"]: trial.state for trial in stored_study(config).get_trials()}
    assert told == states


def test_measured_memory_is_a_constraint_of_the_trial(study):
    """Optuna calls a trial infeasible where memory ran out, and feasible where its peak was measured as it ran."""

    class Measured(Scripted):
        def measure(self, config, *, trial_number):
            observation = super().measure(config, trial_number=trial_number)
            return replace(observation, peak_memory_bytes=None if trial_number == 2 else 2**30)

    config = study("search.max_trials=3")

    run(config, Measured([Status.OK, Status.OUT_OF_MEMORY]))

    ok, out_of_memory, unknown = (trial.constraints for trial in stored_study(config).get_trials())
    assert -1 < ok["memory"] < 0 < out_of_memory["memory"]
    assert unknown == {}


class Watched(InProcessExecutor):
    """Executor that notes at every poll how many trials run, and what a reader of the storage is told of the slots."""

    def watch(self, config, on_idle=None):
        """Return itself, watched with a study of this configuration; `on_idle` is called the first time one is idle."""
        self.config, self.seen_slots, self.on_idle = config, [], on_idle
        return self

    def poll(self, timeout_s, /):
        """As the loop calls it."""
        attributes = stored_study(self.config).user_attrs
        self.seen_slots.append((len(self.waiting), Slots.from_json(attributes[SLOTS])))
        if self.on_idle is not None and self.num_free_slots:
            self.on_idle()
            self.on_idle = None
        return super().poll(timeout_s)


def test_slots_stay_busy_while_there_is_something_to_try(study):
    """A search that confidence cannot end keeps four slots busy until every candidate is tried, and then says that."""
    config = study("search.max_trials=100")
    executor = Watched(Scripted(), slots=4).watch(config)

    result = run_study(config, executor=executor)

    left = [result.num_candidates - ended for ended in range(result.num_candidates)]
    assert result.stop_reason == StopReason.EXHAUSTED
    assert [busy for busy, _ in executor.seen_slots] == [min(4, count) for count in left]
    assert [slots.why for _, slots in executor.seen_slots] == [
        "" if count >= 4 else StopReason.EXHAUSTED.sentence for count in left
    ]


def test_a_run_says_why_slots_are_idle(study, meshtune, monkeypatch):
    """Where confidence may end a search with what runs, slots are idle; readers and progress are told why."""
    config = study("search.max_trials=100", "search.confidence=0.95")
    # a claim of this very process counts as one that nobody holds
    monkeypatch.setattr("tuner.run.studies.is_running", lambda _: True)
    shown = []
    options = (config.file, "--storage", config.storage.url)
    executor, told = Watched(Scripted(), slots=8), []
    executor.watch(config, lambda: shown.extend(meshtune("status", *options, *more) for more in (("--json",), ())))

    run_study(config, executor=executor, on_progress=lambda progress: told.append(progress.idle_in_words))

    idle = [(8 - busy, slots) for busy, slots in executor.seen_slots if busy < 8]
    assert {slots.count for _, slots in executor.seen_slots} == {8}
    assert idle
    assert all(slots.why for _, slots in idle)
    assert Wait.NOTHING_NAMED in {slots.why for _, slots in idle}
    assert any(Wait.NOTHING_NAMED in words for words in told)
    busy, why = next((busy, slots.why) for busy, slots in executor.seen_slots if busy < 8)
    as_json, in_words = shown[0].json, shown[1].out
    assert (as_json["slots"], as_json["running"], as_json["idle_because"]) == (8, busy, why)
    assert f"{busy} trials running, {8 - busy} of 8 slots idle: {why}" in " ".join(in_words.split())


def test_confidence_waits_for_what_is_pending(study):
    """A study that has become confident asks for nothing more and still hears the trials in flight out."""
    result, executor = run(study("search.confidence=0.01", "search.parallel_trials=3", "search.draws=20"), slots=3)

    assert result.stop_reason == "confident"
    assert all(record.finished for record in result.records)
    assert [number for number, _ in executor.seen] == [record.number for record in result.records]
    assert len(result.records) >= 3


def test_parallel_trials_have_different_candidates(study):
    """Trials that run at the same time never measure the same candidate."""
    result, _ = run(study("search.max_trials=4", "search.parallel_trials=3"), slots=3)

    assert len({tuple(record.params.values()) for record in result.records}) == 4


NUM_STEPS = 8


def run_step_by_step(config):
    """Runs a study whose trials report their steps; its result."""
    return run_study(config, on_progress=lambda _: None, executor=SteppingExecutor(config.trials.backend, slots=2))


@pytest.mark.slow
def test_clearly_slower_trials_are_stopped(study):
    """A study that stops its slow trials finds the best of one that measures all in full, and says what it saved:
    stopped trials are clearly slower, are no failures, and keep the steps that they have measured.
    """
    whole = study("search.max_trials=100", f"trial.num_steps={NUM_STEPS}", "name=whole", "search.prune=false")
    config = study("search.max_trials=100", f"trial.num_steps={NUM_STEPS}")

    in_full, stopping = run_step_by_step(whole), run_step_by_step(config)

    best_s = stopping.best.step_time_s
    assert (stopping.best.params, best_s) == (in_full.best.params, in_full.best.step_time_s)
    assert num_pruned(in_full.records) == num_failed(in_full.records) == num_failed(stopping.records) == 0
    times_s = {tuple(record.params.items()): record.step_time_s for record in in_full.records}
    pruned = [record for record in stopping.records if record.status is Status.PRUNED]
    assert 0 < len(pruned) == num_pruned(stopping.records)
    left_s = 0.0
    for record in pruned:
        steps_s = record.observation.step_times_s
        assert 2 <= len(steps_s) < NUM_STEPS
        assert times_s[tuple(record.params.items())] > (1 + MARGIN) * best_s
        assert record.observation.reason.startswith("clearly slower than the best: ")
        left_s += (NUM_STEPS - len(steps_s)) * statistics.median(steps_s)
    assert saved_s(stopping.records) == pytest.approx(left_s)


def test_first_steps_are_kept_as_intermediate_values(study):
    """Optuna holds the first steps of each trial, a few of them however many there are, and none without pruning."""
    config = study("search.max_trials=8", "search.acquisition=draws", f"trial.num_steps={NUM_STEPS}")
    run_step_by_step(config)

    trials = stored_study(config).get_trials()
    assert {trial.state for trial in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    for trial in trials:
        steps_s = trial.user_attrs[OBSERVATION]["step_times_s"]
        assert trial.intermediate_values == dict(enumerate(steps_s[:MAX_REPORTS], start=1))

    whole = study("search.max_trials=1", "name=whole", "search.prune=false")
    run_step_by_step(whole)
    assert [trial.intermediate_values for trial in stored_study(whole).get_trials()] == [{}]


@pytest.mark.parametrize(("is_current", "status"), [(True, Status.OK), (False, Status.PRUNED)])
def test_the_current_configuration_is_measured_in_full(study, is_current, status):
    """The current configuration is not stopped, however slow it is, also where others were tried before it."""
    slow = "tp: 1, pp: 2, dp: 4, cp: 1, up: 1, vpp: 1, ep: 1, mbs: 1"

    class SlowCurrent(Scripted):
        def measure(self, config, **_):
            is_slow = (config.tp, config.pp, config.dp) == (1, 2, 4)
            return Observation(status=Status.OK, step_times_s=(9.0 if is_slow else 1.0,) * 5, origin="synthetic")

    run(study("search.max_trials=1", "space.pp=[1]"), SlowCurrent())
    config = study("search.max_trials=100", *([f"current={{{slow}}}"] if is_current else []))

    result = run_study(config, on_progress=lambda _: None, executor=SteppingExecutor(SlowCurrent()))

    (currents,) = (r for r in result.records if (r.params["tp"], r.params["pp"], r.params["dp"]) == (1, 2, 4))
    assert currents.number > 0
    assert currents.status is status


@pytest.mark.slow
def test_slow_trials_are_stopped_on_ray(tmp_path):
    """`meshtune run` stops slow trials in their workers, and tells how many, and what that saved."""
    file = tmp_path / "study.yaml"
    file.write_text(SMALL)
    overrides = ("search.max_trials=100", f"trial.num_steps={NUM_STEPS}", "trial.seconds_per_trial=1.6")

    with DriverProcess(f"sqlite:///{tmp_path / 'study.db'}", *overrides, study=file) as driver:
        status, out, err = driver.end()

    assert status == 0, err
    printed = json.loads(out)
    config = load_study(file, overrides=overrides, storage=f"sqlite:///{tmp_path / 'study.db'}")
    records = read_records(stored_study(config))
    assert (printed["trials"], printed["failed"]) == (len(records), 0)
    assert 0 < printed["pruned"] == num_pruned(records)
    assert 0 < printed["saved_s"] == pytest.approx(saved_s(records))


def ticking():
    """A clock that goes on by twenty seconds whenever somebody looks."""
    return itertools.count(20.0, 20.0).__next__


@pytest.mark.slow
def test_budget_of_seconds_counts_every_run(study):
    """The budget of time is spent by all runs of a study together; once spent, the study is finished."""
    first, executor = run(study("search.max_minutes=3.5"), clock=ticking())
    spent_s = stored_study(study()).user_attrs[SPENT_S]
    again, idle = run(study("search.max_minutes=3.5"), clock=ticking())
    more, _ = run(study("search.max_minutes=7"), clock=ticking())

    assert first.stop_reason == again.stop_reason == more.stop_reason == "max_minutes"
    assert 200 <= spent_s < 300
    assert 0 < len(first.records) == len(again.records) < len(more.records)
    assert (executor.entered, idle.entered) == (1, 0)
    assert all(record.finished for record in more.records)


def jumping():
    """A wall clock that somebody sets whenever it is looked at: an hour on, two back, and so forth."""
    jumps_s = itertools.cycle([3600.0, -7200.0, 90.0, -3600.0, 7110.0])
    return itertools.accumulate(jumps_s, initial=1_000_000.0).__next__


def test_a_wall_clock_that_jumps_changes_nothing(study):
    """Whatever the date does, a run spends the time that passes, keeps its claim, and ends all its trials."""
    result, _ = run(study("search.max_minutes=10", "search.max_trials=4"), wall_clock=jumping())

    stored = stored_study(study())
    assert result.stop_reason == "max_trials"
    assert [record.finished for record in result.records] == [True] * 4
    assert 0 <= stored.user_attrs[SPENT_S] < 600
    assert not is_running(stored)


def test_dates_that_go_back_shuffle_no_trials(study, tmp_path):
    """Where the clock was set back between trials, they still stand in the order in which they ended."""
    run(study("search.max_trials=3"))
    before = [moment.trial for moment in read_moments(stored_study(study()))]
    with closing(sqlite3.connect(tmp_path / "study.db")) as database, database:
        for number in range(3):
            ended = f"2020-01-0{9 - number} 00:00:00.000000"
            database.execute("UPDATE trials SET datetime_complete = ? WHERE number = ?", (ended, number))

    stored = stored_study(study())
    records = read_records(stored)

    assert [trial.datetime_complete.day for trial in stored.get_trials()] == [9, 8, 7]
    assert [moment.trial for moment in read_moments(stored)] == before == [None, 0, 1, 2]
    assert [record.number for record in sorted(records, key=lambda record: record.end_order)] == [0, 1, 2]


@pytest.mark.slow
def test_budget_of_device_hours_counts_every_run(study):
    """No trial starts once those that ended have spent the budget, in this run and all before; a larger one goes on."""
    hours = {seconds: f"search.budget_device_hours={seconds / 3600}" for seconds in (20, 50)}
    first, executor = run(study(hours[20]), Scripted())  # trials of 1, 2, 3 and 4 s on 8 devices
    again, idle = run(study(hours[20]), Scripted())
    more, _ = run(study(hours[50]), Scripted())

    assert first.stop_reason == again.stop_reason == more.stop_reason == "budget_device_hours"
    assert [len(result.records) for result in (first, again, more)] == [2, 2, 4]
    assert (executor.entered, idle.entered) == (1, 0)


def test_trials_in_flight_are_cancelled_when_device_hours_are_spent(study):
    """Trials that run when the budget is spent are ended, which says nothing about their configurations."""
    result, executor = run(study(f"search.budget_device_hours={1 / 3600}"), Scripted(), slots=3)
    again, _ = run(study("search.max_trials=20"), Scripted())

    assert result.stop_reason == "budget_device_hours"
    assert [record.status for record in result.records] == [Status.OK, Status.CANCELLED, Status.CANCELLED]
    assert result.records[1].observation.reason == "the budget of device-hours is spent"
    assert len(executor.seen) == 1
    retried = [record.params for record in again.records[3:]]
    assert all(record.params in retried for record in result.records[1:])


def test_a_trial_that_outlasts_the_budget_of_time_is_cancelled(study):
    """A trial that would run for ever is ended with the minutes, and a resumed study does not start it again."""
    executor = SteppingExecutor(Endless(), 1)
    config = study("search.max_minutes=3.5")
    first = run_study(config, on_progress=lambda _: None, executor=executor, clock=ticking())
    again, idle = run(study("search.max_minutes=3.5"), Scripted(), clock=ticking())

    assert first.stop_reason == again.stop_reason == "max_minutes"
    assert [record.status for record in first.records] == [Status.CANCELLED]
    assert idle.entered == 0


def test_a_trial_that_outlasts_the_budget_of_devices_is_cancelled(study):
    """The steps that a running trial has measured count as device-hours before it ends: 8 devices, a second each."""
    executor = SteppingExecutor(Endless(), 1)
    config = study(f"search.budget_device_hours={40 / 3600}")
    first = run_study(config, on_progress=lambda _: None, executor=executor)

    assert first.stop_reason == "budget_device_hours"
    assert [record.status for record in first.records] == [Status.CANCELLED]


def test_a_trial_left_over_is_cancelled_when_the_budget_is_spent(study):
    """A trial of a driver that died is not started again once the budget is spent; it is recorded as cancelled."""
    config = study("search.max_minutes=3.5")
    with pytest.raises(RuntimeError, match="dies"):
        run(config, Dying(), clock=ticking())
    with closing(sqlite3.connect(config.storage.file)) as database, database:
        database.execute("UPDATE study_user_attributes SET value_json = '9999.0' WHERE key = ?", (SPENT_S,))
    result, executor = run(study("search.max_minutes=3.5"), Scripted(), clock=ticking())

    assert result.stop_reason == "max_minutes"
    assert [record.status for record in result.records] == [Status.CANCELLED]
    assert executor.entered == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("search.max_trials=2",), "max_trials"),
        (("search.max_trials=100",), "exhausted"),
        (("search.confidence=0.01", "space.pp=[1]"), "confident"),
    ],
)
def test_finished_study_returns_without_starting_anything(study, overrides, reason):
    """Running a finished study again gives the same result and starts no worker."""
    first, _ = run(study(*overrides))
    again, executor = run(study(*overrides))

    assert first.stop_reason == again.stop_reason == reason
    assert again.records == first.records
    assert again.best == first.best
    assert again.p_star == first.p_star
    assert executor.entered == 0


def test_larger_budget_goes_on(begun):
    """More trials for a finished study go on from where it stopped, as if they had been there from the start."""
    continued, executor = run(begun("search.max_trials=3"))

    assert [number for number, _ in executor.seen] == [1, 2]
    assert continued.stop_reason == "max_trials"
    assert [record.number for record in continued.records] == [0, 1, 2]


def test_nothing_fits(study):
    """A study without a candidate ends at once, stores nothing, and says which rule to look at."""
    config = study("job.global_batch_size=1", "space.dp=[8]")

    result, executor = run(config)

    assert (result.best, result.records, result.num_candidates) == (None, [], 0)
    assert "no configuration is left" in result.warnings[0]
    assert executor.entered == 0
    assert find_study(config.storage, config.name) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model=llama-13b", "model"),
        ("cluster.hosts=2", "cluster"),
        ("cluster.name=dgx-h100", "cluster"),
        ("job.global_batch_size=128", "job.global_batch_size"),
        ("job.recompute=full", "job.recompute"),
        ("runtime=mindspeed", "runtime"),
        ("space.recompute=[none, full]", "space.opened"),
        ("trial.seed=1", "trial.seed"),
        ("trial.noise=0.5", "trial.noise"),
        ("trial.num_steps=7", "trial.num_steps"),
    ],
)
def test_trials_that_would_mean_something_else_are_not_continued(begun, override, key):
    """A study whose file now means another measurement is refused, by the key that changed, and stays as it was."""
    before = stored_study(begun()).get_trials()

    with pytest.raises(ConfigError, match="its trials would no longer mean the same") as caught:
        run(begun("search.max_trials=2", override))

    assert str(caught.value.key).startswith(key)
    assert str(caught.value.file).endswith("study.yaml")
    assert stored_study(begun()).get_trials() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        "search.seed=1",
        "search.draws=20",
        "search.parallel_trials=2",
        "search.prune=false",
        "trial.time_limit=60",
        "trial.seconds_per_trial=0.001",
        "space.tp=[1, 2, 4]",
        "space.pp=[1]",
        "space.memory_headroom=0.1",
        "current={tp: 8, pp: 1, dp: 1, cp: 1, up: 1, vpp: 1, ep: 1, mbs: 1}",
    ],
)
def test_what_leaves_the_trials_their_meaning_may_change(begun, override):
    """How a study searches, and how much of the space, may change between two runs."""
    result, _ = run(begun("search.max_trials=2", override))

    assert result.stop_reason == "max_trials"


@pytest.mark.usefixtures("begun")
def test_changed_meaning_on_the_command_line(tmp_path):
    """The command ends with status 2 and one message that names the key, and does not start Ray."""
    file = tmp_path / "study.yaml"

    with DriverProcess(f"sqlite:///{tmp_path / 'study.db'}", "runtime=mindspeed", study=file) as driver:
        status, out, err = driver.end()

    assert (status, out) == (2, "")
    assert "runtime." in err
    assert "its trials would no longer mean the same" in err
    assert "Traceback" not in err
    assert str(file) in err


def test_what_a_study_keeps_of_itself(begun):
    """A study says what its trials mean, where their times come from and why it stopped, and nobody drives it."""
    stored = stored_study(begun())

    assert stored.user_attrs[ORIGIN] == "synthetic"
    assert stored.user_attrs[MEANING]["model"]["name"] == "llama-7b"
    assert stored.user_attrs[STOP_REASON] == "max_trials"
    assert not is_running(stored)


def test_resumed_run_that_dies_is_interrupted(begun):
    """A finished study that was continued and died says so, instead of the reason for which it first stopped."""

    class Dying(InProcessExecutor):
        def poll(self, _timeout_s, /):
            assert stored_study(config).user_attrs[STOP_REASON] == "interrupted"
            raise KeyboardInterrupt

    config = begun("search.max_trials=2")
    result = run_study(config, on_progress=lambda _: None, executor=Dying(config.trials.backend))

    assert result.stop_reason == "interrupted"
    assert [record.finished for record in result.records] == [True, False]


def test_failing_database_is_one_message(study, tmp_path):
    """A database that fails in the middle of a run ends it with one message; what had ended stays."""

    class Destroying(InProcessExecutor):
        def poll(self, timeout_s, /):
            for file in tmp_path.glob("study.db*"):
                file.write_bytes(b"no database" * 1000)
            return super().poll(timeout_s)

    config = study()
    with pytest.raises(ConfigError, match=r"storage = .* cannot be used") as caught:
        run_study(config, on_progress=lambda _: None, executor=Destroying(config.trials.backend))

    assert caught.value.key == "storage"


def test_study_that_has_not_run(study):
    """Looking at a study that has no trials says how to start it."""
    with pytest.raises(ConfigError, match="has no trials in its storage yet; start it with `meshtune run "):
        stored_study(study())


def test_an_interrupted_run_gives_its_study_up_before_its_executor_ends(database, tmp_path):
    """When the executor is ended nobody claims the study and its trials wait; the next run goes on with them."""
    (tmp_path / "study.yaml").write_text(SMALL)
    overrides = ["search.max_trials=3", "search.parallel_trials=2"]
    config = load_study(tmp_path / "study.yaml", overrides=overrides, storage=database)
    seen = []

    class Interrupted(InProcessExecutor):
        def poll(self, _timeout_s):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            stored = stored_study(config)
            seen.append((stored.user_attrs[DRIVER], [trial.state.name for trial in stored.get_trials()]))

    told = run_study(config, on_progress=lambda _: None, executor=Interrupted(config.trials.backend, slots=2))
    waiting = [record.waits for record in read_records(stored_study(config))]
    executor = InProcessExecutor(config.trials.backend, slots=2)
    done = run_study(config, on_progress=lambda _: None, executor=executor)

    assert seen == [(None, ["WAITING", "WAITING"])]
    assert (told.stop_reason, waiting) == (StopReason.INTERRUPTED, [True, True])
    assert (done.stop_reason, [number for number, _ in executor.seen]) == ("max_trials", [0, 1, 2])
    assert all(record.status is Status.OK for record in read_records(stored_study(config)))
