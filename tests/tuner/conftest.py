import sys
import uuid

import pytest
from sqlalchemy import create_engine, text

from benchmarks.postgresql_server import postgresql_server, server_programs
from tuner.cli import main

PASSWORD = "canary-7f3a"  # noqa: S105 # of a server that lives for this test run; tests look for it in messages


@pytest.fixture(scope="session")
def postgresql():
    """The URL of a PostgreSQL server that runs as long as the tests do."""
    if server_programs() is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: postgresql)")
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    with postgresql_server(PASSWORD) as url:
        yield url


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
