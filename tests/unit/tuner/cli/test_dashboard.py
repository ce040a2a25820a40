import socket
import sys

import pytest

from docs.site.json_keys import JSON_KEYS
from tests.support.studies.command_line import assert_users_mistake, write_replay
from tests.support.studies.in_process_executor import run_here
from tuner.study_file.config import load_study

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed (the extra `dashboard`)")
pytestmark = pytest.mark.slow  # optuna-dashboard is optional


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A study that has run, in its own storage."""
    folder = tmp_path_factory.mktemp("replayed")
    path = write_replay(folder, storage=f"sqlite:///{folder / 'study.db'}")
    run_here(load_study(path, overrides=["search.max_trials=1"]))
    return path


@pytest.fixture
def unserved(monkeypatch):
    """The server listens, and ends where it would begin to answer."""
    from tuner.dashboard import DashboardServer

    monkeypatch.setattr(DashboardServer, "serve", lambda opened: opened.server.server_close())


@pytest.fixture
def taken():
    """A port of loopback that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.usefixtures("unserved")
def test_it_tells_where_to_look(meshtune, replayed):
    """The study's page stands on standard output alone, on loopback, with no warning; `--json` has the dashboard's
    address, that of the page, and what is shown.
    """
    done = meshtune("dashboard", replayed, "--port", 0)
    told = meshtune("dashboard", replayed, "--port", 0, "--json").json

    assert done.status == 0
    assert done.out.startswith("http://127.0.0.1:")
    assert done.out.endswith("/dashboard/studies/1/note\n")
    assert "note:" not in done.err
    assert told.keys() == JSON_KEYS["dashboard"][""].keys()
    assert told["study_url"] == f"{told['url']}dashboard/studies/1/note"
    assert told["study_name"] == "replayed"
    assert told["storage"].startswith("sqlite:///")


@pytest.mark.usefixtures("unserved")
def test_an_open_address_is_warned_of(meshtune, replayed):
    """Who lets other machines in is told that the dashboard has no login."""
    done = meshtune("dashboard", replayed, "--port", 0, "--host", "0.0.0.0")  # noqa: S104 # what is warned of

    assert done.status == 0
    assert "the dashboard has no login" in done.err


@pytest.mark.usefixtures("unserved")
def test_without_a_port_a_taken_one_is_no_trouble(meshtune, replayed, taken, monkeypatch):
    """Where the usual port is taken and none was asked for, a free one is."""
    import tuner.dashboard.server

    monkeypatch.setattr(tuner.dashboard.server, "PORT", taken)

    done = meshtune("dashboard", replayed)

    assert done.status == 0
    assert f":{taken}/" not in done.out


def test_a_port_that_is_taken(meshtune, replayed, taken):
    """A port that was asked for is not silently another."""
    done = meshtune("dashboard", replayed, "--port", taken)

    assert_users_mistake(done, f"--port = {taken}: cannot be used for listening", "--port 0 picks a free one")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--port", "http"), "--port = 'http': must be a whole number"),
        (("--port", "70000"), "--port = 70000: must be at most 65535"),
        (("--port", "0", "--host", "no such host"), "--host = 'no such host': is no address of this machine"),
        (("--port", "0", "--host", "192.0.2.1"), "--host = '192.0.2.1': is no address of this machine"),
    ],
    ids=["word", "large", "nonsense", "elsewhere"],
)
def test_an_address_that_cannot_be(meshtune, replayed, options, words):
    """One message says what is wrong with a port or an address."""
    assert_users_mistake(meshtune("dashboard", replayed, *options), words)


def test_a_study_that_never_ran(meshtune, tmp_path):
    """There is nothing to show of it, and no database is made."""
    path = write_replay(tmp_path)

    assert_users_mistake(meshtune("dashboard", path, "--port", 0), "replayed", "has no trials in its storage yet")
    assert not list(tmp_path.glob("*.db"))


def test_without_the_extra(meshtune, replayed, monkeypatch):
    """Where optuna-dashboard is missing, the message says what to install."""
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)

    assert_users_mistake(meshtune("dashboard", replayed, "--port", 0), "pip install 'meshtune[dashboard]'")
