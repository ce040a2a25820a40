"""Checks of `storage:` and `history:`: URLs of databases and journals, and the files that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from hardware.io.config_file import read_text
from hardware.io.errors import ConfigError, shown_url
from tuner.study_file.key_errors import under


def is_database(entry: str) -> bool:
    """Return whether an entry of `history:` is meant as a database URL and not as a file."""
    return "://" in entry


def is_journal(url: str) -> bool:
    """Return whether a storage URL names a journal file."""
    return url.startswith("journal://")


def storage_file(url: str) -> Path | None:
    """Return the file of a SQLite or journal URL; empty for a database in memory, None for a database server."""
    found = re.match(r"(?:sqlite(?:\+\w+)?|journal)://(?:/(file:)?([^?]*))?", url)
    if found is None:
        return None
    _, name = found.groups()
    if name in (None, ":memory:"):
        return Path()
    return Path(unquote(name) if found[1] else name)  # SQLite decodes names that begin with file:


def storage_place(url: str) -> str:
    """Return the place of a storage, with a file's absolute path and without passwords."""
    file = storage_file(url)
    return shown_url(url) if file is None else str(file.resolve())


_PASSWORD_VARIABLES = {"postgresql": "PGPASSWORD", "mysql": "MYSQL_PWD"}
"""Environment variable whose password a database's driver sends to whatever server it connects to."""

_LOCAL = re.compile(r"[^:]+://(?:[^@/?]*@)?(?:localhost|127\.0\.0\.1|\[::1\])?(?::\d+)?(?:/[^?]*)?(?:\?.*)?")
_OWN_PASSWORD = re.compile(r"://[^:/@]*:[^@]+@|[?&]password=[^&]")


def without_environments_password(url: str) -> tuple[str, str]:
    """Return a URL of a study file so that its server never gets the password of the user's environment.

    The file may be somebody else's, and the server it names too. A server on this machine, or one that the user's
    environment names, may get the password; a URL with a password of its own never sends another. The second text
    tells what was done; it is empty if that is nothing.
    """
    variable = _PASSWORD_VARIABLES.get(re.split(r"[+:]", url, maxsplit=1)[0], "")
    if not os.environ.get(variable) or _OWN_PASSWORD.search(url) or _is_local(url):
        return url, ""
    # an explicit password keeps drivers from looking for one
    joined = f"{url}{'&' if '?' in url else '?'}password=not-sent"
    return joined, f"its server, which the study file names, does not get {variable} from your environment"


def _is_local(url: str) -> bool:
    """Return whether a URL names no other machine."""
    named = [value for key, value in parse_qsl(url.partition("?")[2]) if key in ("host", "hostaddr", "service")]
    return bool(_LOCAL.fullmatch(url)) and all(value.startswith("/") and "," not in value for value in named)


def no_database(url: str) -> ConfigError:
    """Return the error for a database file in `history:` that does not exist."""
    nearest = "a relative path starts at the working directory, as for storage"
    return ConfigError("no such database", value=url, nearest=nearest)


def check_history(entries: Sequence[str], base_dir: Path, storage: str) -> None:
    """Check that each entry is a database or a CSV file, and that files exist; their contents are read later."""
    for position, entry in enumerate(entries):
        key = f"history.{position}"
        if entry in entries[:position]:
            raise ConfigError("is named twice; keep one", key=key, value=shown_url(entry))
        if is_database(entry):
            check_storage(entry, key)
            file, own = storage_file(entry), storage_file(storage)
            is_own = file is not None and own is not None and file.resolve() == own.resolve()
            if file is not None and not file.is_file() and not is_own:  # the study's own may not exist yet
                raise no_database(entry).under(key)
        elif not entry.endswith(".csv"):
            raise ConfigError(
                "is neither a database URL nor a CSV file of measured runs",
                key=key,
                value=entry,
                nearest="for example sqlite:///meshtune.db, or sweep.csv in the form of configs/measured",
            )
        else:
            under(key, lambda entry=entry: read_text(base_dir / entry))


def check_storage(url: str, key: str = "storage") -> None:
    """Check that `url` names a journal file or a database of a known kind, and a file that there can be."""
    if "\0" in url:
        raise ConfigError("is not a database URL", key=key, value=shown_url(url))
    if is_journal(url):
        if not re.fullmatch(r"journal:///[^?]+", url):
            raise ConfigError(
                "names no journal file",
                key=key,
                value=url,
                nearest="for example journal:////shared/study.log; with three slashes the path is relative",
            )
    elif not re.match(r"^(sqlite|postgresql|mysql)(\+\w+)?://", url):
        raise ConfigError(
            "is not a database URL",
            key=key,
            value=shown_url(url),
            nearest="for example sqlite:///meshtune.db, postgresql://user@host/name or journal:////shared/study.log",
        )
    file = storage_file(url)
    if file is None:
        return
    try:
        file.exists()
    except OSError as error:
        raise ConfigError(
            f"names no file that there can be ({error.strerror})", key=key, value=shown_url(url)
        ) from None
    _check_length(file, url, key)


MOST_PATH_BYTES = {"sqlite": 504, "journal": 4_000}
"""Longest absolute path of each kind of file: SQLite's limit of 512, and Linux's of 4,096, less the ends of names."""

MOST_NAME_BYTES = {"sqlite": 247, "journal": 207}
"""Longest name of each kind of file: file systems' limit of 255, less `-journal`, or less what a lock's name adds."""


def _check_length(file: Path, url: str, key: str) -> None:
    """Check that the files that are made beside a storage's can have their names too."""
    kind = "journal" if is_journal(url) else "sqlite"
    for what, text, most in (
        ("path", os.path.abspath(file), MOST_PATH_BYTES[kind]),  # noqa: PTH100 # links stay: SQLite counts what it was given
        ("name", file.name, MOST_NAME_BYTES[kind]),
    ):
        length = len(os.fsencode(text))
        if length > most:
            raise ConfigError(
                f"its file's {what} has {length} bytes, and may have {most}: files beside it have longer ones",
                key=key,
                value=shown_url(url),
                nearest=f"give it a shorter {what}",
            )
