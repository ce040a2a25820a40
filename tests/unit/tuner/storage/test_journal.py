import json
import os

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from hardware.io.errors import ConfigError
from tests.support.programs.rights import reachable_folder, without_roots_rights
from tuner.storage.opening import find_study, open_store, storage_errors
from tuner.storage.store import Condition
from tuner.study_file.storage_address import StorageAddress


@pytest.fixture
def path(tmp_path):
    """A journal with a study in it whose only trial has ended."""
    file = tmp_path / "study.journal"
    study = optuna.create_study(
        study_name="kept", storage=open_store(StorageAddress.parse(f"journal:///{file}")).storage
    )
    study.tell(study.ask(), 1.0)
    return file


def plain(path):
    """The study as Optuna's own backend reads it."""
    return optuna.load_study(study_name="kept", storage=JournalStorage(JournalFileBackend(str(path))))


def test_a_torn_end_is_mended_wherever_it_was_torn(path):
    """Whatever part of its last entry a writer left, what was written before is read, the next entry is not lost, and
    Optuna's own backend can read the file.
    """
    whole = path.read_bytes()
    *_, last = whole.splitlines(keepends=True)

    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        assert find_study(StorageAddress.parse(f"journal:///{path}"), "kept").user_attrs == {}
        find_study(StorageAddress.parse(f"journal:///{path}"), "kept").set_user_attr("length", length)

        for study in (find_study(StorageAddress.parse(f"journal:///{path}"), "kept"), plain(path)):
            assert study.user_attrs == {"length": length}
            assert [trial.state for trial in study.get_trials()] == [TrialState.COMPLETE]
        path.write_bytes(whole)


def test_zeros_behind_the_last_entry_are_mended(path):
    """An end of zeros, which a machine's death can leave, is mended as a torn one is."""
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 500)

    find_study(StorageAddress.parse(f"journal:///{path}"), "kept").set_user_attr("after", 1)

    assert plain(path).user_attrs == {"after": 1}
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    "content",
    [b"a text of one line", b"a line\n", b'{"a": 1}', b"two lines\nof text", b"\x00\x01\xff", b'{"op": 1}', b"{}\n"],
    ids=["text", "line", "JSON", "lines", "bytes", "other_key", "entry"],
)
def test_another_kind_of_file_is_left_alone(tmp_path, content):
    """A file that is no journal is refused as a storage, and not a byte of it changes."""
    file = tmp_path / "precious"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match="cannot be used"), storage_errors(StorageAddress.parse(f"journal:///{file}")):
        optuna.create_study(study_name="kept", storage=open_store(StorageAddress.parse(f"journal:///{file}")).storage)

    assert file.read_bytes() == content


def test_order_decides_and_not_the_lock(path):
    """Of two conditional entries that were both appended, as when a lock was broken, the first takes effect for
    everybody who reads the journal.
    """
    store = open_store(StorageAddress.parse(f"journal:///{path}"))
    assert store.replace_attribute(Condition(study_id=0, key="owner", text=None), "first")
    entry = json.loads(path.read_text().splitlines()[-1])
    late = entry | {"user_attr": {"owner": "second"}, "batch": "another"}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(late) + "\n")

    assert store.read_attribute(0, "owner") == ("first", '"first"')
    assert find_study(StorageAddress.parse(f"journal:///{path}"), "kept").user_attrs == {"owner": "first"}


def test_a_lock_that_was_taken_away_loses_no_entry(path, monkeypatch):
    """A writer that was taken for dead, and whose lock somebody has removed, writes its entry without an error."""
    fsync, lock = os.fsync, path.with_name(f"{path.name}.lock")

    def flush(file):
        lock.unlink(missing_ok=True)
        fsync(file)

    study = find_study(StorageAddress.parse(f"journal:///{path}"), "kept")
    monkeypatch.setattr(os, "fsync", flush)
    study.set_user_attr("slow", 1)
    monkeypatch.undo()

    assert plain(path).user_attrs == {"slow": 1}


def test_a_broken_journal_is_refused_in_one_message(path):
    """A line in the middle that is no entry, a folder that is missing, and a file that may not be written are told."""
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "these are my notes", *lines[1:]]) + "\n")

    with pytest.raises(ConfigError, match=r"line 2 of .* is no entry of a journal"):
        find_study(StorageAddress.parse(f"journal:///{path}"), "kept")
    with pytest.raises(ConfigError, match=r"storage = 'journal:.*missing.*No such file or directory"):
        open_store(StorageAddress.parse(f"journal:///{path.parent}/missing/study.journal"))


def test_a_last_line_that_is_no_entry_is_refused_before_anything_is_written(path):
    """A complete line of garbage at the end is damage, and no torn end that a writer may mend or append to."""
    path.write_bytes(path.read_bytes() + b'{"op_code":2,"wor\0\0\0\n')
    before = path.read_bytes()

    for opened in (lambda address: find_study(address, "kept"), open_store):
        with pytest.raises(ConfigError, match=r"line \d+ of .* is no entry of a journal"):
            opened(StorageAddress.parse(f"journal:///{path}"))
    assert path.read_bytes() == before


def test_an_unwritable_journal_is_refused():
    """A journal that may be read and not written is refused before any trial is run."""
    with reachable_folder() as folder:
        file = folder / "study.journal"
        open_store(StorageAddress.parse(f"journal:///{file}"))
        file.chmod(0o444)

        with without_roots_rights(), pytest.raises(ConfigError, match="you may not write it"):
            open_store(StorageAddress.parse(f"journal:///{file}"))


def test_a_full_disk_is_one_message(path, monkeypatch):
    """An entry that the disk has no room for is told in one message, and what it left is mended by the next one."""

    def flush(file):
        os.truncate(file, os.fstat(file).st_size - 20)
        raise OSError(28, "No space left on device")

    study = find_study(StorageAddress.parse(f"journal:///{path}"), "kept")
    monkeypatch.setattr(os, "fsync", flush)
    with (
        pytest.raises(ConfigError, match="No space left on device"),
        storage_errors(StorageAddress.parse(f"journal:///{path}")),
    ):
        study.set_user_attr("lost", 1)
    monkeypatch.undo()
    study.set_user_attr("kept", 2)

    assert (
        find_study(StorageAddress.parse(f"journal:///{path}"), "kept").user_attrs
        == plain(path).user_attrs
        == {"kept": 2}
    )
