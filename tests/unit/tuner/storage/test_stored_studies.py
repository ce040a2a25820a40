import optuna

from tuner.storage import opening
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.storage_address import StorageAddress


def test_a_storage_is_opened_once_for_all_its_studies(tmp_path, monkeypatch):
    """Studies are looked up in one opened storage, hand out what is written later, and None is not remembered."""
    file, opened = tmp_path / "study.db", []
    stored = StoredStudies(StorageAddress.of_file(file))
    open_database = opening.open_database
    monkeypatch.setattr(opening, "open_database", lambda address: opened.append(address) or open_database(address))
    assert stored.find("first") is None
    assert not file.exists()

    first = optuna.create_study(study_name="first", storage=f"sqlite:///{file}")

    found = stored.find("first")
    assert stored.find("second") is None
    optuna.create_study(study_name="second", storage=f"sqlite:///{file}")
    assert stored.find("second").study_name == "second"
    assert stored.look("first") is found
    assert opened == [stored.address]
    first.set_user_attr("later", 1)
    first.enqueue_trial({})
    assert found.user_attrs == {"later": 1}
    assert len(found.get_trials()) == 1


def test_looking_where_there_is_nothing_opens_nothing(tmp_path):
    """Where there is no file, `look` answers at once and makes none."""
    stored = StoredStudies(StorageAddress.of_file(tmp_path / "study.db"))

    assert stored.look("any") is None
    assert stored.opened is None
    assert not list(tmp_path.iterdir())
