"""Opening of the place that holds all durable state of a study: a SQLite or PostgreSQL database, or a journal file."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_plus

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy import Connection, Engine, MetaData, QueuePool, create_engine, event, inspect
from sqlalchemy import text as statement
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, DisconnectionError, IntegrityError, SQLAlchemyError

from hardware.io.errors import ConfigError, shorten
from hardware.io.looking import NoRightsError, check_writable, is_outdated, look_at, may_write
from trials.submitted_job import check_outlives_job
from tuner.storage.journal_file import JournalError
from tuner.storage.journal_store import JournalStore, journal_to_look_at, rows_of_journal
from tuner.storage.own_file import GoneError, OwnFile
from tuner.storage.sql_store import SqlStore
from tuner.storage.store import AbstractStore, BrokenOffError
from tuner.storage.stored_values import check_values
from tuner.study_file.storage_address import StorageAddress, StorageKind

SQLITE_WAIT_S = 60
"""Time for which one process waits for another's write before it gives up [s]."""

CONNECT_LIMIT_S = 10
"""Time that a database server may take to answer [s]."""

SERVER_WAIT_S = 60.0
"""Time for which a study waits for a server that it had reached before and that is gone, as during a restart [s]."""

SERVER_LOOK_S = 0.5
"""Time between two looks at such a server [s]."""

NOTHING_IS_LOST = "run the same command again: nothing that is recorded is lost"
SERVER_IS_BACK = f"when the server is back, {NOTHING_IS_LOST}"

LASTING = (
    "give --storage or MESHTUNE_STORAGE a file that outlives the job and that the driver's node can reach, by its "
    "absolute path (sqlite:////data/meshtune.db, journal:////data/study.log), or PostgreSQL"
)
"""Advice for Ray jobs on a place that outlives them."""

CREATE_ATTEMPTS = 5
CREATE_PAUSE_S = 0.5
"""Pause before another attempt [s]: processes that create the tables of a new database at the same time stumble over
each other; the tables stay."""


class UnusableStorageError(ConfigError):
    """Storage that cannot be used.

    Attributes:
        is_sound: Whether it holds all that was written, and can be used again when the cause is gone.
    """

    def __init__(self, cause: str, address: StorageAddress, nearest: str | None) -> None:
        super().__init__(f"cannot be used ({cause})", key="storage", value=str(address), nearest=nearest)
        self.is_sound = nearest is not None


def open_store(address: StorageAddress) -> AbstractStore:
    """Open the store at an address; create it if it does not exist.

    Raises:
        ConfigError: The database cannot be opened (see `open_database`), or the journal file cannot be read and
            written.
    """
    _check_outlives(address)
    file = address.file
    with storage_errors(address):
        if file is not None and file.is_file():
            check_writable(file)
    if address.kind is not StorageKind.JOURNAL:
        storage = open_database(address)
        return SqlStore(storage, OwnFile(file) if file is not None and file.is_file() else None)
    with storage_errors(address):
        return JournalStore(address.file or Path())


def open_database(address: StorageAddress) -> RDBStorage:
    """Open the database at an address; create it if it does not exist.

    SQLite is set to write-ahead logging, where readers do not block the writer, and to flushing every commit to the
    disk, so that a finished trial survives the machine's death. PostgreSQL is accessed through psycopg2, unless the URL
    names another driver: SQLAlchemy's own choice differs from version to version.

    Raises:
        ConfigError: The URL is malformed, its driver is not installed, or the database does not answer.
    """
    with storage_errors(address):
        parsed = _parse(address)
        if (file := address.file) is not None and file.is_file():
            with _engine(parsed, file) as engine:
                _check_tables(engine, address)
        storage = _create(parsed, _connect_args(parsed))
        if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
            event.listen(storage.engine, "connect", _make_durable)
            storage.engine.dispose()  # what is already connected was not made so
            storage.engine.connect().close()
        else:
            _outlast_restarts(storage.engine)
        return storage


@contextmanager
def reading(address: StorageAddress, metadata: MetaData) -> Iterator[Connection]:
    """Connect to an existing store, without creating tables or changing settings; a journal needs the `metadata`.

    Raises:
        ConfigError: The URL is malformed, or the store cannot be read.
    """
    with storage_errors(address):
        if address.kind is StorageKind.JOURNAL:
            with rows_of_journal(address.file or Path(), metadata) as connection:
                yield connection
            return
        with _engine(_parse(address), address.file) as engine:
            _check_tables(engine, address)
            with engine.connect() as connection:
                yield connection


@contextmanager
def _engine(parsed: URL, file: Path | None) -> Iterator[Engine]:
    """Open an engine for reading; `file` is that of the database, if it has one."""
    if file is not None and file.is_file():
        engine = create_engine("sqlite://", **_looking(file))
    else:
        engine = create_engine(parsed, connect_args=_connect_args(parsed))
    try:
        yield engine
    finally:
        engine.dispose()


def _looking(file: Path) -> dict[str, Any]:
    """Return the options of an engine that only reads a file."""
    return {"creator": lambda: look_at(file), "poolclass": QueuePool}


def _check_tables(engine: Engine, address: StorageAddress) -> None:
    """Refuse a SQLite file with views or triggers: one may have no end, and the other write what nobody asked for."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection:
        query = statement("SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')")
        found = connection.execute(query).first()
    if found is not None:
        raise UnusableStorageError(f"it has a {found[0]} {found[1]!r}, which no version makes", address, None)


def _connect_args(parsed: URL) -> dict[str, Any]:
    """Return the time limits of a connection, by kind of database."""
    limits = {"sqlite": {"timeout": SQLITE_WAIT_S}, "postgresql": {"connect_timeout": CONNECT_LIMIT_S}}
    return dict(limits.get(parsed.get_backend_name(), {}))


def _parse(address: StorageAddress) -> URL:
    """Return the parsed URL, with psycopg2 as the driver of PostgreSQL."""
    before_last_at = address.url.partition("://")[2].rpartition("@")[0]
    if "@" in before_last_at and address.kind is StorageKind.SERVER:
        # the end of the password would become part of the host, and of every message that names the host
        raise ConfigError(
            "holds more than one @", key="storage", value=str(address), nearest="write an @ of the password as %40"
        )
    try:
        parsed = make_url(address.url)
    except ValueError:
        raise UnusableStorageError("its port is no number", address, None) from None
    try:
        parsed.get_dialect()().create_connect_args(parsed)
    except (TypeError, ValueError) as error:
        raise UnusableStorageError(f"an option of its URL is wrong: {error}", address, None) from None
    if address.file not in (None, Path()) and not str(parsed.database).startswith("file:"):
        return parsed.set(database=str(address.file))  # not every version of SQLAlchemy takes a % as it is
    return parsed.set(drivername="postgresql+psycopg2") if parsed.drivername == "postgresql" else parsed


def _create(parsed: URL, connect_args: dict[str, Any]) -> RDBStorage:
    """Open the database through Optuna, which creates its tables."""
    # Optuna fills a template in the URL: braces in a password must not look like one
    url = parsed.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
    is_remote = parsed.get_backend_name() != "sqlite"  # a server may be restarted while trials run
    for attempt in range(CREATE_ATTEMPTS):
        try:
            return RDBStorage(url, engine_kwargs={"connect_args": connect_args, "pool_pre_ping": is_remote})
        except (DBAPIError, StorageInternalError, AssertionError) as error:
            collided = isinstance(error, IntegrityError | AssertionError) or "exists" in str(error)
            if attempt + 1 == CREATE_ATTEMPTS or not collided:
                raise
            time.sleep(CREATE_PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def _outlast_restarts(engine: Engine) -> None:
    """Make new connections wait for a server that has gone; after a wait in vain the next ones do not wait again."""
    waits_in_vain = False

    def connect(dialect: Any, _record: object, arguments: Sequence[Any], parameters: Mapping[str, Any]) -> Any:
        nonlocal waits_in_vain
        deadline_s = time.monotonic() + (0.0 if waits_in_vain else SERVER_WAIT_S)
        while True:
            try:
                connection = dialect.connect(*arguments, **parameters)
            except dialect.loaded_dbapi.OperationalError:
                if time.monotonic() >= deadline_s:
                    waits_in_vain = True
                    raise
                time.sleep(SERVER_LOOK_S)
            else:
                waits_in_vain = False
                return connection

    event.listen(engine, "do_connect", connect)


def _make_durable(connection: Any, _record: object) -> None:
    """Set a connection of SQLite to write-ahead logging and full flushes."""
    with closing(connection.cursor()) as cursor:
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")


@contextmanager
def storage_errors(address: StorageAddress) -> Iterator[None]:
    """Turn errors of a database, at its opening or later, into one message without the password.

    Raises:
        ConfigError: The database cannot be used.
    """
    try:
        yield
    except ImportError as error:
        missing = getattr(error.__cause__ or error, "name", None)
        raise ConfigError(
            f"needs a database driver that is not installed ({missing})",
            key="storage",
            value=str(address),
            nearest="pip install 'meshtune[postgresql]'" if address.url.startswith("postgresql") else None,
        ) from None
    except BrokenOffError:
        raise UnusableStorageError("its server went away in the middle of a write", address, SERVER_IS_BACK) from None
    except JournalError as error:
        full = str(error) == os.strerror(errno.ENOSPC)
        raise UnusableStorageError(
            str(error), address, f"make room there, and {NOTHING_IS_LOST}" if full else None
        ) from None
    except NoRightsError as error:
        raise UnusableStorageError(str(error), address, error.advice) from None
    except GoneError as error:
        raise UnusableStorageError(str(error), address, None) from None
    except UnicodeDecodeError:  # from where SQLite reads what is no database any more
        raise UnusableStorageError("it holds text that is not UTF-8", address, None) from None
    except (SQLAlchemyError, StorageInternalError) as error:
        raise UnusableStorageError(_cause(error, address), address, _advise(error)) from None
    except RuntimeError as error:
        if "table schema" not in str(error):  # the words of Optuna's only RuntimeError about a storage
            raise
        known = "storage upgrade" in str(error)
        nearest = "copy the database, then run `optuna storage upgrade` on it" if known else "install a newer optuna"
        raise UnusableStorageError("another version of Optuna made its tables", address, nearest) from None


def _advise(error: BaseException) -> str | None:
    """Return advice where the database itself is sound; None where there is none."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    if "disk is full" in str(chain[-1]) or "No space left" in str(chain[-1]):
        return f"make room there, and {NOTHING_IS_LOST}"
    if "database is locked" in str(chain[-1]):
        return f"end what holds it, and {NOTHING_IS_LOST}"
    if any(isinstance(each, DBAPIError) and each.connection_invalidated for each in chain):
        return SERVER_IS_BACK
    return None


def _cause(error: BaseException, address: StorageAddress) -> str:
    """Return the database's own message, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    for password in _passwords(address.url):
        text = text.replace(password, "***")
    return text


def _passwords(url: str) -> list[str]:
    """Return the passwords of a URL, as it spells them and decoded, the longest first."""
    spelled = [found for found in re.findall(r"://[^:/@]*:(.*)@", url) if found]
    spelled += re.findall(r"[?&](?:password|sslpassword)=([^&]+)", url)
    return sorted({*spelled, *map(unquote, spelled), *map(unquote_plus, spelled)}, key=len, reverse=True)


def find_study(address: StorageAddress, name: str) -> optuna.Study | None:
    """Return the study of that name, or None if there is none; looking for it never creates a database.

    Raises:
        ConfigError: The storage cannot be read; see `open_to_look`.
    """
    storage = open_to_look(address)
    return None if storage is None else find_in(storage, address, name)


def find_in(storage: BaseStorage, address: StorageAddress, name: str) -> optuna.Study | None:
    """Return the study of that name in the opened storage of an address, with its values checked; None without one.

    Raises:
        ConfigError: The storage cannot be read.
    """
    with storage_errors(address), foreign_values(address):
        study = load_study(storage, name)
        if study is not None:
            check_values(study)
        return study


def open_to_look(address: StorageAddress) -> BaseStorage | None:
    """Open an existing storage for looking, without the right to write it if need be; None if it has no studies.

    Raises:
        ConfigError: The storage cannot be read.
    """
    file = address.file
    with storage_errors(address):
        _check_outlives(address)
        if not address.may_exist:
            if address.has_options:
                _parse(address)
            return None
        if address.kind is StorageKind.JOURNAL:
            return journal_to_look_at(file or Path())
        if file is None or may_write(file):
            return open_store(address).storage
        with _engine(_parse(address), file) as engine:
            _check_tables(engine, address)
            if not inspect(engine).has_table("studies"):
                return None
        storage = RDBStorage("sqlite://", engine_kwargs=_looking(file), skip_table_creation=True)
        event.listen(storage.engine, "checkout", _renew_copies(file))
        return storage


def _renew_copies(file: Path) -> Callable[[object, object, object], None]:
    """Return the function that makes a pool connect again where a copy of the database is outdated."""

    def check_out(connection: object, _record: object, _proxy: object) -> None:
        if is_outdated(connection, file):
            raise DisconnectionError

    return check_out


@contextmanager
def foreign_values(address: StorageAddress) -> Iterator[None]:
    """Refuse a storage with rows that Optuna cannot read; in the block it reads a study.

    Raises:
        ConfigError: It met such a row.
    """
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise UnusableStorageError(f"it holds what no version writes: {shorten(told, 200)}", address, None) from None


def _check_outlives(address: StorageAddress) -> None:
    """Refuse a file that would vanish with a Ray job's working directory."""
    file = address.file
    if file is not None:
        check_outlives_job(file, key="storage", value=str(address), nearest=LASTING)


def load_study(storage: BaseStorage, name: str) -> optuna.Study | None:
    """Return the study of that name, or None if the storage holds none."""
    try:
        return optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        return None
