import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from sqlalchemy import Engine, event, func, inspect, select, text

from costmodels.blocks.mask import Mask
from costmodels.blocks.operator import OpKind, Phase
from costmodels.calibration.fidelity import group_key, is_clean, settings_of
from costmodels.calibration.fitting import calibrate_timed
from costmodels.calibration.measured_runs import COLUMNS, read_measured, read_measured_and_skipped
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import CONSTANTS, find_prior, find_runtime
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.io.errors import ConfigError
from tests.support.own_server import new_storage
from tests.support.settings.mixed_models import MIXED
from tests.support.studies.broken_studies import rows
from tests.support.studies.driver_process import STUDY
from tests.support.studies.in_process_executor import InProcessExecutor
from trials.backend import Observation, OperatorSample, Status
from tuner.run.loop import run_study
from tuner.run.studies import stored_study
from tuner.search.earlier_runs import facts_of_profile
from tuner.search.observations import OBSERVATION
from tuner.storage.history import Past, keep_run, make_tables, past_of, read_past
from tuner.storage.history.tables import METADATA, REHEARSALS, RUNS, SAMPLES, VERSION
from tuner.storage.opening import open_store, reading
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress

MOE = """
name: first
model: mixtral-8x7b
cluster: {groups: [{name: dgx-h100, hosts: 1}, {name: dgx-a100, hosts: 1}]}
job: {sequence_length: 4096, global_batch_size: 64, recompute: selective, recompute_modules: [mlp, layernorm]}
space: {tp: [2, 4], pp: [1, 2], cp: [1], up: [1], vpp: [1], ep: [1, 2], mbs: [1], zero_stage: [0, 1]}
search: {draws: 10, confidence: 1.0, max_trials: 4}
trial: {backend: simulated}
"""
SAMPLE = OperatorSample(kind=OpKind.MATMUL, phase=Phase.FORWARD, shape=(1.0, 512.0, 0.5, 64.0), time_s=2e-3, count=32)
MEASURED = Path(__file__).resolve().parents[5] / "configs" / "measured" / "ultrascale-llama-8b-128.csv"


class Scripted:
    """Ends trial n as the n-th observation says, and every later one well."""

    def __init__(self, *observations):
        self.observations = observations

    def measure(self, _config, *, trial_number):
        """As the executor calls it."""
        if trial_number < len(self.observations):
            return self.observations[trial_number]
        return Observation(status=Status.OK, step_times_s=(2.0, 2.1, 2.2), operator_samples=(SAMPLE,))


class Predicted:
    """Every trial takes what the cost model predicts under a profile."""

    def __init__(self, setting, profile):
        self.setting, self.profile = setting, profile

    def measure(self, config, *, trial_number):  # noqa: ARG002 # the contract's
        """As the executor calls it."""
        setting = replace(self.setting, runtime=self.profile)
        grid = ConfigGrid.from_configs([config])
        memory = estimate_memory(setting, grid)
        step = estimate_step(setting, grid, memory=memory)
        return Observation(status=Status.OK, step_times_s=(float(step.step_time_s[0]),))


def loaded(folder, storage, *overrides, uneven=False):
    """The study above; only where work may be uneven, its candidates take a second to plan."""
    file = folder / "study.yaml"
    file.write_text(MOE)
    return load_study(file, overrides=[*([] if uneven else ["space.assignment=[]"]), *overrides], storage=storage)


def run(config, backend=None):
    """Runs a study in this process; its result and the notes that it told."""
    notes = []
    executor = InProcessExecutor(backend or config.trials.backend)
    result = run_study(config, on_progress=lambda progress: notes.append(progress.note), executor=executor)
    return result, [note for note in notes if note]


def forget_tables(url):
    """Makes the database what an older Meshtune left."""
    engine = open_store(StorageAddress.parse(url)).engine
    with engine.begin() as connection:
        for table in (SAMPLES.name, RUNS.name, REHEARSALS.name, "meshtune_history"):
            connection.execute(text(f"DROP TABLE {table}"))
    engine.dispose()


def counts(url):
    """Rows of both tables."""
    with reading(StorageAddress.parse(url), METADATA) as connection:
        return [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in (RUNS, SAMPLES)]


def past_in(url, **options):
    """The past that one database holds."""
    return read_past([StorageAddress.parse(url)], base_dir=Path(), **options)


# Keeping and reading back


@pytest.mark.slow
def test_what_a_study_ran_is_read_back(database, tmp_path):
    """Job, cluster, facts, configuration, end, median, spread and peak of each trial come back as they were."""
    spread = Observation(status=Status.OK, step_times_s=(1.0, 4.0, 1.5), peak_memory_bytes=70 * 2**30)
    cut_off = Observation(status=Status.PRUNED, step_times_s=(3.0,), expected_steps=5)
    crash = Observation(status=Status.CRASHED, reason="no such schedule")
    config = loaded(tmp_path, database, uneven=True)

    result, _ = run(config, Scripted(spread, cut_off, crash))
    past = past_in(database)

    assert [run.config for run in past.runs] == [config.problem.config_of(record.params) for record in result.records]
    assert len({run.config for run in past.runs}) == 4
    assert any(run.config.assignment for run in past.runs)
    for one in past.runs:
        assert (one.job, one.cluster) == (config.problem.setting.job, config.problem.setting.cluster)
        assert (one.runtime, one.origin) == ("megatron-core", "measured")
        assert one.measured_setting(config.problem.setting.runtime).setting.runtime == config.problem.setting.runtime
    assert [run.status for run in past.runs] == [Status.OK, Status.PRUNED, Status.CRASHED, Status.OK]
    assert [run.step_time_s for run in past.runs] == [1.5, None, None, 2.1]
    assert [run.num_steps for run in past.runs] == [3, 1, 0, 3]
    assert past.runs[0].log_spread == pytest.approx(0.7128, abs=1e-4)  # of the logs 0, 1.3863 and 0.4055
    assert [run.log_spread for run in past.runs[1:3]] == [0.0, 0.0]
    assert [run.peak_memory_bytes for run in past.runs] == [70 * 2**30, None, None, None]
    assert len({run.group for run in past.runs}) == 1
    assert past.skipped == {}


def test_operator_times_are_read_back(database, tmp_path):
    """Each operator time keeps its device, runtime and precision, its order in the trial, and every field."""
    second = replace(SAMPLE, kind=OpKind.ATTENTION, phase=Phase.BACKWARD, time_s=5e-4, name="attention")
    config = loaded(tmp_path, database, "search.max_trials=1")

    run(config, Scripted(Observation(status=Status.OK, step_times_s=(1.0,), operator_samples=(SAMPLE, second))))
    past = past_in(database)

    for found, sample in zip(past.samples, (SAMPLE, second), strict=True):
        assert (found.device, found.runtime) == ("H100-SXM-80 + A100-SXM-80", "megatron-core")
        assert (found.precision, found.origin) == ("bf16", "measured")
        assert found.group == past.runs[0].group
        for name in ("kind", "phase", "shape", "time_s", "count", "name"):
            assert getattr(found, name) == getattr(sample, name)


@pytest.mark.slow
def test_a_past_has_one_order(request, tmp_path):
    """Studies come in one order whatever language a server sorts texts in, so that sums over them are the same."""
    url = new_storage("postgresql", request, tmp_path)
    for name in ("a", "B"):
        run(replace(loaded(tmp_path, url, "search.max_trials=1"), name=name), Scripted())
    engine = open_store(StorageAddress.parse(url)).engine
    with engine.begin() as connection:  # as on a server that was made with a locale
        for table in (RUNS.name, SAMPLES.name):
            connection.execute(text(f'ALTER TABLE {table} ALTER COLUMN study TYPE varchar(512) COLLATE "en-x-icu"'))
    engine.dispose()
    past = past_in(url)

    assert [one.group.partition(" (")[0] for one in past.runs] == ["B", "a"]
    assert [one.group.partition(" (")[0] for one in past.samples] == ["B", "a"]


def test_all_facts_of_all_runtimes_survive_json():
    """What is kept of any profile makes the same profile again, with the constants of whoever asks."""
    for name in ("megatron-core", "nanotron", "maxtext"):
        profile = find_runtime(name)
        kept = facts_of_profile(json.loads(json.dumps(dict(facts_of_profile(profile_fields(profile))))))

        assert replace(profile, **dict(kept)) == profile
        assert "matmul_efficiency" not in dict(kept)


def profile_fields(profile):
    """A profile as a mapping."""
    return {name: getattr(profile, name) for name in profile.__dataclass_fields__}


def test_a_time_that_is_none_stops_no_study(tmp_path):
    """What a profiler gives as 0 or nan is left out of the table of operator times; the run is kept."""
    storage = f"sqlite:///{tmp_path / 'past.db'}"
    samples = (replace(SAMPLE, time_s=0.0), replace(SAMPLE, time_s=float("nan")), SAMPLE)
    observation = Observation(status=Status.OK, step_times_s=(1.0,), operator_samples=samples)

    run(loaded(tmp_path, storage, "search.max_trials=1"), Scripted(observation))

    assert counts(storage) == [1, 1]


def test_a_trial_that_is_kept_twice_is_there_once(database, tmp_path):
    """Keeping a trial again replaces its run and its operator times, and leaves those of others alone."""
    store = open_store(StorageAddress.parse(database))
    setting = loaded(tmp_path, database).problem.setting
    observation = Observation(status=Status.OK, step_times_s=(1.0,), operator_samples=(SAMPLE, SAMPLE))
    again = replace(observation, step_times_s=(2.0,), operator_samples=(SAMPLE,))

    for _ in range(2):
        make_tables(store)
    for study, trial, found in (("a", 0, observation), ("a", 1, observation), ("b", 0, observation), ("a", 0, again)):
        keep_run(store, study, trial, setting, ParallelConfig(dp=16), found)
    store.close()

    assert [run.step_time_s for run in past_in(database).runs] == [2.0, 1.0, 1.0]
    assert counts(database) == [3, 1 + 2 + 2]


WINDOWED = find_model("llama3-8b").with_masks([Mask(window=512)] * 32)


@pytest.mark.parametrize("model", [MIXED, WINDOWED], ids=lambda model: model.name)
def test_a_run_of_any_row_of_blocks_is_read_back(sql_database, tmp_path, model):
    """Also of models that no keys of a decoder describe, and of decoders with masks."""
    setting = loaded(tmp_path, sql_database).problem.setting
    job = replace(setting.job, model=model)
    observation = Observation(status=Status.OK, step_times_s=(2.0, 2.1, 2.2))

    store = open_store(StorageAddress.parse(sql_database))
    make_tables(store)
    keep_run(store, "a", 0, replace(setting, job=job), ParallelConfig(dp=16), observation)
    store.close()

    (found,) = past_in(sql_database).runs
    assert found.job == job


def test_a_trial_is_kept_whole_or_not_at_all(sql_database, tmp_path):
    """A driver that dies while it keeps a trial leaves neither its run nor a part of its operator times."""
    store = open_store(StorageAddress.parse(sql_database))
    engine = store.engine
    make_tables(store)
    observation = Observation(status=Status.OK, step_times_s=(1.0,), operator_samples=(SAMPLE,) * 3)

    def die(_connection, _cursor, statement, *_):
        if SAMPLES.name in statement and statement.startswith("INSERT"):
            raise KeyboardInterrupt

    event.listen(engine, "before_cursor_execute", die)
    with pytest.raises(KeyboardInterrupt):
        keep_run(store, "a", 0, loaded(tmp_path, sql_database).problem.setting, ParallelConfig(dp=16), observation)
    event.remove(engine, "before_cursor_execute", die)
    engine.dispose()

    assert counts(sql_database) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "observed"),
    [(f"INSERT INTO {RUNS.name}", False), (f"INSERT INTO {SAMPLES.name}", False), ("UPDATE trials SET state", True)],
)
def test_a_driver_that_dies_while_it_ends_a_trial_loses_nothing(tmp_path, moment, observed):
    """Killed while it keeps an observation, or after it, and resumed, a study has each trial in the tables once."""
    storage = f"sqlite:///{tmp_path / 'past.db'}"
    config = loaded(tmp_path, storage)
    seen = []

    def die(_connection, _cursor, statement, *_):
        if statement.startswith(moment):
            seen.append(statement)
            if len(seen) == 2:
                raise SystemExit

    event.listen(Engine, "before_cursor_execute", die)
    with pytest.raises(SystemExit):
        run(config, Scripted())
    event.remove(Engine, "before_cursor_execute", die)
    assert (OBSERVATION in stored_study(config).get_trials()[1].user_attrs) == observed
    result, _ = run(config, Scripted())

    past = past_in(storage)
    assert [run.config for run in past.runs] == [config.problem.config_of(record.params) for record in result.records]
    assert counts(storage) == [4, 4]


# Studies from before the tables


@pytest.mark.slow
def test_an_older_study_is_read_from_its_trials(sql_database, tmp_path):
    """A database without the tables gives the same runs and operator times, and is not changed by it."""
    config = loaded(tmp_path, sql_database, uneven=True)
    run(config, Scripted(Observation(status=Status.CRASHED), Observation(status=Status.PRUNED, step_times_s=(3.0,))))
    kept = past_in(sql_database)
    forget_tables(sql_database)

    older = past_in(sql_database)

    assert older == kept
    assert len(older.runs) == 4
    assert len(older.samples) == 2
    engine = open_store(StorageAddress.parse(sql_database)).engine
    assert not [name for name in inspect(engine).get_table_names() if name.startswith("meshtune")]
    engine.dispose()


@pytest.mark.slow
def test_a_study_that_was_resumed_by_a_newer_version_counts_once(tmp_path):
    """Trials of before the tables and of after are read together, each once."""
    storage = f"sqlite:///{tmp_path / 'past.db'}"
    run(loaded(tmp_path, storage, "search.max_trials=1"), Scripted())
    forget_tables(storage)

    run(loaded(tmp_path, storage, "search.max_trials=3"), Scripted())

    past = past_in(storage)
    assert counts(storage) == [2, 2]
    assert len({run.config for run in past.runs}) == len(past.runs) == len(past.samples) == 3


def test_trials_that_cannot_be_understood_are_counted(tmp_path):
    """Trials of other programs, and those whose job is of another version, are left out and counted by reason."""
    storage = f"sqlite:///{tmp_path / 'past.db'}"
    run(loaded(tmp_path, storage, "search.max_trials=3"), Scripted())
    optuna.create_study(study_name="foreign", storage=storage).enqueue_trial({"x": 1})
    with closing(sqlite3.connect(tmp_path / "past.db")) as connection:
        connection.execute("UPDATE meshtune_runs SET job = '{}' WHERE trial = 0")
        connection.execute("UPDATE meshtune_operator_samples SET kind = 'quantum' WHERE trial = 1")
        connection.commit()

    past = past_in(storage)

    assert (len(past.runs), len(past.samples)) == (2, 2)
    assert sorted(past.skipped.values()) == [1, 1, 1]
    assert "1 trials of other programs" in past.in_words


# Published runs


def test_a_published_sweep_is_read(tmp_path):
    """Rows of a CSV file are runs under the facts of their source, failed ones with their kind of failure."""
    (tmp_path / "sweep.csv").write_text(
        rows(
            {"peak_mem_gib": 10},
            {"step_seconds": "", "notes": "FAILED OOM"},
            {"step_seconds": "", "notes": "FAILED crash"},
            {"notes": "no gradient-accumulation flag; no comm overlap", "gbs": 32},
            {"notes": "OUTLIER"},
            {"notes": "SUSPECT"},
            {"device": "H1000"},
            {"tp": ""},
        )
    )

    past = read_past(["sweep.csv"], base_dir=tmp_path)

    ok, oom, crashed, plain, outlier = past.runs
    assert [run.status for run in past.runs] == [Status.OK, Status.OUT_OF_MEMORY, Status.CRASHED, Status.OK, Status.OK]
    assert (ok.step_time_s, ok.num_steps, ok.log_spread, ok.peak_memory_bytes) == (1.5, 1, 0.0, 10 * 2**30)
    assert (oom.step_time_s, oom.num_steps) == (None, 0)
    assert (ok.cluster.num_devices, ok.job.global_batch_size, ok.runtime) == (8, 16, "megatron-core")
    assert ok.group == oom.group == crashed.group == outlier.group != plain.group
    assert not plain.measured_setting(find_runtime("megatron-core")).setting.runtime.overlaps_gradients
    assert ok.measured_setting(find_runtime("megatron-core")).setting.runtime == find_runtime("megatron-core")
    assert [run.is_clean for run in past.runs] == [True, True, True, True, False]
    assert sum(past.skipped.values()) == 3
    assert any("H1000" in reason for reason in past.skipped)


def test_calibration_gets_the_same_from_history_as_from_the_file(tmp_path):
    """Of published runs, history hands a fit the clean and timed ones, with the settings that the file itself gives."""
    profile = find_prior("nanotron")
    read, _ = read_measured_and_skipped([MEASURED], tmp_path)
    runs, settings, _ = settings_of([run for run in read if run.step_time_s and is_clean(run)], {"nanotron": profile})

    past = read_past([str(MEASURED)], base_dir=tmp_path)
    timed = past.timed(profile)

    assert [run.measured for run in timed] == settings
    assert [(run.config, run.step_time_s) for run in timed] == [(run.config, run.step_time_s) for run in runs]
    assert len(timed) > 50
    assert len({run.group for run in timed}) == len({group_key(run) for run in runs})
    assert past.timed(find_prior("megatron-core")) == ()


@pytest.mark.slow
def test_a_profile_is_fitted_to_what_a_study_ran(tmp_path):
    """Trials of an earlier study move the constants of its runtime towards what made them.

    Sequences are so long that no device waits for its host, which could else be what is slow.
    """
    storage = f"sqlite:///{tmp_path / 'past.db'}"
    profile = find_prior("megatron-core")
    changes = ("model=llama-7b", "job.sequence_length=8192", "cluster={name: dgx-h100, hosts: 1}")
    config = loaded(tmp_path, storage, *changes, "search.max_trials=14")
    world = replace(
        config.problem.setting.runtime, **{name: getattr(profile, name) for name in CONSTANTS}, residuals=()
    )
    slow = replace(world, matmul_efficiency=0.5 * world.matmul_efficiency, device_speed=())

    result, _ = run(config, Predicted(config.problem.setting, slow))
    fit = calibrate_timed(past_in(storage).timed(profile), profile)

    speed = fit.constants["matmul_efficiency"].value * fit.device_speed["H100-SXM-80"].value
    assert fit.num_runs == len(result.records) > 5
    assert speed < 0.8 * profile.matmul_efficiency


# What is no past


@pytest.mark.slow
def test_a_study_is_not_its_own_past(sql_database, tmp_path):
    """A study that names its own storage reads the other studies in it, with or without the tables, and not itself."""
    history = f"history=[{json.dumps(sql_database)}]"
    run(loaded(tmp_path, sql_database))
    second = loaded(tmp_path, sql_database, "name=second", history)
    run(second)

    own = {run.group for run in past_of(second).runs}
    other = {run.group for run in past_of(loaded(tmp_path, sql_database, history)).runs}
    forget_tables(sql_database)

    assert [name.split()[0] for name in (*own, *other)] == ["first", "second"]
    assert {run.group for run in past_of(second).runs} == own
    assert len({run.group for run in past_in(sql_database).runs}) == 2


def test_own_storage_is_known_under_another_spelling(tmp_path, monkeypatch):
    """A relative path and an absolute one are one database; before its first run a study has no past there."""
    monkeypatch.chdir(tmp_path)
    history = f"history=['sqlite:///{tmp_path / 'past.db'}']"

    config = loaded(tmp_path, "sqlite:///past.db", history, "search.max_trials=1")

    assert past_of(config) == Past()
    assert not (tmp_path / "past.db").exists()
    run(config)
    assert past_of(config) == Past()


def test_server_is_known_under_another_spelling(postgresql, tmp_path):
    """A study's own server is recognized however its address, port and driver are written."""
    run(loaded(tmp_path, postgresql, "name=spelled"))
    other = postgresql.replace("postgresql://", "postgresql+psycopg2://").replace("127.0.0.1", "localhost")

    assert [run for run in past_in(other).runs if run.group.startswith("spelled ")]
    assert not [
        run
        for run in past_in(other, own=(StorageAddress.parse(postgresql), "spelled")).runs
        if run.group.startswith("spelled ")
    ]


@pytest.mark.slow
def test_synthetic_trials_say_nothing_to_a_measured_study(tmp_path):
    """Simulated trials are past for a simulated study only; a study of real devices warns that it leaves them out."""
    simulated = f"sqlite:///{tmp_path / 'past.db'}"
    run(loaded(tmp_path, simulated, "search.max_trials=3"))
    history = f"history=['{simulated}']"
    storage = f"sqlite:///{tmp_path / 'other.db'}"
    replay = load_study(STUDY, overrides=[history, "search.max_trials=1"], storage=storage)

    result, notes = run(replay)

    assert len(past_of(loaded(tmp_path, storage, history)).runs) == 3
    assert past_of(replay).runs == past_of(replay).samples == ()
    (warning,) = [warning for warning in result.warnings if "history" in warning]
    assert warning.startswith("3 runs of the history are left out: they are of a simulated world")
    assert any("history: 0 runs and 0 operator times; left out: 3 runs of a simulated world" in note for note in notes)


def test_runs_by_another_clock_are_left_out_and_their_operators_read(database, tmp_path):
    """Seconds of a virtual clock say nothing to a study by the wall clock; what operators took does."""
    store = open_store(StorageAddress.parse(database))
    make_tables(store)
    setting = loaded(tmp_path, database).problem.setting
    for trial, clock in enumerate(("wall", "virtual", "cpu")):
        observation = Observation(status=Status.OK, step_times_s=(1.0,), operator_samples=(SAMPLE,), clock=clock)
        keep_run(store, "a", trial, setting, ParallelConfig(dp=16), observation)
    store.close()

    past = past_in(database)

    assert [run.clock for run in past.runs] == ["wall", "virtual", "cpu"]
    by_wall = past.on_clock("wall")
    assert [run.clock for run in by_wall.runs] == ["wall"]
    assert (len(by_wall.samples), by_wall.skipped) == (3, {"runs by another clock": 2})


def test_published_rows_name_their_clock(tmp_path):
    """`clock=virtual` in the remarks of a row sets it apart from rows by the wall clock."""
    from tuner.storage.history.published import clock_of

    (tmp_path / "virtual.csv").write_text(rows({"notes": "clock=virtual; round=1"}), encoding="utf-8")
    (run,) = read_measured(["virtual.csv"], {}, tmp_path)

    assert clock_of(run) == "virtual"
    assert clock_of(replace(run, notes="a virtual clock was not used")) == "wall"


def test_a_replay_does_not_read_its_own_rows(tmp_path):
    """Rows that answer the trials of a replay are left out of its history, and so are the failed ones beside them."""
    failed = MEASURED.with_name("ultrascale-llama-8b-128_failed.csv")
    overrides = [f"history=[{json.dumps(str(MEASURED))}, {json.dumps(str(failed))}]"]
    config = load_study(STUDY, overrides=overrides, storage=f"sqlite:///{tmp_path / 'study.db'}")
    whole = read_past(config.history.entries, base_dir=tmp_path)
    key = (
        config.problem.setting.job.global_batch_size,
        config.problem.setting.job.sequence_length,
        config.problem.setting.job.model.name,
    )

    past = past_of(config)

    left_out = [
        run for run in whole.runs if (run.job.global_batch_size, run.job.sequence_length, run.job.model.name) == key
    ]
    assert len(past.runs) == len(whole.runs) - len(left_out)
    assert past.skipped["rows that the study itself replays"] == len(left_out) >= len(config.problem.subject.rows)


@pytest.mark.slow
def test_how_much_was_read_is_told_and_kept(tmp_path):
    """A run tells once how much it has read, keeps it for `meshtune status`, and no more says so without a history."""
    first = f"sqlite:///{tmp_path / 'past.db'}"
    run(loaded(tmp_path, first, "search.max_trials=3"))
    storage = f"sqlite:///{tmp_path / 'other.db'}"
    with_history = loaded(tmp_path, storage, f"history=['{first}']", "search.max_trials=1")
    samples = len(past_of(with_history).samples)
    line = f"history: 3 runs and {samples} operator times"

    _, notes = run(with_history)

    assert [note for note in notes if note.startswith("history")] == [line]
    assert samples > 0
    assert stored_study(with_history).user_attrs["history"] == line
    without = loaded(tmp_path, storage, "search.max_trials=2")
    assert not [note for note in run(without)[1] if note.startswith("history")]
    assert stored_study(without).user_attrs["history"] == ""


# What cannot be read


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("sqlite:///{folder}/none.db", ("none.db'", "no such database")),
        ("sqlite:///{folder}/notes.db", ("notes.db'", "cannot be used", "file is not a database")),
        ("sqlite:///{folder}/school.db", ("school.db'", "holds no study")),
        ("sqlite:///{folder}/newer.db", ("newer.db'", f"holds a history of version {VERSION + 1}", "newer Meshtune")),
        ("postgresql://user:c4nary@127.0.0.1:1/name", ("postgresql://user:***@127.0.0.1:1/name", "Connection refused")),
        ("postgresql+nosuch://user:c4nary@127.0.0.1/name", ("nosuch",)),
        ("missing.csv", ("missing.csv", "no such file")),
        ("ragged.csv", ("ragged.csv:2", "cells")),
    ],
)
def test_a_history_that_cannot_be_read_is_one_message(tmp_path, entry, words):
    """An entry that cannot be read is told by its place in the list, without a password, and no file is made of it."""
    (tmp_path / "notes.db").write_text("these are my notes " * 500)
    with closing(sqlite3.connect(tmp_path / "school.db")) as connection:
        connection.execute("CREATE TABLE pupils (age INTEGER)")
    with closing(sqlite3.connect(tmp_path / "newer.db")) as connection:
        connection.execute("CREATE TABLE meshtune_history (version INTEGER)")
        connection.execute("INSERT INTO meshtune_history VALUES (?)", (VERSION + 1,))
        connection.commit()
    (tmp_path / "ragged.csv").write_text(",".join(COLUMNS) + "\na,b\n")
    (tmp_path / "good.csv").write_text(rows({}))
    before = sorted(tmp_path.iterdir())
    entry = entry.format(folder=tmp_path)

    with pytest.raises(ConfigError) as caught:
        read_past(["good.csv", StorageAddress.parse(entry) if "://" in entry else entry], base_dir=tmp_path)

    message = str(caught.value)
    assert caught.value.key == "history.1"
    for word in words:
        assert word in message
    assert "c4nary" not in message
    assert len(message.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_tables_of_another_version_refuse_the_study_before_its_first_trial(tmp_path):
    """A storage whose history another version keeps is refused at once, and no trial is run in vain."""
    storage = f"sqlite:///{tmp_path / 'past.db'}"
    run(loaded(tmp_path, storage, "search.max_trials=1"))
    with closing(sqlite3.connect(tmp_path / "past.db")) as connection:
        connection.execute("UPDATE meshtune_history SET version = ?", (VERSION + 1,))
        connection.commit()
    config = loaded(tmp_path, storage)
    executor = InProcessExecutor(config.trials.backend)

    with pytest.raises(ConfigError, match=rf"storage = 'sqlite:.*holds a history of version {VERSION + 1}"):
        run_study(config, on_progress=lambda _: None, executor=executor)

    assert executor.entered == 0
