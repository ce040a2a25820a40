"""A study on a PostgreSQL server that is restarted under it."""

import re
import signal
import threading

import pytest

from hardware.io.errors import ConfigError
from tests.support.own_server import own_server
from tuner.storage import opening as storage
from tuner.storage.opening import open_store, storage_errors
from tuner.storage.store import Condition
from tuner.study_file.storage_address import StorageAddress

PASSWORD = "canary-restart"  # noqa: S105 # of a server that lives for these tests


@pytest.fixture(scope="module")
def server():
    """A server of these tests alone, since they stop it."""
    with own_server(PASSWORD) as own:
        yield own


@pytest.fixture
def store(server):
    """A storage on it, which runs when the test begins and when it ends."""
    opened = open_store(StorageAddress.parse(server.url))
    yield opened
    opened.close()
    if server.process.poll() is not None:
        server.start()


def attribute(store, study, value):
    """Sets an attribute of the study as a driver sets its claim."""
    _, before = store.read_attribute(study, "claim")
    assert store.replace_attribute(Condition(study_id=study, key="claim", text=before), value)


@pytest.fixture
def study(store):
    """A study without trials."""
    name = "restarted"
    known = {each.study_name: each._study_id for each in store.storage.get_all_studies()}
    return known[name] if name in known else store.storage.create_new_study([], name)


def test_it_waits_while_the_server_is_restarted(server, store, study):
    """Between two transactions a server may be restarted: the next one waits for it and goes on."""
    attribute(store, study, 1)
    server.stop()
    starter = threading.Timer(1.0, server.start)
    starter.start()

    attribute(store, study, 2)
    starter.join()

    assert store.read_attribute(study, "claim")[0] == 2
    assert store.storage.get_study_name_from_id(study) == "restarted"


def test_a_server_that_stays_away_is_told(server, store, study, monkeypatch):
    """A server that does not come back is told in one message, without the password, after one wait and no other."""
    waits = []
    monkeypatch.setattr(storage, "SERVER_WAIT_S", 0.5)
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    attribute(store, study, 1)
    server.stop()

    for is_first in (True, False):
        with (
            pytest.raises(ConfigError, match=r"[Cc]onnection refused") as told,
            storage_errors(StorageAddress.parse(server.url)),
        ):
            attribute(store, study, 2)
        assert PASSWORD not in str(told.value)
        assert bool(waits) == is_first
        waits.clear()


@pytest.mark.parametrize(("write", "how"), [("attribute", signal.SIGINT), ("trial", signal.SIGQUIT)])
def test_a_transaction_that_is_broken_off_is_told(server, store, study, write, how):
    """A server that stops in the middle of a transaction ends the driver with a message that says what to do, and
    nothing of that transaction is there afterwards.
    """
    attribute(store, study, 1)
    _, before = store.read_attribute(study, "claim")

    def broken_off():
        with (
            storage_errors(StorageAddress.parse(server.url)),
            store.together(Condition(study_id=study, key="claim", text=before)),
        ):
            store.storage.set_study_user_attr(study, "half", 1)
            server.stop(how)
            if write == "trial":
                store.storage.create_new_trial(study)
            else:
                store.storage.set_study_user_attr(study, "other half", 1)

    with pytest.raises(ConfigError, match=re.escape(storage.NOTHING_IS_LOST)) as told:
        broken_off()
    server.start()

    assert PASSWORD not in str(told.value)
    assert "when the server is back" in str(told.value)
    assert store.storage.get_study_user_attrs(study).keys() == {"claim"}
    assert store.storage.get_all_trials(study) == []
