"""A PostgreSQL server of a test's own, which may stop it."""

from contextlib import contextmanager

import pytest

from benchmarks.postgresql_server import PostgresqlServer, server_programs


@contextmanager
def own_server(password):
    """The server, started; the test is skipped where there is no program for it, or nothing to talk to it."""
    if server_programs() is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: postgresql)")
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    own = PostgresqlServer(password)
    try:
        own.start()
        yield own
    finally:
        own.close()
