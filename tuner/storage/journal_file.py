"""File of a journal: Optuna's, one JSON object a line, only ever appended to.

Optuna's own backend reads and writes it, and can read what three additions leave in it:

- An entry may have a condition, `only_if`: an attribute of a study must hold this text at the entry's place in the
  file. All readers see one order, so they all agree on which entries took effect. The lock keeps writers from mixing
  their bytes. It does not decide who came first, so a broken lock invalidates no claim.
- A writer that dies in the middle of an entry leaves a torn end. Optuna appends to it, loses that entry, and cannot
  read the file any more. Here the next writer turns the torn end into an entry that means nothing.
- An entry of `rows` holds rows of a table, and means nothing to Optuna.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from hardware.io.errors import quote_value
from tuner.storage.store import Condition

SET_STUDY_ATTRIBUTE = 2
CREATE_TRIAL = 4
"""Numbers of Optuna's JournalOperation, as a file holds them."""

NOTHING = {"op_code": SET_STUDY_ATTRIBUTE, "worker_id": "", "study_id": -1, "user_attr": {"": 0}}
"""Entry of a study that does not exist: every version of Optuna passes over it."""

_BEGINNING = b'{"op_code":'
"""First bytes of every entry."""

_READ_AT_ONCE = 1 << 20

Entry = dict[str, Any]


class JournalError(Exception):
    """File that cannot be read or written; the message says why."""


class JournalFile(JournalFileBackend):
    """Journal file at a path, which is created if it does not exist.

    Attributes:
        batch: Name of the last transaction.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._joined: list[Entry] | None = None
        self._condition: Condition | None = None
        self.batch = ""
        self._forget()
        with _file_errors():
            is_new = not path.exists()
            # absolute: the lock is a link beside the journal, and one that points nowhere has no age
            super().__init__(str(path.absolute()), _MendingLock(str(path.absolute())))
            if is_new:
                _flush_folder(path.absolute().parent)
            with path.open("rb") as file:
                begins_well = _BEGINNING.startswith(file.read(len(_BEGINNING)))
        if not begins_well:  # a text of one line, say, which mending would overwrite
            raise _no_entry(1, path)

    def _forget(self) -> None:
        """Forget what was read."""
        self._number = 0
        self._attributes: dict[tuple[int, str], Any] = {}
        self._dropped: set[str] = set()

    # What Optuna calls

    def read_logs(self, log_number_from: int) -> Generator[Entry, None, None]:
        """Return the entries from a number on, each as it took effect."""
        if log_number_from != self._number:
            self._forget()
        with _file_errors():
            for entry in self._unread():
                self._number += 1
                effect = self._apply(entry)
                if self._number > log_number_from:
                    yield effect

    def append_logs(self, logs: list[Entry]) -> None:
        """Write entries, on the disk when this returns; in a transaction they wait for its end."""
        if self._joined is None:
            with _file_errors():
                super().append_logs(logs)
            return
        self._joined += logs
        if any(log["op_code"] == CREATE_TRIAL for log in logs):  # its number is read back at once
            self._flush()

    # What Optuna lacks

    @contextmanager
    def together(self, condition: Condition) -> Iterator[None]:
        """Gather the appended entries; see `AbstractStore.together`. Reading them tells whether they took effect."""
        assert self._joined is None, "transactions do not nest"
        self._joined, self._condition, self.batch = [], condition, uuid.uuid4().hex
        try:
            yield
            self._joined = self._joined or [NOTHING]
            self._flush()
        finally:
            self._joined, self._condition = None, None

    def was_dropped(self, batch: str) -> bool:
        """Return whether a batch that has been read since it was appended did not take effect."""
        return batch in self._dropped

    def _flush(self) -> None:
        """Write the gathered entries of the transaction."""
        assert self._condition is not None
        wanted = {"study_id": self._condition.study_id, "key": self._condition.key, "text": self._condition.text}
        entries = [{**entry, "only_if": wanted, "batch": self.batch} for entry in self._joined or ()]
        self._joined = None
        if entries:
            self.append_logs(entries)
        self._joined = []

    def _unread(self) -> Iterator[Entry]:
        """Yield the entries behind those that were read."""
        try:
            for entry in super().read_logs(self._number):
                if not (isinstance(entry, dict) and "op_code" in entry):
                    raise _no_entry(self._number + 1, self._path)
                yield entry
            self._check_next()
        except (ValueError, RecursionError):
            raise _no_entry(self._number + 1, self._path) from None

    def _check_next(self) -> None:
        """Check that a complete line behind those that were read is JSON; Optuna passes over one at the end.

        Raises:
            ValueError: It is not.
        """
        with self._path.open("rb") as file:
            file.seek(self._log_number_offset[self._number])
            line = file.readline()
        if line.endswith(b"\n"):  # or else torn, or being written
            json.loads(line)

    def _apply(self, entry: Entry) -> Entry:
        """Return the entry, or NOTHING if its condition does not hold; keep the attributes that it sets."""
        if not self._holds(entry.get("only_if")):
            self._dropped.add(entry["batch"])
            return NOTHING
        if entry["op_code"] == SET_STUDY_ATTRIBUTE:
            for key, value in entry["user_attr"].items():
                self._attributes[entry["study_id"], key] = value
        return entry

    def _holds(self, wanted: Mapping[str, Any] | None) -> bool:
        """Return whether a condition holds at this place in the file."""
        if wanted is None:
            return True
        place = (wanted["study_id"], wanted["key"])
        text = json.dumps(self._attributes[place]) if place in self._attributes else None
        return bool(text == wanted["text"])


class _MendingLock(JournalFileSymlinkLock):
    """Optuna's lock of a journal, whose holder finds no torn end."""

    def acquire(self) -> bool:
        """Take the lock, as Optuna does, and mend the file's end."""
        super().acquire()
        try:
            _mend_torn_end(self._lock_target_file)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Give the lock back; nothing is wrong if somebody took us for dead and has removed it."""
        with suppress(RuntimeError):
            super().release()


def rows_in(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in an existing journal, from the entries that took effect, in their order."""
    for entry in JournalFile(path).read_logs(0):
        if "rows" in entry:
            yield entry["rows"]


def _no_entry(number: int, path: Path) -> JournalError:
    return JournalError(f"line {number} of {path} is no entry of a journal")


def _mend_torn_end(path: str) -> None:
    """Turn a torn last line into an entry that means nothing.

    It writes in place, and always the same bytes at the same place. So nothing behind it is lost, even if somebody else
    has taken our lock away, mended the line too and gone on.
    """
    file = os.open(path, os.O_RDWR)
    try:
        end = os.fstat(file).st_size
        start = _start_of_last_line(file, end)
        if start < end:
            nothing = json.dumps(NOTHING, separators=(",", ":")).encode()
            os.pwrite(file, nothing.ljust(end - start - 1) + b"\n", start)
            os.fsync(file)
    finally:
        os.close(file)


def _start_of_last_line(file: int, end: int) -> int:
    at = end
    while at > 0:
        before = max(0, at - _READ_AT_ONCE)
        found = os.pread(file, at - before, before).rfind(b"\n")
        if found >= 0:
            return before + found + 1
        at = before
    return 0


def _flush_folder(folder: Path) -> None:
    """Flush a folder: a new file survives the machine's death only then."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def foreign_entries(path: Path) -> Iterator[None]:
    """Report entries that are JSON, and yet nothing that Optuna or Meshtune writes.

    Raises:
        JournalError: The block met such an entry.
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
        raise JournalError(f"{path} has an entry that is none of a journal: {quote_value(error)}") from None


@contextmanager
def _file_errors() -> Iterator[None]:
    """Turn an error of the operating system into a JournalError."""
    try:
        yield
    except OSError as error:
        raise JournalError(error.strerror or str(error)) from None
