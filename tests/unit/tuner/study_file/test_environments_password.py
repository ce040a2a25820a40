import socket
import struct
import threading

import pytest

from tests.support.studies.command_line import write_replay
from tuner.storage.opening import find_study
from tuner.study_file.config import load_study
from tuner.study_file.storage_address import StorageAddress

ELSEWHERE = "127.0.0.2"
"""Address of this machine that its usual names are not."""

ASK_FOR_PASSWORD = b"R" + struct.pack("!ii", 8, 3)


@pytest.fixture
def eavesdropper():
    """A server that speaks PostgreSQL until the client has sent a password in clear text, and keeps all it hears."""
    heard = []
    with socket.create_server((ELSEWHERE, 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    message = connection.recv(4096)
                    while len(message) == 8:  # asks for encryption
                        connection.sendall(b"N")
                        message = connection.recv(4096)
                    connection.sendall(ASK_FOR_PASSWORD)
                    heard.append(message + connection.recv(4096))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], heard
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("form", ["me@{}:{}/x", "me:@{}:{}/x", "{}:{}/x?password=", "me@/x?host={}&port={}"])
def test_server_that_a_study_file_names_never_hears_the_environments_password(
    tmp_path, monkeypatch, eavesdropper, form
):
    """PGPASSWORD goes to the server of the user's own storage, and not to one that only the study file names."""
    pytest.importorskip("psycopg2")
    port, heard = eavesdropper
    monkeypatch.setenv("PGPASSWORD", "of-the-environment")
    url = f"postgresql://{form.format(ELSEWHERE, port)}"
    file = write_replay(tmp_path, storage=f"'{url}'")

    for storage in (None, url):
        config = load_study(file, storage=storage)
        with pytest.raises(Exception, match="cannot be used"):
            find_study(config.storage, config.name)

    assert [b"of-the-environment" in told for told in heard] == [False, True]


def test_user_is_told_of_each_password_that_is_not_sent(tmp_path, monkeypatch):
    """A note for each server names the key and the variable, without a password."""
    monkeypatch.setenv("PGPASSWORD", "of-the-environment")
    history = "[postgresql://me@elsewhere/y]"
    file = write_replay(tmp_path, storage="postgresql://me@elsewhere/x", history=history)
    kept = "its server, which the study file names, does not get PGPASSWORD from your environment"

    assert load_study(file).notes == (f"storage: {kept}", f"history.0: {kept}")
    assert load_study(file, storage="postgresql://me@elsewhere/x", overrides=[f"history={history}"]).notes == ()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me@localhost/x",
        "postgresql+psycopg2:///x",
        "postgresql://me@/x?host=/run/postgresql",
        "postgresql://me:own@elsewhere/x",
        "postgresql://me@elsewhere/x?password=own",
        "sqlite:///x.db",
        "mysql://me@elsewhere/x",
    ],
)
def test_urls_that_send_no_password_elsewhere_stay_as_they_are(monkeypatch, url):
    """A server of this machine, a URL with a password of its own and a file are left alone."""
    monkeypatch.setenv("PGPASSWORD", "of-the-environment")
    address = StorageAddress.parse(url)

    assert address.without_environments_password() == (address, "")


def test_nothing_changes_without_such_a_password(monkeypatch):
    """Without the variable there is nothing to keep back."""
    monkeypatch.delenv("PGPASSWORD", raising=False)
    address = StorageAddress.parse("postgresql://me@elsewhere/x")

    assert address.without_environments_password() == (address, "")
