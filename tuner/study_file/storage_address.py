"""Addresses of storages: the databases and journals that `storage:` and `history:` of a study file name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

from hardware.io.errors import ConfigError, shown_url

MOST_PATH_BYTES = {"sqlite": 504, "journal": 4_000}
"""Longest absolute path of each kind of file: SQLite's limit of 512, and Linux's of 4,096, less the ends of names."""

MOST_NAME_BYTES = {"sqlite": 247, "journal": 207}
"""Longest name of each kind of file: file systems' limit of 255, less `-journal`, or less what a lock's name adds."""

_PASSWORD_VARIABLES = {"postgresql": "PGPASSWORD", "mysql": "MYSQL_PWD"}
"""Environment variable whose password a database's driver sends to whatever server it connects to."""

_FILE = re.compile(r"(?:sqlite(?:\+\w+)?|journal)://(?:/(file:)?([^?]*))?")
_LOCAL = re.compile(r"[^:]+://(?:[^@/?]*@)?(?:localhost|127\.0\.0\.1|\[::1\])?(?::\d+)?(?:/[^?]*)?(?:\?.*)?")
_OWN_PASSWORD = re.compile(r"://[^:/@]*:[^@]+@|[?&]password=[^&]")


class StorageKind(StrEnum):
    """Kind of storage; the value begins the URL of a file."""

    SQLITE = "sqlite"
    JOURNAL = "journal"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class StorageAddress:
    """Address of a storage, checked and parsed once; `parse` makes one. Its text has no password.

    Attributes:
        url: URL as it was given, with its password.
        kind: Kind of storage.
        file: File of a database or journal, relative to the working directory; empty for a database in memory, None for
            a database server.
    """

    url: str = field(repr=False)
    kind: StorageKind
    file: Path | None

    @classmethod
    def parse(cls, text: str, *, key: str = "storage") -> StorageAddress:
        """Parse the URL of a database or journal, where a relative path of a file starts at the working directory.

        Args:
            text: URL.
            key: Key of the study file that holds it, for errors.

        Raises:
            ConfigError: The text is no such URL, or there can be no such file.
        """
        address = cls(text, _kind_of(text, key), _file_of(text))
        if address.file is not None:
            _check_file(address.file, address, key)
        return address

    @classmethod
    def of_file(cls, file: Path, kind: StorageKind = StorageKind.SQLITE) -> StorageAddress:
        """Return the address of a database or journal in a file.

        Raises:
            ConfigError: No URL can name it.
        """
        if "?" in str(file):  # it would end the path
            rule = "cannot be named by a URL, because its path holds a ?"
            raise ConfigError(rule, key="storage", value=str(file), nearest="another place, by --storage")
        return cls.parse(f"{kind}:///{file}")

    def in_folder(self, folder: Path) -> StorageAddress:
        """Return the address with a relative path of a file taken from a folder, not from the working directory.

        Raises:
            ConfigError: No URL can name the file there.
        """
        found = _FILE.match(self.url)
        if self.file is None or self.file in (Path(), folder / self.file) or found is None:
            return self
        is_uri, name = found.groups()
        moved = str(folder / self.file)
        if is_uri:
            moved = quote(moved)
        elif "?" in moved:
            rule = "cannot be named by a URL, because its path holds a ?"
            raise ConfigError(rule, key="storage", value=moved, nearest="another place, by --storage")
        at = found.start(2)
        return StorageAddress.parse(self.url[:at] + moved + self.url[at + len(name) :])

    def __str__(self) -> str:
        """Return the URL without its password, for messages and results."""
        return shown_url(self.url)

    @property
    def place(self) -> str:
        """Place of the storage, with a file's absolute path and without passwords."""
        return str(self) if self.file is None else str(self.file.resolve())

    @property
    def may_exist(self) -> bool:
        """Whether there may be a storage, as far as that can be told without opening it."""
        return self.file is None or self.file.is_file()

    @property
    def has_options(self) -> bool:
        """Whether the URL has options of the database's driver, which only the driver can check."""
        return self.kind is not StorageKind.JOURNAL and "?" in self.url

    @property
    def is_local(self) -> bool:
        """Whether the address names no other machine."""
        query = parse_qsl(self.url.partition("?")[2])
        named = [value for key, value in query if key in ("host", "hostaddr", "service")]
        return bool(_LOCAL.fullmatch(self.url)) and all(value.startswith("/") and "," not in value for value in named)

    def without_environments_password(self) -> tuple[StorageAddress, str]:
        """Return an address of a study file so that its server never gets the password of the user's environment.

        The file may be somebody else's, and the server it names too. A server on this machine, or one that the user's
        environment names, may get the password; a URL with a password of its own never sends another. The text tells
        what was done; it is empty if that is nothing.
        """
        variable = _PASSWORD_VARIABLES.get(re.split(r"[+:]", self.url, maxsplit=1)[0], "")
        if not os.environ.get(variable) or _OWN_PASSWORD.search(self.url) or self.is_local:
            return self, ""
        # an explicit password keeps drivers from looking for one
        joined = f"{self.url}{'&' if '?' in self.url else '?'}password=not-sent"
        note = f"its server, which the study file names, does not get {variable} from your environment"
        return StorageAddress(joined, self.kind, self.file), note


def _kind_of(text: str, key: str) -> StorageKind:
    """Return the kind of storage that a URL names; refuse a text that names none."""
    if "\0" in text:
        raise ConfigError("is not a database URL", key=key, value=shown_url(text))
    if text.startswith("journal://"):
        if re.fullmatch(r"journal:///[^?]+", text):
            return StorageKind.JOURNAL
        raise ConfigError(
            "names no journal file",
            key=key,
            value=text,
            nearest="for example journal:////shared/study.log; with three slashes the path is relative",
        )
    found = re.match(r"(sqlite|postgresql|mysql)(\+\w+)?://", text)
    if found is None:
        raise ConfigError(
            "is not a database URL",
            key=key,
            value=shown_url(text),
            nearest="for example sqlite:///meshtune.db, postgresql://user@host/name or journal:////shared/study.log",
        )
    return StorageKind.SQLITE if found[1] == "sqlite" else StorageKind.SERVER


def _file_of(url: str) -> Path | None:
    """Return the file of a SQLite or journal URL; empty for a database in memory, None for a database server."""
    found = _FILE.match(url)
    if found is None:
        return None
    _, name = found.groups()
    if name in (None, ":memory:"):
        return Path()
    return Path(unquote(name) if found[1] else name)  # SQLite decodes names that begin with file:


def _check_file(file: Path, address: StorageAddress, key: str) -> None:
    """Check that there can be a file, and that the files that are made beside it can have their names too."""
    try:
        file.exists()
    except OSError as error:
        raise ConfigError(f"names no file that there can be ({error.strerror})", key=key, value=str(address)) from None
    for what, text, most in (
        ("path", os.path.abspath(file), MOST_PATH_BYTES[address.kind]),  # noqa: PTH100 # links stay: SQLite counts what it was given
        ("name", file.name, MOST_NAME_BYTES[address.kind]),
    ):
        length = len(os.fsencode(text))
        if length > most:
            raise ConfigError(
                f"its file's {what} has {length} bytes, and may have {most}: files beside it have longer ones",
                key=key,
                value=str(address),
                nearest=f"give it a shorter {what}",
            )
