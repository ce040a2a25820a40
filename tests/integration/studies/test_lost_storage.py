import os
import re

import pytest

from tests.support.studies.in_process_executor import InProcessExecutor
from tuner.run.endings import StorageLostError
from tuner.run.loop import run_study
from tuner.run.studies import stored_study
from tuner.storage.record import read_records
from tuner.study_file.config import load_study

STUDY = """
name: small
model: llama-7b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
space: {pp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1]}
search: {draws: 10, confidence: 1.0, max_trials: 5}
trial: {backend: simulated}
"""
ENDED_BEFORE = 3
"""Number of trials that have ended when the storage is lost."""


def delete(file):
    """Deletes the file, with what SQLite keeps beside it."""
    for each in file.parent.glob(f"{file.name}*"):
        each.unlink()


def rename(file):
    """Gives the file another name."""
    file.rename(file.with_name("moved"))


def replace(file):
    """Puts an empty file in its place, as a careless copy does."""
    delete(file)
    file.touch()


def cut(file):
    """Cuts the file short."""
    os.truncate(file, 100)


@pytest.fixture
def study(tmp_path):
    """A function that loads the study with a storage in the test's folder."""
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    return lambda storage: load_study(file, storage=storage)


def measured(config):
    """The trials of a stored study: configurations, outcomes and step times."""
    return [(record.params, record.status, record.step_time_s) for record in read_records(stored_study(config))]


def run_until_lost(config, lose):
    """Runs a study whose storage is lost on the way; returns the error."""
    left = [lose]

    def watch(progress):
        if progress.done == ENDED_BEFORE and left:
            left.pop()()

    with pytest.raises(StorageLostError) as caught:
        run_study(config, on_progress=watch, executor=InProcessExecutor(config.trials.backend))
    return caught.value


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
@pytest.mark.parametrize("lose", [delete, rename, replace, cut])
def test_lost_storage_ends_the_run_and_loses_no_trial(study, tmp_path, kind, lose):
    """A file that is deleted, renamed, replaced or cut short ends the run; what was measured is in a new database, with
    which the study goes on to the trials that it would have had.
    """
    whole = study(f"sqlite:///{tmp_path}/whole.db")
    run_study(whole, on_progress=lambda _: None, executor=InProcessExecutor(whole.trials.backend))
    file = tmp_path / "study.store"
    error = run_until_lost(study(f"{kind}:///{file}"), lambda: lose(file))
    saved = study(re.search(r"--storage (\S+)$", error.nearest)[1])

    assert saved.storage.url == f"sqlite:///{tmp_path}/study.rescued.db"
    assert error.rule.endswith(f"what was measured is kept in {tmp_path}/study.rescued.db")
    assert measured(saved)[:ENDED_BEFORE] == measured(whole)[:ENDED_BEFORE]
    run_study(saved, on_progress=lambda _: None, executor=InProcessExecutor(saved.backend))

    continued = measured(saved)
    assert len(continued) == len(measured(whole))
    if (kind, lose) in {("sqlite", delete), ("sqlite", rename)}:  # nothing at all is lost
        assert continued == measured(whole)


def test_earlier_rescued_study_is_not_overwritten(study, tmp_path):
    """A second loss is saved beside the first."""
    (tmp_path / "study.rescued.db").write_text("earlier")
    file = tmp_path / "study.db"

    error = run_until_lost(study(f"sqlite:///{file}"), lambda: delete(file))

    assert error.nearest.endswith(f"{tmp_path}/study.rescued-2.db")
    assert (tmp_path / "study.rescued.db").read_text() == "earlier"


def test_storage_lost_during_a_trial_keeps_its_observation(study, tmp_path):
    """The trial whose end could not be written is among what is saved, and ends when the study goes on."""
    file = tmp_path / "study.db"
    config = study(f"sqlite:///{file}")
    executor = InProcessExecutor(config.trials.backend)
    poll = executor.poll

    def poll_and_lose(timeout_s, /):
        ended = poll(timeout_s)
        if len(executor.seen) == ENDED_BEFORE and file.exists():
            delete(file)
        return ended

    executor.poll = poll_and_lose
    with pytest.raises(StorageLostError):
        run_study(config, on_progress=lambda _: None, executor=executor)
    saved = study(f"sqlite:///{tmp_path}/study.rescued.db")
    rest = InProcessExecutor(saved.backend)
    run_study(saved, on_progress=lambda _: None, executor=rest)

    assert len(executor.seen) == ENDED_BEFORE
    assert len(rest.seen) == 5 - ENDED_BEFORE
    assert [status for _, status, _ in measured(saved)] == ["ok"] * 5
