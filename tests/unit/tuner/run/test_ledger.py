"""Ledger of a driver: what it writes of a study, and what it remembers of that."""

import pytest
from optuna.trial import TrialState

from trials.backend import Observation, Status
from tuner.run.adoption import adopt
from tuner.run.driver import DRIVER, claim
from tuner.run.endings import TakenOverError
from tuner.run.ledger import Ledger
from tuner.run.studies import make_sampler, open_study, prepared_of
from tuner.run.tasks import Task, Tasks
from tuner.search.observations import OBSERVATION
from tuner.search.parameters import params_of
from tuner.search.stopping import StopReason
from tuner.storage.history import make_tables, read_past
from tuner.storage.opening import find_study, open_store
from tuner.storage.record import PREDICTION, read_records
from tuner.study_file.config import load_study

STUDY = """
name: small
model: llama-7b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
space: {pp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1]}
search: {draws: 10}
trial: {backend: simulated}
"""
NOW_S = 1e9
OK = Observation(status=Status.OK, step_times_s=(1.0, 1.5, 2.0), origin="synthetic")


@pytest.fixture
def config(tmp_path):
    """A small study in a database of its own."""
    (tmp_path / "study.yaml").write_text(STUDY, encoding="utf-8")
    return load_study(tmp_path / "study.yaml", storage=f"sqlite:///{tmp_path / 'study.db'}")


@pytest.fixture
def opened(config):
    """A function that opens the ledger of the study, each time as its next driver would."""

    def open_ledger():
        sampler = make_sampler(config)
        store = open_store(config.storage)
        make_tables(store)
        study = open_study(prepared_of(config), sampler, store.storage)
        held = claim(store, config.name, now_s=NOW_S)
        return Ledger(Tasks(prepared=prepared_of(config), sampler=sampler), held, study)

    return open_ledger


def begun(ledger, position=0):
    """The number of a new trial of a candidate."""
    params = params_of(ledger.tasks.sampler.choices.values(position))
    return ledger.create(Task(position=position), params, {})[0]


def test_a_trial_is_told_to_everyone_who_reads_it(opened, config, tmp_path):
    """Its prediction and result are in the storage, in memory, and in what later studies read."""
    ledger = opened()
    number = begun(ledger)
    assert PREDICTION in find_study(config.storage, config.name).trials[number].user_attrs
    ledger.record(number, OK)

    (stored,) = read_records(find_study(config.storage, config.name))
    (remembered,) = ledger.trials.records
    assert (stored.number, stored.step_time_s, stored.params) == (number, 1.5, remembered.params)
    assert remembered.step_time_s == ledger.trials.best.step_time_s == 1.5
    assert len(read_past([config.storage], base_dir=tmp_path).runs) == 1
    assert ledger.live == {}


def test_without_the_claim_nothing_is_written(opened, config):
    """A driver whose study was taken over neither records nor gives up; its trial is left as it was."""
    ledger = opened()
    number = begun(ledger)
    study = find_study(config.storage, config.name)
    study.set_user_attr(DRIVER, study.user_attrs[DRIVER] | {"host": "elsewhere"})
    with pytest.raises(TakenOverError, match="elsewhere"):
        ledger.record(number, OK)
    ledger.give_up(StopReason.TRIALS, 3.0)

    trial = find_study(config.storage, config.name).trials[number]
    assert trial.state is TrialState.RUNNING
    assert OBSERVATION not in trial.user_attrs


def test_the_next_driver_runs_what_was_given_up(opened, config):
    """Trials in flight wait, and run again under their numbers; one that was told does not."""
    ledger = opened()
    ledger.record(begun(ledger, 0), OK)
    number = begun(ledger, 1)
    ledger.give_up(StopReason.INTERRUPTED, 3.0)
    assert [trial.state for trial in find_study(config.storage, config.name).trials] == [
        TrialState.COMPLETE,
        TrialState.WAITING,
    ]
    following = opened()

    assert adopt(following) == [(number, following.tasks.sampler.choices.config(1), None)]
    assert following.live == {number: Task(position=1)}
    assert [number for number, _ in following.ended] == [0]


def test_an_observation_that_was_not_told_is_told(opened, monkeypatch):
    """Nothing runs again if the driver died between a trial's observation and its end."""

    def die(*_):
        raise RuntimeError("killed")

    ledger = opened()
    number = begun(ledger)
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "_end", die)
        with pytest.raises(RuntimeError, match="killed"):
            ledger.record(number, OK)
    following = opened()

    assert adopt(following) == []
    assert following.trials.best.step_time_s == 1.5
