"""What a study file that somebody else wrote may make Meshtune write and read."""

import json
import os
import shutil

import pytest
from optuna.study import StudyDirection

from hardware.io.errors import ConfigError
from tests.support.studies.broken_studies import GOOD, study
from tests.support.studies.command_line import assert_users_mistake, in_process, write_replay
from tests.support.studies.commanded_study import MODEL, run_here, write_study
from trials.backend import Status
from tuner.run.studies import stored_study
from tuner.storage.opening import open_store
from tuner.storage.record import read_records
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress

OUTSIDE = "outside the study file's folder and the working directory"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder beside that of the study, and beside the working directory; `study/out` leads there."""
    for name in ("home", "study", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "study" / "out").symlink_to(tmp_path / "home")
    (tmp_path / "study" / "circle").symlink_to(tmp_path / "study" / "circle")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("MESHTUNE_STORAGE", raising=False)
    return tmp_path / "home"


def written(home, **changes):
    """A study file in the folder `study`."""
    path = home.parent / "study" / "study.yaml"
    path.write_text(study(GOOD, **changes), encoding="utf-8")
    return path


LEADING_OUT = {
    "up": "sqlite:///../home/x.db",
    "absolute": "sqlite:///HOME/x.db",
    "driver": "sqlite+pysqlite:///../home/x.db",
    "journal": "journal:///../home/x.log",
    "journal by a link": "journal:///../study/out/x.log",
    "up and down": "sqlite:///nowhere/../../home/x.db",
    "URI": "sqlite:///file:../home/x.db?uri=true",
    "encoded URI": "sqlite:///file:%2e%2e/home/x.db?uri=true",
    "link": "sqlite:///../study/out/x.db",
}


@pytest.mark.parametrize("case", LEADING_OUT, ids=lambda case: case.replace(" ", "_"))
def test_a_study_file_puts_no_storage_elsewhere(home, case):
    """A storage that leads out of the study's folder and the working directory is refused, and nothing is written."""
    url = LEADING_OUT[case].replace("HOME", str(home))

    with pytest.raises(ConfigError, match=OUTSIDE) as refused:
        load_study(written(home, storage=url))

    assert f"storage = '{url}'" in str(refused.value)
    assert "give --storage sqlite" in str(refused.value) or "give --storage journal" in str(refused.value)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("logs", ["../home", "/HOME/logs", "out", "out/../../home", "logs/../../home"])
def test_a_study_file_puts_no_logs_elsewhere(home, logs):
    """Nor do whole logs of commands leave these places."""
    file = write_study(home.parent / "study", trials=1)
    given = logs.replace("/HOME", str(home))
    file.write_text(file.read_text(encoding="utf-8").replace("logs: logs", f"logs: {given}"), encoding="utf-8")

    with pytest.raises(ConfigError, match=OUTSIDE) as refused:
        load_study(file)

    assert f"trial.logs = '{given}'" in str(refused.value)
    assert load_study(file, overrides=[f"trial.logs={given}"]).trials.backend.logs is not None


def test_the_user_may_write_anywhere(home, monkeypatch):
    """What the command line or MESHTUNE_STORAGE names is the user's own choice, and so is what lies in these places."""
    elsewhere = f"sqlite:///{home}/x.db"
    file = written(home, storage="sqlite:////nowhere/of/ours.db")

    assert load_study(file, storage=elsewhere).storage.url == elsewhere
    assert load_study(file, overrides=[f"storage={elsewhere}"]).storage.url == elsewhere
    monkeypatch.setenv("MESHTUNE_STORAGE", elsewhere)
    assert load_study(file).storage.url == elsewhere
    monkeypatch.delenv("MESHTUNE_STORAGE")
    for inside, place in {
        "sqlite:///x.db": f"sqlite:///{file.parent}/x.db",
        "sqlite:///sub/../x.db": f"sqlite:///{file.parent}/sub/../x.db",
        "sqlite:///file:a%20b.db?uri=true": f"sqlite:///file:{file.parent}/a%20b.db?uri=true",
        f"journal:///{file.parent}/x.log": f"journal:///{file.parent}/x.log",
        "sqlite:///:memory:": "sqlite:///:memory:",
    }.items():
        assert load_study(written(home, storage=f"'{inside}'")).storage.url == place


def test_a_refused_study_leaves_no_file(home):
    """A process refuses such a study with one message, before anything is made."""
    file = write_replay(home.parent / "study", storage=f"sqlite:///{home}/x.db")

    assert_users_mistake(in_process("run", file, cwd=home.parent / "work"), OUTSIDE)
    assert list(home.iterdir()) == list((home.parent / "work").iterdir()) == []


@pytest.mark.slow
def test_what_is_notes_is_told(home):
    """Each file that the study file names outside these places is told once on stderr, by its real path."""
    shutil.copy(MODEL, home / "model.yaml")
    (home / "trace.csv").write_text("time_s,link,share\n0,inter,1\n", encoding="utf-8")
    cluster = "{name: l20, hosts: 1, trace: ../home/trace.csv}"
    file = written(home, model=str(home / "model.yaml"), cluster=cluster, history="[out/trace.csv]")

    told = load_study(file).notes
    done = in_process("space", file, "--json", cwd=home.parent / "work")
    own = in_process("space", file, "--set", f"model={home}/model.yaml", cwd=home.parent)

    assert told == (
        f"model is read from {home}/model.yaml, {OUTSIDE}",
        f"history.0 is read from {home}/trace.csv, {OUTSIDE}",
        f"cluster.trace is read from {home}/trace.csv, {OUTSIDE}",
    )
    assert done.json
    assert [line for line in done.err.splitlines() if OUTSIDE in line] == [f"note: {line}" for line in told]
    assert OUTSIDE not in own.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": '"a\\0b"'}, ("model = 'a\\x00b'", "holds a NUL")),
        ({"storage": '"sqlite:///a\\0b"'}, ("storage = ", "holds a NUL")),
        ({"runtime": '"/a\\0b.yaml"'}, ("runtime = ", "holds a NUL")),
        ({"cluster": '{file: "a\\0b"}'}, ("cluster",)),
        ({"model": "circle"}, ("model",)),
        ({"runtime": "circle/x.yaml"}, ("runtime",)),
        ({"model": "/dev/zero"}, ("/dev/zero", "is a pipe or a device")),
        ({"name": "../x"}, ("name = '../x'",)),
        ({"name": "-rf"}, ("name = '-rf'",)),
        ({"name": '"a\\0b"'}, ("name = ",)),
        ({"name": "a" * 300}, ("name = ",)),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else None,
)
def test_odd_paths_and_names_are_mistakes(home, changes, words):
    """Names that are paths or options, and paths that lead nowhere, in circles or to no end, are told in a line."""
    with pytest.raises(ConfigError) as refused:
        load_study(written(home, **changes))

    for word in words:
        assert word in str(refused.value)


HOSTILE = ("; touch pwned", "$(touch pwned)", "`touch pwned`", "a\nb", "--flag", "'\"", "| touch pwned", "*", "~")


def test_a_command_is_never_a_shells(home):
    """Arguments and variables reach the program as the study spells them: nothing in them is run or expanded."""
    file = write_study(home.parent / "study", trials=1)
    program = home.parent / "study" / "train.py"
    program.write_text(
        "import json, os, sys\n"
        "open('seen.json', 'w').write(json.dumps([sys.argv[3:], os.environ['ODD']]))\n" + program.read_text("utf-8"),
        encoding="utf-8",
    )
    hostile = [f'"{text}"' for text in (each.replace("\n", "\\n").replace('"', '\\"') for each in HOSTILE)]
    text = file.read_text(encoding="utf-8")
    text = text.replace('"{mbs}"]', f'"{{mbs}}", {", ".join(hostile)}]').replace("API_KEY", f"ODD: {hostile[1]}, KEY")
    file.write_text(text, encoding="utf-8")

    config = run_here(file)

    assert [record.status for record in read_records(stored_study(config))] == [Status.OK]
    assert json.loads((file.parent / "seen.json").read_text("utf-8")) == [list(HOSTILE), HOSTILE[1]]
    assert not [found for _, _, names in os.walk(home.parent) for found in names if found == "pwned"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"sqlite:///{'n' * 248}", "name has 248 bytes, and may have 247"),
        (f"sqlite:////{'/'.join(['d' * 200] * 3)}/study.db", "path has 612 bytes, and may have 504"),
        (f"journal:///{'n' * 208}", "name has 208 bytes, and may have 207"),
    ],
)
def test_a_path_that_is_too_long_is_told_with_its_limit(url, words):
    """SQLite and the locks of journals make files with longer names: the message counts, and says how much may be."""
    with pytest.raises(ConfigError, match=words):
        StorageAddress.parse(url)


def test_the_longest_paths_can_be_used(tmp_path, monkeypatch):
    """A name and a path of just the length that is allowed hold a study."""
    monkeypatch.chdir(tmp_path)
    open_store(StorageAddress.parse(f"sqlite:///{'n' * 247}")).close()
    folder = tmp_path / ("d" * (504 - 201 - len(str(tmp_path))))
    folder.mkdir()
    open_store(StorageAddress.parse(f"sqlite:///{folder / ('n' * 199)}")).close()
    store = open_store(StorageAddress.parse(f"journal:///{'n' * 207}"))

    assert store.storage.create_new_study([StudyDirection.MINIMIZE], "kept") == 0
