import json
import math
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from costmodels.blocks.operator import OpKind
from tests.support.studies.commits import kept_at_each_commit
from tests.support.studies.in_process_executor import run_here as run
from tests.support.studies.stepping_executor import SteppingExecutor
from trials.backend import Observation, Status
from tuner.answers.best import best_known
from tuner.cli.main import app
from tuner.report.data import collect
from tuner.report.page import render_report
from tuner.run.loop import run_study
from tuner.run.studies import prepared_of, stored_study
from tuner.search.prior import learn
from tuner.search.proxy.proxy_trials import PROXY, Proxy
from tuner.storage.history import read_past
from tuner.storage.record import num_failed, num_proxies
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

STUDY = """
name: small
model: llama-7b
cluster: {name: dgx-a100, hosts: 4}
job: {sequence_length: 4096, global_batch_size: 128}
space: {cp: [1, 2], up: [1], vpp: [1], mbs: [1, 2]}
search: {draws: 30, max_trials: 9}
trial: {backend: simulated, proxy: {hosts: 1, full_trials: 2}}
"""


@pytest.fixture
def study(tmp_path):
    """A function that loads the small study, each time as its own command would."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    return lambda *overrides, name="study": load_study(
        file, overrides=overrides, storage=f"sqlite:///{tmp_path / f'{name}.db'}"
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The small study after its run, one trial at a time: its configuration, its result, and its executor."""
    folder = tmp_path_factory.mktemp("finished")
    file = folder / "study.yaml"
    file.write_text(STUDY)
    config = load_study(file, storage=f"sqlite:///{folder / 'study.db'}")
    return config, *run(config)


def sequence(records):
    """What a search did, in its order."""
    return [(record.params, record.proxy, record.status, record.step_time_s, record.p_star) for record in records]


class Scripted:
    """A world in which trial n ends as the script says; a smaller job is as fast as the full one."""

    def __init__(self, script):
        self.script = script

    def reduced(self, _):
        """The same world."""
        return self

    def measure(self, _, *, trial_number):
        """As the executor calls it."""
        status = self.script[trial_number] if trial_number < len(self.script) else Status.OK
        times = (1.0, 1.0) if status is Status.OK else ()
        return Observation(status=status, step_times_s=times, origin="synthetic")


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3])
def test_a_study_with_proxies_ends_with_trials_at_full_size(study, finished, slots):
    """Smaller jobs on one host come first; the last two trials, and no other, occupy all four hosts, and the best is
    one of them.
    """
    _, result, executor = finished if slots == 1 else (None, *run(study(), slots=slots))

    sizes = [executor.reductions[number].hosts if number in executor.reductions else 4 for number, _ in executor.seen]
    devices = [measured.num_devices for _, measured in executor.seen]
    assert sizes == sorted(sizes)
    assert sizes.count(4) == 2
    assert devices == [8 * hosts for hosts in sizes]
    assert [record.is_proxy for record in result.records] == [hosts == 1 for hosts in sizes]
    assert result.best is not None
    assert not result.best.is_proxy
    assert result.extrapolated is None
    assert num_proxies(result.records) == len(result.records) - 2
    assert num_failed(result.records) == 0
    assert len({str(record.proxy) for record in result.records if record.is_proxy}) == sizes.count(1)


@pytest.mark.slow
def test_what_proxies_teach_reaches_full_size(study):
    """In three worlds that the cost model is very wrong about, the one full-size trial after the proxies is within 3%
    of the fastest that fits in the mean; the one that is tried without them is more than 10% slower.
    """
    slowdowns = {"proxies": [], "none": []}
    for seed in range(3):
        world = (f"trial.seed={seed}", f"search.seed={seed}", "trial.operator_error=1.0")
        for name, further in (
            ("proxies", ("trial.proxy.full_trials=1",)),
            ("none", ("trial.proxy=null", "search.max_trials=1")),
        ):
            config = study(*world, *further, name=f"{name}{seed}")
            result, _ = run(config)
            grid = config.problem.space().grid
            hidden_s = config.trials.backend.hidden_step(grid).step_time_s
            memory = config.trials.backend.hidden_memory(grid)
            fastest_s = hidden_s[memory.needed_bytes <= memory.capacity_bytes].min()
            best_s = result.best.step_time_s if result.best else math.inf
            slowdowns[name].append(best_s / fastest_s - 1)

    mean = {name: sum(values) / len(values) for name, values in slowdowns.items()}
    assert mean["proxies"] < 0.03, mean
    assert mean["none"] > 0.1, mean


@pytest.mark.slow
def test_a_proxys_step_is_nobodys_best_value(finished):
    """For Optuna a proxy that ended well is pruned and has no value; only trials at full size are complete."""
    config, result, _ = finished

    trials = stored_study(config).get_trials()
    for trial in trials:
        assert (trial.state == TrialState.PRUNED) == (PROXY in trial.user_attrs)
    assert stored_study(config).best_value == result.best.step_time_s
    stored = trials[0].user_attrs[PROXY]
    assert (stored["hosts"], stored["devices"]) == (1, 8)
    assert Proxy.from_json(stored) == result.records[0].proxy


@pytest.mark.slow
def test_every_proxy_is_kept_as_what_it_ran(study):
    """Later studies read a proxy's run under its own job, cluster and configuration."""
    config = study("search.max_trials=3", "search.draws=10", "trial.proxy.full_trials=1")
    result, _ = run(config)

    past = read_past([config.storage], base_dir=Path())

    assert [record.is_proxy for record in result.records] == [True, True, False]
    kept = {(run.cluster.num_hosts, run.job.model.num_layers, str(run.config)) for run in past.runs}
    expected = {
        (record.proxy.reduction.hosts, record.proxy.reduction.layers, str(record.proxy.config))
        if record.proxy
        else (4, 32, str(config.problem.config_of(record.params)))
        for record in result.records
    }
    assert kept == expected


@pytest.mark.slow
def test_a_later_study_learns_from_proxies(finished):
    """In a history every proxy is an earlier run of its own job, and its operator times count."""
    config, result, _ = finished

    learned = learn(read_past([config.storage], base_dir=Path()), config.problem.setting)

    assert sum(len(group.step_time_s) for group in learned.groups) == len(result.records)
    assert {errors.kind for errors in learned.operators} >= {OpKind.MATMUL, OpKind.ATTENTION}


@pytest.mark.slow
def test_killed_after_any_write_it_continues(study, tmp_path):
    """Wherever a driver dies between two writes (every sixth place is looked at), the next one runs the same smaller
    jobs, then the same candidates.
    """
    overrides = ("search.max_trials=3", "trial.proxy.full_trials=1", "search.draws=10")
    live, moments = tmp_path / "live.db", []
    with kept_at_each_commit(live, moments):
        undisturbed, _ = run(study(*overrides, name="live"))
    assert [record.is_proxy for record in undisturbed.records] == [True, True, False]

    for moment in moments[::6]:
        result, _ = run(study(*overrides, name=moment.stem))

        assert sequence(result.records) == sequence(undisturbed.records), moment.name


@pytest.mark.slow
def test_without_a_full_trial_the_answer_is_extrapolated(study, capsys):
    """While only proxies have run, each command that names a best says from how many trials on how many devices it was
    extrapolated, and none calls it measured.
    """
    config = study("trial.proxy.full_trials=0", "search.max_trials=4")

    result, _ = run(config)

    found = best_known(prepared_of(config), StoredStudies(config.storage).find(config.name))
    assert result.best is None
    assert result.extrapolated.in_words == "extrapolated from 4 trials on 8 devices"
    assert (found.source, found.extrapolated) == ("predicted", result.extrapolated)
    assert found.config == config.problem.config_of(result.extrapolated.config)
    file = [str(config.file), "--storage", config.storage.url]
    assert told(capsys, "best", *file, "--json")["extrapolated"] is True
    status = told(capsys, "status", *file, "--json")
    assert (status["extrapolated"], status["proxies"], status["failed"]) == (True, 4, 0)
    for command in ("best", "status"):
        app([command, *file], standalone_mode=False)
        assert "extrapolated from 4 trials on 8 devices" in capsys.readouterr().out
    assert "extrapolated from 4 trials on 8 devices" in render_report(collect(config))


def told(capsys, *arguments):
    """The JSON that a command prints."""
    app(arguments, standalone_mode=False)
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_with_a_full_trial_it_is_measured(study, capsys):
    """Once a candidate has completed at full size, the best is one of those, and is not called extrapolated."""
    config = study("search.max_trials=4", "trial.proxy.full_trials=1")
    result, _ = run(config)

    found = told(capsys, "best", str(config.file), "--storage", config.storage.url, "--json")

    assert found["extrapolated"] is False
    assert found["source"] == "synthetic"
    assert found["step_time_s"] == result.best.step_time_s
    assert "proxy: " in render_report(collect(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "may_run_at_full_size"), [(Status.OUT_OF_MEMORY, True), (Status.CRASHED, False), (Status.INCIDENT, True)]
)
def test_what_a_proxys_failure_means_for_its_candidate(study, status, may_run_at_full_size):
    """A smaller job that runs out of memory says nothing final of its candidate; one that crashes speaks against it."""
    config = study("search.max_trials=2", "trial.proxy.full_trials=1")

    result, _ = run(config, Scripted([status]))

    first, second = result.records
    assert (first.status, first.is_proxy, second.is_proxy) == (status, True, False)
    assert num_failed(result.records) == 1
    assert may_run_at_full_size or second.params != first.params


@pytest.mark.slow
def test_the_steps_of_a_proxy_stop_no_trial(study):
    """Step times of smaller jobs are not compared with those at full size: none is stopped, and none is reported."""
    config = study()
    executor = SteppingExecutor(config.trials.backend, 1)

    result = run_study(config, on_progress=lambda _: None, executor=executor)

    assert all(record.status is not Status.PRUNED for record in result.records if record.is_proxy)
    for trial in stored_study(config).get_trials():
        assert not (PROXY in trial.user_attrs and trial.intermediate_values)


@pytest.mark.slow
def test_proxies_may_be_left_out_later(study):
    """A study that was begun with proxies goes on without them, or with others, and keeps what they told."""
    first, _ = run(study("search.max_trials=2", "search.draws=10", "trial.proxy.full_trials=1"))

    result, _ = run(study("search.max_trials=3", "search.draws=10", "trial.proxy=null"))

    assert sequence(result.records[:2]) == sequence(first.records)
    assert [record.is_proxy for record in result.records] == [True, False, False]


@pytest.mark.slow
def test_proxies_run_on_ray(study):
    """On Ray a worker measures smaller jobs and the full one with the same backend."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    config = study("search.max_trials=3", "trial.proxy.full_trials=1", "search.parallel_trials=1")

    result = run_study(config, on_progress=lambda _: None)

    again, _ = run(study("search.max_trials=3", "trial.proxy.full_trials=1", name="again"))
    assert sequence(result.records) == sequence(again.records)
