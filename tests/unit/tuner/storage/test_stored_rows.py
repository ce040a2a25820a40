"""The rows of a study as they are read past Meshtune and Optuna, by which disturbed studies are judged."""

import pytest

from tests.chaos.stored import EMPTY, read_stored
from tests.chaos.studies import DIMENSIONS, PUBLISHED
from tests.support.studies.in_process_executor import run_here
from tuner.storage.opening import find_study
from tuner.storage.record import read_records
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress


def test_rows_are_read_as_they_are(database):
    """What is read past Meshtune says of every trial what Meshtune says, on every kind of storage."""
    overrides = ["search.confidence=1.0", "search.draws=10", "search.max_trials=3", "search.prune=false"]
    config = load_study(PUBLISHED, overrides=overrides, storage=database)
    assert read_stored(database) == EMPTY
    run_here(config)

    found = read_stored(database)

    records = read_records(find_study(StorageAddress.parse(database), config.name))
    assert found.kept == (0, 1, 2)
    assert [(t.number, t.status, t.value) for t in found.trials] == [
        (record.number, record.status, record.step_time_s) for record in records
    ]
    assert [t.ended_s for t in found.trials] == pytest.approx([r.ended_at.timestamp() for r in records])
    for trial, record in zip(found.trials, records, strict=True):
        told = dict(pair.split("=") for pair in trial.configuration.split())
        assert {name: str(value) for name, value in record.params.items() if name in DIMENSIONS}.items() <= told.items()
