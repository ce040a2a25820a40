"""Start PostgreSQL servers for tests, and make empty storages of every kind."""

import uuid
from contextlib import contextmanager

import pytest
from sqlalchemy import create_engine, text

from benchmarks.support.postgresql_server import PostgresqlServer, server_programs

PASSWORD = "canary-7f3a"  # noqa: S105 # of a server that lives for this test run; tests look for it in messages


def skip_without_postgresql():
    """Skip the test where PostgreSQL's server or its driver is missing; continuous integration installs both."""
    if server_programs() is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: postgresql)")
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")


@contextmanager
def own_server(password):
    """Start a PostgreSQL server; skip the test if the server or its driver is not installed."""
    skip_without_postgresql()
    own = PostgresqlServer(password)
    try:
        own.start()
        yield own
    finally:
        own.close()


def new_storage(kind, request, folder):
    """Return the URL of an empty storage: in the folder, or in its own schema on the server of this test run."""
    if kind != "postgresql":
        return f"{kind}:///{folder / f'study.{kind}'}"
    server, name = request.getfixturevalue("postgresql"), f"test_{uuid.uuid4().hex}"
    engine = create_engine(server.replace("postgresql:", "postgresql+psycopg2:"))
    with engine.begin() as connection:  # a database of its own takes the server seconds
        connection.execute(text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    return f"{server}?options=-csearch_path%3D{name}"
