from pathlib import Path

import optuna
import pytest

from tests.support.studies.command_line import write_replay
from tuner.storage.opening import open_store
from tuner.study_file.config import load_study
from tuner.study_file.named_storages import storage_of
from tuner.study_file.paths import StudyPaths
from tuner.study_file.storage_address import StorageAddress


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory beside the folder of a study."""
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(folder)
    return folder


def default_of(name, url=None):
    """The file of the study's storage where no user names one, and the notes on it."""
    address, notes = storage_of(url, name, StudyPaths(folder=Path("../there"), named=frozenset()))
    return address.file, notes


def begin(name, folder):
    """Begin a study in a folder's database."""
    optuna.create_study(study_name=name, storage=f"sqlite:///{folder / 'meshtune.db'}")


def test_the_default_lies_beside_the_study_file(here):
    """Without any database, and with one of other studies in the working directory, a study begins beside its file."""
    assert default_of("new") == (Path("../there/meshtune.db"), [])

    begin("other", here)

    assert default_of("new") == (Path("../there/meshtune.db"), [])


def test_a_study_goes_on_in_the_working_directory_where_it_was_begun(here):
    """A study that only the working directory's database holds stays there with a note; beside its file it wins."""
    begin("old", here)
    begin("other", here.parent / "there")

    file, (note,) = default_of("old")
    assert file == Path("meshtune.db")
    assert note.startswith("storage: the study goes on in meshtune.db of the working directory")

    begin("old", here.parent / "there")
    assert default_of("old") == (Path("../there/meshtune.db"), [])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_relative_path_of_the_file_begins_at_its_folder(kind):
    """So does a path that the study file names; a study begun in the working directory goes on there with a note."""
    url = f"{kind}:///own.db"

    assert default_of("old", url) == (Path("../there/own.db"), [])

    store = open_store(StorageAddress.parse(url))
    optuna.create_study(study_name="old", storage=store.storage)
    store.close()

    file, (note,) = default_of("old", url)
    assert file == Path("own.db")
    assert note.startswith("storage: the study goes on in own.db of the working directory")
    assert default_of("new", url) == (Path("../there/own.db"), [])


@pytest.mark.usefixtures("here")
def test_a_relative_path_of_the_user_begins_at_the_working_directory():
    """What the command line or the environment names is meant as files are on a command line."""
    paths = StudyPaths(folder=Path("../there"), named=frozenset({"storage"}))

    assert storage_of("sqlite:///own.db", "new", paths)[0].file == Path("own.db")


def test_a_database_that_cannot_be_read_is_told(here):
    """A file of that name that SQLite cannot read is left alone, and told: the study may have been begun in it."""
    (here / "meshtune.db").write_text("these are my notes " * 500)

    file, (note,) = default_of("old")

    assert file == Path("../there/meshtune.db")
    assert note.startswith("storage: meshtune.db of the working directory cannot be read")


def test_the_default_is_one_place_from_every_directory(tmp_path, monkeypatch):
    """A study file that names no storage has the same one wherever a command runs."""
    file = write_replay(tmp_path)
    text = file.read_text(encoding="utf-8")
    file.write_text("".join(line for line in text.splitlines(True) if not line.startswith("storage")), encoding="utf-8")
    places = set()
    for folder in (tmp_path, tmp_path.parent):
        monkeypatch.chdir(folder)
        places |= {load_study(file).storage.place, load_study(file.relative_to(folder)).storage.place}

    assert places == {str(tmp_path.resolve() / "meshtune.db")}
