"""The file of a journal: one JSON object a line, only ever appended to, in the format of Optuna's journal files.

Beyond Optuna's own backend, which can read these files too:

- An entry may have a condition, `only_if`: an attribute of a study that must hold this text where the entry stands. All
  who read the file see the same order, so they all agree on what took effect. The lock keeps writers from mixing
  their bytes; who came first does not depend on it, and a lock that was broken costs no claim its meaning.
- A writer that dies in the middle of an entry leaves a torn end. Optuna appends to it, loses that entry, and cannot
  read the file any more. Here the next writer makes of the torn end an entry that means nothing.
- An entry of `rows` holds rows of a table, and means nothing to Optuna.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend, JournalFileSymlinkLock

from hardware.io.errors import shown
from tuner.storage.store import Condition

SET_STUDY_ATTRIBUTE = 2
CREATE_TRIAL = 4
"""Of Optuna's JournalOperation, which a file holds as numbers."""

NOTHING = {"op_code": SET_STUDY_ATTRIBUTE, "worker_id": "", "study_id": -1, "user_attr": {"": 0}}
"""An entry of a study that is not there: every version of Optuna passes over it."""

_BEGINNING = b'{"op_code":'
"""What every entry begins with."""

_READ_AT_ONCE = 1 << 20

Entry = dict[str, Any]


class JournalError(Exception):
    """The file can't be read or written; the message says why."""


class JournalFile(BaseJournalBackend):
    """One journal file; the `create` makes it."""

    def __init__(self, path: Path) -> None:
        # absolute: the lock is a link beside the journal, and one that points nowhere has no age
        self._path = path.absolute()
        self._lock = JournalFileSymlinkLock(str(self._path))
        self._joined: list[Entry] | None = None
        self._condition: Condition | None = None
        self._batch = ""
        self._start()

    def _start(self) -> None:
        self._number, self._offset = 0, 0
        self._attributes: dict[tuple[int, str], Any] = {}
        self._dropped: set[str] = set()

    # What Optuna calls

    def read_logs(self, log_number_from: int) -> Generator[Entry, None, None]:
        """The entries from a number on, each as it took effect."""
        if log_number_from != self._number:
            self._start()
        for entry in self._unread():
            if self._number > log_number_from:
                yield entry

    def append_logs(self, logs: list[Entry]) -> None:
        """Writes entries, on the disk when this returns; in a transaction they wait for its end."""
        if self._joined is None:
            self._append(logs)
            return
        self._joined += logs
        if any(log["op_code"] == CREATE_TRIAL for log in logs):  # its number is read back at once
            self._flush()

    # What Optuna lacks

    def create(self) -> None:
        """Makes the file if it is not there."""
        with _problems():
            is_new = not self._path.exists()
            os.close(os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666))
            if is_new:
                _flush_folder(self._path.parent)

    @contextmanager
    def together(self, condition: Condition) -> Iterator[None]:
        """Gathers what is appended; see `AbstractStore.together`. Whether it took effect is known once it is read."""
        assert self._joined is None, "transactions do not nest"
        self._joined, self._condition, self._batch = [], condition, uuid.uuid4().hex
        try:
            yield
            self._joined = self._joined or [NOTHING]
            self._flush()
        finally:
            self._joined, self._condition = None, None

    def was_dropped(self, batch: str) -> bool:
        """Whether a batch that has been read since it was appended did not take effect."""
        return batch in self._dropped

    @property
    def batch(self) -> str:
        """The name of the last transaction."""
        return self._batch

    def append_if(self, condition: Condition, entry: Entry) -> str:
        """Writes one entry under a condition; its batch."""
        batch = uuid.uuid4().hex
        self._append([_conditional(entry, condition, batch)])
        return batch

    def _flush(self) -> None:
        assert self._joined is not None
        assert self._condition is not None
        self._append([_conditional(entry, self._condition, self._batch) for entry in self._joined])
        self._joined = []

    def _append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        if not entries:
            return
        text = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries).encode()
        with _problems():
            self._lock.acquire()
            try:
                _mend_torn_end(self._path)
                _write(self._path, text)
            finally:
                with suppress(RuntimeError):  # somebody took us for dead and has removed it
                    self._lock.release()

    def _unread(self) -> Iterator[Entry]:
        """The entries behind those that were read, each as it takes effect; position and state move along."""
        with _problems(), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # somebody is writing it, or died over it
                entry = _entry(line, self._number + 1, self._path)
                self._number += 1
                self._offset += len(line)
                yield self._as_it_took_effect(entry)

    def _as_it_took_effect(self, entry: Entry) -> Entry:
        if not self._holds(entry.get("only_if")):
            self._dropped.add(entry["batch"])
            return NOTHING
        if entry["op_code"] == SET_STUDY_ATTRIBUTE:
            for key, value in entry["user_attr"].items():
                self._attributes[entry["study_id"], key] = value
        return entry

    def _holds(self, wanted: Mapping[str, Any] | None) -> bool:
        if wanted is None:
            return True
        place = (wanted["study_id"], wanted["key"])
        text = json.dumps(self._attributes[place]) if place in self._attributes else None
        return bool(text == wanted["text"])


def rows_in(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The entries of rows of a journal that is there, those that took effect, in their order."""
    file = JournalFile(path)
    for entry in file.read_logs(0):
        if "rows" in entry:
            yield entry["rows"]


def _conditional(entry: Mapping[str, Any], condition: Condition, batch: str) -> Entry:
    only_if = {"study_id": condition.study_id, "key": condition.key, "text": condition.text}
    return {**entry, "only_if": only_if, "batch": batch}


def _entry(line: bytes, number: int, path: Path) -> Entry:
    try:
        entry = json.loads(line)
        if isinstance(entry, dict) and "op_code" in entry:
            return entry
    except (ValueError, RecursionError):
        pass
    raise JournalError(f"line {number} of {path} is no entry of a journal")


def _mend_torn_end(path: Path) -> None:
    """Makes an entry that means nothing of the end of a file that is no whole line.

    In place, and always the same bytes at the same place: nothing behind it is lost, even if somebody else has taken
    our lock away, mended it too and gone on.
    """
    file = os.open(path, os.O_RDWR)
    try:
        end = os.fstat(file).st_size
        start = _start_of_last_line(file, end)
        if start == 0 and not _BEGINNING.startswith(os.pread(file, len(_BEGINNING), 0)):
            raise JournalError(f"{path} is no journal")  # a text of one line, say, which mending would overwrite
        if start < end:
            nothing = json.dumps(NOTHING, separators=(",", ":")).encode()
            os.pwrite(file, nothing.ljust(end - start - 1) + b"\n", start)
            os.fsync(file)
    finally:
        os.close(file)


def _start_of_last_line(file: int, end: int) -> int:
    """Where the text behind the last end of a line starts."""
    at = end
    while at > 0:
        before = max(0, at - _READ_AT_ONCE)
        found = os.pread(file, at - before, before).rfind(b"\n")
        if found >= 0:
            return before + found + 1
        at = before
    return 0


def _write(path: Path, text: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        left = memoryview(text)
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)


def _flush_folder(folder: Path) -> None:
    """A new file survives the machine's death only if its folder is flushed too."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def foreign_entries(path: Path) -> Iterator[None]:
    """Around what makes sense of entries: those that are JSON, and yet nothing that Optuna or Meshtune writes.

    Raises:
        JournalError: there is one.
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
        raise JournalError(f"{path} has an entry that is none of a journal: {shown(error)}") from None


@contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalError(error.strerror or str(error)) from None
