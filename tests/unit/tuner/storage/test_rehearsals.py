"""Answers of rehearsals in storages of every kind."""

import pytest
from sqlalchemy import update

from tuner.storage.history import make_tables
from tuner.storage.history.tables import REHEARSALS
from tuner.storage.opening import open_store
from tuner.storage.rehearsals import keep_rehearsal, kept_rehearsals, read_rehearsals
from tuner.study_file.storage_address import StorageAddress

FIRST, SECOND = {"pp": 1, "tp": 8}, {"pp": 2, "tp": 4}


@pytest.fixture(params=["sqlite", "journal"])
def address(request, tmp_path):
    """Address of a storage that does not exist yet."""
    return StorageAddress.parse(f"{request.param}:///{tmp_path / 'study'}")


@pytest.fixture
def store(address):
    """That storage, with its tables."""
    store = open_store(address)
    make_tables(store)
    yield store
    store.close()


def answers(rows):
    """The configurations and verdicts of rows."""
    return {(row.config["pp"], row.answer["verdict"]) for row in rows}


def test_the_latest_answer_of_a_candidate_is_kept(address, store):
    """Each candidate has one answer, whatever the order of its dimensions; other studies have others."""
    keep_rehearsal(store, "mine", FIRST, {"verdict": "unknown"})
    keep_rehearsal(store, "mine", SECOND, {"verdict": "refused"})
    keep_rehearsal(store, "mine", dict(reversed(FIRST.items())), {"verdict": "accepted"})
    keep_rehearsal(store, "other", FIRST, {"verdict": "refused"})

    expected = {(1, "accepted"), (2, "refused")}
    assert answers(kept_rehearsals(store, "mine")) == answers(read_rehearsals(address, "mine")) == expected


def test_looking_creates_nothing(address):
    """Without a storage there are no answers, and no storage afterwards."""
    assert read_rehearsals(address, "mine") == []
    assert not address.file.exists()


def test_a_storage_of_an_earlier_version_gets_the_table(tmp_path):
    """One without the table has no answers; a run adds the table, and the rest stays as it was."""
    address = StorageAddress.parse(f"sqlite:///{tmp_path / 'study'}")
    store = open_store(address)
    make_tables(store)
    with store.engine.begin() as connection:
        REHEARSALS.drop(connection)
    assert read_rehearsals(address, "mine") == []

    make_tables(store)
    keep_rehearsal(store, "mine", FIRST, {"verdict": "accepted"})

    assert answers(read_rehearsals(address, "mine")) == {(1, "accepted")}
    store.close()


def test_a_row_that_no_version_wrote_is_left_out(tmp_path):
    """What is no JSON object counts as no answer, and the others are read."""
    address = StorageAddress.parse(f"sqlite:///{tmp_path / 'study'}")
    store = open_store(address)
    make_tables(store)
    keep_rehearsal(store, "mine", FIRST, {"verdict": "accepted"})
    keep_rehearsal(store, "mine", SECOND, {"verdict": "accepted"})
    with store.engine.begin() as connection:
        connection.execute(update(REHEARSALS).where(REHEARSALS.c.config.like("%2%")).values(answer="oops"))

    assert answers(read_rehearsals(address, "mine")) == {(1, "accepted")}
    store.close()
