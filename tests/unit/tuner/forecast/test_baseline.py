import numpy as np
import pytest

from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.step.memory.peak import estimate_memory
from hardware.cluster_file import find_cluster
from tests.support.studies.in_process_executor import run_here as run
from tuner.answers.best import best_known
from tuner.forecast.baseline import baseline_position
from tuner.run.studies import prepared_of
from tuner.space.enumeration import SpaceOptions, enumerate_space, setting_for
from tuner.storage.opening import find_study
from tuner.storage.record import BASELINE, best_record, read_records
from tuner.study_file.config import load_study

DEFAULTS = {"recompute": "none", "zero_stage": 1, "sequence_parallel": True, "expert_tp": 0, "dp_shard": 0}


def grid_of(model, cluster="dgx-h100", hosts=1, *, space=(), **job):
    """The candidates of a job, and which of them fit."""
    keys = {"sequence_length": 4096, "global_batch_size": 64} | job
    setting = setting_for(
        TrainingJob(model=find_model(model), **keys),
        find_cluster(cluster, hosts),
        find_runtime("megatron-core"),
        options := SpaceOptions(allowed=space, opened=tuple(name for name, _ in space)),
    )
    grid, _ = enumerate_space(setting, options)
    memory = estimate_memory(setting, grid)
    return grid, memory.fits(0.08)


def baseline(grid, fits, devices_per_domain=8):
    """The baseline's configuration."""
    position = baseline_position(grid, fits, devices_per_domain=devices_per_domain, defaults=DEFAULTS)
    return None if position is None else grid.config(position)


@pytest.mark.parametrize(
    ("model", "hosts", "degrees"),
    [
        ("gpt-13b", 8, {"tp": 2, "pp": 1}),
        ("llama3-8b", 1, {"tp": 2, "pp": 1}),
        ("llama3-70b", 8, {"tp": 8, "pp": 2}),
        ("llama3-405b", 64, {"tp": 8}),
    ],
)
def test_what_an_engineer_would_write(model, hosts, degrees):
    """A model gets as little tp as fits; a larger one fills a host with it before there is a pipeline."""
    found = baseline(*grid_of(model, hosts=hosts, global_batch_size=1024))

    assert {name: getattr(found, name) for name in degrees} == degrees
    assert (found.cp, found.up, found.vpp, found.ep, found.mbs) == (1, 1, 1, 1, 1)
    assert found.num_devices == 8 * hosts


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "opened", [(), (("recompute", (0, 2)), ("sequence_parallel", (0, 1)))], ids=["plain", "opened"]
)
def test_the_rule_word_by_word(model, opened):
    """No candidate comes before the baseline in the order that the rule gives, whatever is opened."""
    grid, fits = grid_of(model, hosts=4, space=opened)

    def key(position):
        one = grid.config(position)
        names = [name for name in grid.opened if name != "sequence_parallel" or one.tp > 1]
        changed = sum(getattr(one, name) != DEFAULTS[name] for name in names)
        return (
            not fits[position],
            one.cp * one.up,
            changed,
            one.tp > 8,
            one.tp * one.pp,
            one.pp,
            one.vpp,
            one.ep,
            one.mbs,
        )

    found = baseline_position(grid, fits, devices_per_domain=8, defaults=DEFAULTS)

    assert key(found) == min(map(key, range(len(grid))))


def test_a_dimension_is_changed_only_where_nothing_else_fits():
    """Recomputation is what the study has by default, until only the other way fits."""
    configs = [ParallelConfig(tp=8, recompute="none"), ParallelConfig(dp=8, recompute="full")]
    grid = ConfigGrid.from_configs(configs, ("recompute",))

    assert baseline(grid, np.array([True, True])).recompute == "none"
    assert baseline(grid, np.array([False, True])).recompute == "full"
    assert baseline(grid, np.array([False, False])) is None
    assert RECOMPUTE_MODES[0] == "none"


STUDY = """
name: without-current
model: llama-13b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
space: {pp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1]}
search: {draws: 10, confidence: 1.0, max_trials: 2, baseline: true}
"""


@pytest.fixture
def study(tmp_path):
    """A function that loads a study without a current configuration, with changes."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY, encoding="utf-8")
    return lambda *overrides: load_study(file, overrides=overrides, storage=f"sqlite:///{tmp_path / 'study.db'}")


def test_the_baseline_is_the_first_trial_and_what_the_best_is_compared_with(study):
    """It runs first, is kept by the study, and the measured gain is that of measured step times."""
    config = study()

    result, _ = run(config)

    first = next(record for record in result.records if record.number == 0)
    assert result.reference.role == "baseline"
    assert first.params == dict(result.reference.values)
    best = best_known(prepared_of(config), find_study(config.storage, config.name))
    assert best.compared.reference == result.reference
    assert best.compared.measured_gain == pytest.approx(first.step_time_s / best_record(result.records).step_time_s)


def test_the_baseline_of_a_study_stays_the_same(study):
    """What a study has been compared with is kept, also where the search is told otherwise later."""
    run(study())
    before = find_study(study().storage, "without-current").user_attrs[BASELINE]

    run(study("search.max_trials=3", "search.baseline=false"))

    assert find_study(study().storage, "without-current").user_attrs[BASELINE] == before
    without = study("search.baseline=false")
    assert (
        best_known(prepared_of(without), find_study(without.storage, without.name)).compared.reference.role
        == "baseline"
    )


def test_a_study_that_began_without_a_baseline_gets_none(study):
    """Later trials of an older study are not taken for its baseline."""
    run(study("search.baseline=false", "search.max_trials=1"))
    result, _ = run(study())

    assert result.reference is None
    assert len(read_records(find_study(study().storage, "without-current"))) == 2


def test_an_expert_is_the_reference(study):
    """Where the study names what is in use today, that runs first, and no baseline is tried for its own sake."""
    result, _ = run(study("current={tp: 8}"))

    assert result.reference.role == "current"
    assert result.records[0].params["tp"] == 8


@pytest.mark.parametrize(
    ("trial", "more", "expected"),
    [
        ("{backend: simulated}", (), False),
        ("{backend: command, command: [train]}", (), True),
        ("{backend: command, command: [train]}", ("search.baseline=false",), False),
        ("{backend: simulated}", ("search.baseline=true",), True),
    ],
)
def test_where_the_baseline_is_the_default(tmp_path, trial, more, expected):
    """A baseline costs a trial that tells a user most where trials are real; elsewhere it is asked for."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.replace(", baseline: true", "") + f"trial: {trial}\n", encoding="utf-8")

    assert load_study(file, overrides=more).search.baseline is expected
