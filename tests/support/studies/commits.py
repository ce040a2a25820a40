"""Copies of a database before each commit: the states that a driver leaves if it is killed at that moment."""

import sqlite3
from contextlib import closing, contextmanager

from sqlalchemy import Engine, event


@contextmanager
def before_each_commit(act):
    """Call `act` before every commit that changes a database."""
    changing = set()

    def note(connection, _cursor, statement, *_):
        if statement.split(None, 1)[0].upper() in ("INSERT", "UPDATE", "DELETE", "CREATE"):
            changing.add(id(connection.connection.dbapi_connection))

    def commit(connection):
        if id(connection.connection.dbapi_connection) in changing:
            changing.clear()
            act()

    event.listen(Engine, "before_cursor_execute", note)
    event.listen(Engine, "commit", commit)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        event.remove(Engine, "commit", commit)


@contextmanager
def kept_at_each_commit(live, moments):
    """Copy the database `live` into `moments` before each commit that changes it."""

    def keep():
        moment = live.with_name(f"moment-{len(moments)}.db")
        if live.exists():
            with closing(sqlite3.connect(live)) as source, closing(sqlite3.connect(moment)) as target:
                source.backup(target)
        moments.append(moment)

    with before_each_commit(keep):
        yield
