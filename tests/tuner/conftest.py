import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from tuner.cli import main

USER = "meshtune"
PASSWORD = "canary-7f3a"  # noqa: S105 # of a server that lives for this test run; tests look for it in messages


def server_programs():
    """The folder of PostgreSQL's server programs, None where they are not installed."""
    candidates = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "initdb").exists()), None)


def other_user():
    """The server refuses to run as root: the account to give to it, empty if this is no root."""
    if os.geteuid():
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    name = "postgres" if "postgres" in names else "nobody"
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def postgresql():
    """The URL of a PostgreSQL server that runs as long as the tests do."""
    programs = server_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: postgresql)")
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    account = other_user()
    folder = Path(tempfile.mkdtemp(prefix="meshtune-postgresql-"))
    try:
        (folder / "password").write_text(PASSWORD)
        if account:
            shutil.chown(folder, account["user"])
            shutil.chown(folder / "password", account["user"])
        subprocess.run(
            [
                str(programs / "initdb"),
                *("-D", str(folder / "data"), "-U", USER, "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"),
                f"--pwfile={folder / 'password'}",
            ],
            check=True,
            capture_output=True,
            cwd=folder,
            **account,
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen(
            [
                str(programs / "postgres"),
                *("-D", str(folder / "data"), "-p", str(port)),
                *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "log").open("wb"),
            cwd=folder,
            **account,
        )
        try:
            url = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{port}/postgres"
            wait_until_it_answers(server, url, folder / "log")
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # stop without waiting for clients that a test left connected
            server.wait(30)
    finally:
        shutil.rmtree(folder)


def wait_until_it_answers(server, url, log, limit_s=60.0):
    """Waits for the first connection that works."""
    import psycopg2

    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            psycopg2.connect(url).close()
            return
        except psycopg2.OperationalError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)


@pytest.fixture(params=["sqlite", "postgresql", "journal"])
def database(request, tmp_path):
    """The URL of an empty storage of each kind."""
    return new_storage(request.param, request, tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def sql_database(request, tmp_path):
    """The URL of an empty database of either kind."""
    return new_storage(request.param, request, tmp_path)


def new_storage(kind, request, folder):
    """The URL of an empty storage: in the folder, or in a schema of its own on the server of this test run."""
    if kind != "postgresql":
        return f"{kind}:///{folder / f'study.{kind}'}"
    server, name = request.getfixturevalue("postgresql"), f"test_{uuid.uuid4().hex}"
    engine = create_engine(server.replace("postgresql:", "postgresql+psycopg2:"))
    with engine.begin() as connection:  # a database of its own takes the server seconds
        connection.execute(text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    return f"{server}?options=-csearch_path%3D{name}"


@pytest.fixture
def calibrate(capsys, monkeypatch):
    """Runs `meshtune calibrate` in this process; its status, stdout and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["meshtune", "calibrate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call
