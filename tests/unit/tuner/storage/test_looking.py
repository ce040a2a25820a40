"""Databases that a colleague may read and not write."""

import shutil
import sqlite3
import threading
from contextlib import closing

import optuna
import pytest
from sqlalchemy import text

from hardware.io.errors import ConfigError
from hardware.io.looking import look_at
from tests.support.programs.rights import reachable_folder, read_only, without_roots_rights
from tuner.storage.opening import find_study, open_store, open_to_look
from tuner.study_file.storage_address import StorageAddress

ENDS = ("-wal", "-shm", "-journal")


@pytest.fixture
def folder():
    """A folder to which everybody can go."""
    with reachable_folder() as made:
        yield made


def ahead(path):
    """A connection to a new database in write-ahead logging, with one row of one table."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE kept (value)")
    connection.execute("INSERT INTO kept VALUES (7)")
    connection.commit()
    return connection


def of_a_living_writer(path):
    """A database that a process has open."""
    return ahead(path)


def closed(path):
    """A database in write-ahead logging that nobody has open: its only file."""
    ahead(path).close()


def of_a_dead_writer(path):
    """A database whose writer was killed: log and index are left."""
    with closing(ahead(path.with_name("other"))):
        for end in ("", "-wal", "-shm"):
            shutil.copyfile(path.with_name(f"other{end}"), path.with_name(path.name + end))
    path.with_name("other").unlink()


def without_an_index(path):
    """A database and its log, as a program that copies files leaves them."""
    of_a_dead_writer(path)
    path.with_name(f"{path.name}-shm").unlink()


def with_a_hot_journal(path):
    """A database whose writer was killed in the middle of a transaction that had begun to write."""
    with closing(ahead(path.with_name("other"))) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO kept VALUES (?)", [("more" * 50,)] * 5_000)
        for end in ("", "-journal"):
            shutil.copyfile(path.with_name(f"other{end}"), path.with_name(path.name + end))
    path.with_name("other").unlink()


@pytest.mark.parametrize(
    "state",
    [of_a_living_writer, closed, of_a_dead_writer, without_an_index, with_a_hot_journal],
    ids=lambda it: it.__name__,
)
def test_a_database_is_read_as_it_was_last_committed(folder, state):
    """In whatever state its writer has left a database, who may only read it sees all commits, no part of another,
    changes no file, and cannot write.
    """
    path = folder / "study.db"
    writer = state(path)
    before = {each.name: each.read_bytes() for each in folder.iterdir() if not each.name.endswith("-shm")}

    with read_only(folder), without_roots_rights(), closing(look_at(path)) as seen:
        assert seen.execute("SELECT value FROM kept").fetchall() == [(7,)]
        assert seen.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            seen.execute("INSERT INTO kept VALUES (8)")

    assert {each.name: each.read_bytes() for each in folder.iterdir() if not each.name.endswith("-shm")} == before
    if writer is not None:
        writer.close()


def test_a_reader_of_a_file_leaves_none_in_a_folder_that_it_may_write(folder):
    """Files of a colleague's beside a database, which its owner could not write, do not appear."""
    path = folder / "study.db"
    closed(path)
    folder.chmod(0o777)
    path.chmod(0o444)

    with without_roots_rights(), closing(look_at(path)) as seen:
        assert seen.execute("SELECT count(*) FROM kept").fetchone() == (1,)

    assert [each.name for each in folder.iterdir()] == ["study.db"]


def test_a_run_that_begins_is_seen(folder):
    """Who opened a study before its next run began sees the trials of that run, in this thread and in others."""
    url = f"sqlite:///{folder / 'study.db'}"
    store = open_store(StorageAddress.parse(url))
    study = optuna.create_study(study_name="begun", storage=store.storage)
    store.close()
    seen = []

    def look():
        seen.append(len(optuna.load_study(study_name="begun", storage=storage).get_trials()))

    with read_only(folder), without_roots_rights():
        storage = open_to_look(StorageAddress.parse(url))
        look()
    study.tell(study.ask(), 1.0)
    with read_only(folder), without_roots_rights():
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
    store.close()
    study = None
    with read_only(folder), without_roots_rights():
        look()

    assert seen == [0, 1, 1, 1]
    with storage.engine.connect() as connection, pytest.raises(Exception, match="readonly"):
        connection.execute(text("DELETE FROM studies"))
    storage.remove_session()
    storage.engine.dispose()


def test_a_database_of_other_tables_has_no_study(folder):
    """A database without Optuna's tables holds no study, for whoever may not make them either."""
    closed(folder / "other.db")

    with read_only(folder), without_roots_rights():
        assert find_study(StorageAddress.parse(f"sqlite:///{folder / 'other.db'}"), "none") is None


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_rights_are_told_as_rights(folder, kind):
    """A file that may not be read, or not be written, is told by the right that is missing and what works without."""
    file = folder / "study"
    url = f"{kind}:///{file}"
    open_store(StorageAddress.parse(url)).close()

    refused = pytest.raises(ConfigError, match=r"you may not write it.*meshtune status")
    with read_only(folder), without_roots_rights(), refused:
        open_store(StorageAddress.parse(url))
    file.chmod(0o000)
    with without_roots_rights(), pytest.raises(ConfigError, match=r"you may not read it.*ask its owner"):
        find_study(StorageAddress.parse(url), "none")


def test_a_full_folder_for_copies_is_named(folder, monkeypatch):
    """Where a copy is needed and there is no room for it, the message names TMPDIR, its path and the room in it."""
    closed(folder / "study.db")
    with read_only(folder), without_roots_rights():
        monkeypatch.setenv("TMPDIR", str(folder))
        with pytest.raises(ConfigError, match=rf"TMPDIR = '{folder}': has no room for a copy .*cannot be written to"):
            look_at(folder / "study.db")
