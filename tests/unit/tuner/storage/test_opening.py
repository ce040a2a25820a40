import re
import sqlite3
import subprocess
import sys
from contextlib import closing

import optuna
import pytest
from optuna.study import StudyDirection
from sqlalchemy import create_engine, text

from hardware.io.errors import ConfigError, shown_url
from tests.support.own_server import PASSWORD
from tests.support.programs.rights import reachable_folder, read_only, without_roots_rights
from tests.support.studies.driver_process import ROOT, STUDY
from tuner.storage.opening import find_study, load_study, open_database, open_store
from tuner.storage.store import Condition
from tuner.study_file.storage_address import StorageAddress


def pragma(storage, name):
    """A setting of the connection that trials are written through."""
    with storage.engine.connect() as connection:
        return connection.execute(text(f"PRAGMA {name}")).scalar_one()


def refusal(url):
    """The one message with which a database is refused."""
    with pytest.raises(ConfigError) as caught:
        open_database(StorageAddress.parse(url))
    message = str(caught.value)
    assert caught.value.key == "storage"
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def unused_port_url():
    """A PostgreSQL URL where nobody listens."""
    return f"postgresql://user:{PASSWORD}@127.0.0.1:1/name"


def test_sqlite_flushes_every_commit(tmp_path):
    """SQLite writes ahead of the database and flushes each commit, on every connection, also after reopening."""
    url = f"sqlite:///{tmp_path / 'study.db'}"

    for storage in (open_database(StorageAddress.parse(url)), open_database(StorageAddress.parse(url))):
        assert pragma(storage, "journal_mode") == "wal"
        assert pragma(storage, "synchronous") == 2  # FULL
        with storage.engine.connect(), storage.engine.connect() as second:
            assert second.execute(text("PRAGMA synchronous")).scalar_one() == 2


def test_in_memory_database_can_be_used():
    """A database in memory opens, for whoever only looks around."""
    assert load_study(open_database(StorageAddress.parse("sqlite://")), "none") is None


@pytest.mark.slow
def test_processes_may_create_one_database_together(tmp_path):
    """Studies that start at the same moment on one new database all get it."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    code = (
        "import sys, time, pathlib\n"
        "from tuner.storage.opening import open_database\n"
        "from tuner.study_file.storage_address import StorageAddress\n"
        "import optuna\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "optuna.logging.set_verbosity(optuna.logging.ERROR)\n"
        f"storage = open_database(StorageAddress.parse({url!r}))\n"
        "study = optuna.create_study(study_name=sys.argv[1], storage=storage)\n"
        "for _ in range(5): study.tell(study.ask(), 1.0)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, f"study-{number}"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=60)[1] for process in processes]

    assert [process.returncode for process in processes] == [0] * 4, errors
    storage = open_database(StorageAddress.parse(url))
    assert [len(load_study(storage, f"study-{number}").trials) for number in range(4)] == [5] * 4


def test_no_database_file_is_refused_in_one_message(tmp_path):
    """A file that is no database, and a database that is cut short, are refused and left alone."""
    text_file = tmp_path / "notes.txt"
    text_file.write_text("these are my notes " * 500)
    cut = tmp_path / "cut.db"
    open_database(StorageAddress.parse(f"sqlite:///{cut}")).engine.dispose()
    cut.write_bytes(cut.read_bytes()[:5000])

    assert "file is not a database" in refusal(f"sqlite:///{text_file}")
    assert "malformed" in refusal(f"sqlite:///{cut}")
    assert text_file.read_text() == "these are my notes " * 500


def test_foreign_tables_are_refused(tmp_path):
    """A database in which other software keeps a table of the same name is refused."""
    file = tmp_path / "school.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE studies (pupil TEXT)")

    with pytest.raises(ConfigError, match=r"cannot be used .*no such column"):
        find_study(StorageAddress.parse(f"sqlite:///{file}"), "physics")


def test_directories_and_missing_folders_are_refused(tmp_path):
    """Neither a directory nor a file in a folder that does not exist can be the database."""
    assert "unable to open database file" in refusal(f"sqlite:///{tmp_path}")
    assert "unable to open database file" in refusal(f"sqlite:///{tmp_path / 'missing' / 'study.db'}")


def test_unwritable_database_is_refused():
    """A database that may be read and not written is refused before any trial is run."""
    with reachable_folder() as folder:
        file = folder / "study.db"
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("CREATE TABLE pupils (age INTEGER)")

        with read_only(folder), without_roots_rights():
            message = refusal(f"sqlite:///{file}")

        assert "readonly database" in message


@pytest.mark.parametrize(
    ("version", "way_out"), [("v3.0.0.a", "`optuna storage upgrade`"), ("v99.0.0.a", "install a newer optuna")]
)
def test_other_schema_version_is_refused(tmp_path, version, way_out):
    """Tables of an older or newer Optuna are refused with the way out."""
    file = tmp_path / "study.db"
    open_database(StorageAddress.parse(f"sqlite:///{file}")).engine.dispose()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
        connection.commit()

    message = refusal(f"sqlite:///{file}")

    assert "another version of Optuna made its tables" in message
    assert way_out in message


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (unused_port_url(), "Connection refused"),
        (f"postgresql://user:{PASSWORD}@127.0.0.1:port/name", "its port is no number"),
        (f"postgresql://user:{PASSWORD}@{PASSWORD}@127.0.0.1/name", "write an @ of the password as %40"),
        (f"postgresql://user:p@{PASSWORD}:{PASSWORD}@127.0.0.1:1/name", "write an @ of the password as %40"),
        (f"postgresql://user:{{{PASSWORD}}}@127.0.0.1:1/name", "Connection refused"),
        (f"postgresql://127.0.0.1:1/name?user=u&password={PASSWORD}", "Connection refused"),
        (f"postgresql://user:{PASSWORD}@127.0.0.1:1/name?colour=red", "colour"),
        (f"postgresql://user@127.0.0.1:1/name?sslpassword={PASSWORD}%21&password=%2B{PASSWORD}", "Connection refused"),
        (f"postgresql+nosuch://user:{PASSWORD}@127.0.0.1/name", "nosuch"),
        (f"mysql+oursql://user:{PASSWORD}@127.0.0.1/name", "storage"),
        (f"postgresql+pg8000://user:{PASSWORD}@127.0.0.1/name", "needs a database driver that is not installed"),
    ],
)
def test_server_that_cannot_be_reached_is_refused(url, words):
    """A server that does not answer, and a URL that names none, end in one message without the password."""
    message = refusal(url)

    assert words in message
    assert PASSWORD not in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--storage", "URL"],
        ["--storage=URL"],
        ["--set", "storage=URL"],
        ["--set=storage='URL'"],
        ["--set", "history=[sweep.csv, URL]"],
        ["--set", f"trial.environment.HF_TOKEN={PASSWORD}"],
        ["--set", f"trial.command=[train.py, --hub-token, {PASSWORD}]"],
        ["--set", f"trial={{backend: command, environment: {{HF_TOKEN: {PASSWORD}}}}}"],
    ],
    ids=lambda options: " ".join(options).partition("=" if "=" in options[-1] else "URL")[0].strip(),
)
def test_secrets_are_taken_off_the_command_line(options):
    """A process that was given a password, or a command's variable, has it neither in its command line nor in its
    environment when it reads its study, and still reads what it was given.
    """
    code = (
        "import os, sys, tuner.cli.main, tuner.cli.status\n"
        "def told(*given):\n"
        "    seen = open('/proc/self/cmdline').read().split('\\0') + [str(dict(os.environ))]\n"
        f"    print([{PASSWORD!r} in str(place) for place in (sys.argv, given, seen)])\n"
        "    raise SystemExit(3)\n"
        "tuner.cli.status.load = told\n"
        "sys.argv[0] = 'meshtune'\n"
        "tuner.cli.main.main()\n"
    ).replace(repr(PASSWORD), "'-'.join(['canary', '7f3a'])")
    assert PASSWORD not in code
    given = ["status", "study.yaml", *(option.replace("URL", unused_port_url()) for option in options), "--json"]

    done = subprocess.run([sys.executable, "-c", code, *given], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (3, "[True, True, False]\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "status", "best"])
def test_password_is_never_printed(command):
    """No command prints the password of a database that it cannot reach; it ends with status 2 and one line."""
    done = subprocess.run(
        [sys.executable, "-m", "tuner", command, str(STUDY), "--json", "--storage", unused_port_url()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"meshtune: .*storage = .*cannot be used.*\n", done.stderr.splitlines(keepends=True)[-1])
    assert "Traceback" not in done.stderr


def test_wrong_password_is_refused_without_it(postgresql):
    """A server that refuses the password is told of without it."""
    wrong = postgresql.replace(PASSWORD, f"{PASSWORD}-wrong")

    message = refusal(wrong)

    assert "password authentication failed" in message
    assert PASSWORD not in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////home/a:b@c/study.db", "sqlite:////home/a:b@c/study.db"),
        ("postgresql://user@host/name", "postgresql://user@host/name"),
        ("postgresql://user:secret@host:5432/name", "postgresql://user:***@host:5432/name"),
        ("postgresql+psycopg2://user:se:c@ret@host/name", "postgresql+psycopg2://user:***@host/name"),
        ("postgresql://host/name?password=secret&user=u", "postgresql://host/name?password=***&user=u"),
    ],
)
def test_shown_url_hides_the_password(url, shown):
    """What is printed of a URL is all but its password."""
    assert shown_url(url) == shown


def test_a_server_that_was_restarted_is_connected_to_again(postgresql):
    """A connection that the server has closed between two writes costs none of them."""
    store = open_store(StorageAddress.parse(postgresql))
    with store.engine.connect() as ours:
        process = ours.execute(text("SELECT pg_backend_pid()")).scalar()
    other = create_engine(postgresql.replace("postgresql:", "postgresql+psycopg2:"))
    with other.connect() as connection:
        assert connection.execute(text(f"SELECT pg_terminate_backend({process}, 10000)")).scalar()
    other.dispose()

    study_id = store.storage.create_new_study([StudyDirection.MINIMIZE], f"restarted-{process}")

    assert store.storage.get_study_name_from_id(study_id) == f"restarted-{process}"
    store.close()


def test_attribute_is_replaced_once(database):
    """Of two that replace the same text of an attribute, the second is told that it came too late."""
    store = open_store(StorageAddress.parse(database))
    optuna.create_study(study_name="replaced", storage=store.storage)
    study_id = store.storage.get_study_id_from_name("replaced")

    def replace(before, value):
        return store.replace_attribute(Condition(study_id=study_id, key="key", text=before), value)

    assert store.read_attribute(study_id, "key") == (None, None)
    assert replace(None, {"first": 1})
    assert not replace(None, {"second": 2})
    held, seen = store.read_attribute(study_id, "key")
    assert held == {"first": 1}
    assert replace(seen, None)
    assert not replace(seen, {"third": 3})
    assert store.read_attribute(study_id, "key") == (None, "null")
    assert store.storage.get_study_user_attrs(study_id) == {"key": None}
    store.close()


def test_looking_for_a_study_creates_nothing(tmp_path):
    """Asking for a study in a database that does not exist does not make one."""
    file = tmp_path / "study.db"

    assert find_study(StorageAddress.parse(f"sqlite:///{file}"), "none") is None
    assert not file.exists()
