"""Reader of the entries of a study file's `history:`, each a database or a CSV file of published runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy.engine import URL, make_url

from hardware.io.errors import ConfigError
from tuner.search.earlier_runs import IsolatedSample, Past, together
from tuner.storage.history.isolated import read_isolated
from tuner.storage.history.published import published_group, read_published
from tuner.storage.history.stored import group_of, read_stored
from tuner.storage.history.tables import METADATA, has_tables
from tuner.storage.opening import reading
from tuner.study_file.named_storages import HistoryEntry, no_database
from tuner.study_file.request import StudyRequest
from tuner.study_file.storage_address import StorageAddress

LOCAL_HOSTS = (None, "", "localhost", "127.0.0.1", "::1")


def past_of(request: StudyRequest) -> Past:
    """Return the part of a study's history that informs its trials, and any calibration in its own storage.

    It leaves out the study's own trials and, where measured rows are replayed, those rows themselves. Runs of simulated
    worlds count only in a simulated study.

    Raises:
        ConfigError: An entry cannot be read.
    """
    try:
        past = read_past(
            request.history.entries, base_dir=Path(request.file).parent, own=(request.storage, request.name)
        )
    except ConfigError as error:
        raise error.in_file(request.file) from None
    past = together([past, _of_kin(request), Past(alone=_own_calibrations(request.storage))])
    replayed = {published_group(run) for run in request.problem.subject.rows}
    past = past.without_groups(replayed, "rows that the study itself replays")
    past = past.on_clock(request.trials.backend.clock)
    return past if request.trials.backend.origin == "synthetic" else past.measured


def _of_kin(request: StudyRequest) -> Past:
    """Return the runs of the study's kin, unless an entry of its history has them already."""
    storage = request.storage
    is_there = any(_is_same(entry, storage) for entry in request.history.entries)
    if not request.history.kin or is_there or not storage.may_exist:
        return Past()
    label = str(storage)
    past, groups = read_stored(storage, label, request.name), {group_of(name, label) for name in request.history.kin}
    return Past(
        runs=tuple(run for run in past.runs if run.group in groups),
        samples=tuple(sample for sample in past.samples if sample.group in groups),
    )


def read_past(
    entries: Sequence[HistoryEntry], *, base_dir: Path, own: tuple[StorageAddress, str] | None = None
) -> Past:
    """Return the runs and operator times of all entries.

    Args:
        entries: Addresses of databases, and paths of CSV files.
        base_dir: Folder in which relative paths of CSV files start.
        own: Storage and name of the study that asks, whose trials are left out.

    Raises:
        ConfigError: An entry cannot be read; the key says which.
    """
    parts = []
    for position, entry in enumerate(entries):
        try:
            parts.append(read_published(base_dir / entry) if isinstance(entry, str) else _read_database(entry, own))
        except ConfigError as error:
            key = f"history.{position}"
            if error.file:  # the mistake stands in the CSV file
                raise ConfigError(str(error), key=key) from None
            raise ConfigError(error.rule, key=key, value=str(entry), nearest=error.nearest) from None
    return together(parts)


def _read_database(address: StorageAddress, own: tuple[StorageAddress, str] | None) -> Past:
    """Return the runs of one database, without those of the study that asks."""
    is_own = own is not None and _is_same(address, own[0])
    if not address.may_exist:
        if is_own:
            return Past()  # the study's own storage, before its first run
        raise no_database(str(address))  # opening would make one
    return read_stored(address, str(address), own[1] if own is not None and is_own else None)


def _own_calibrations(address: StorageAddress) -> tuple[IsolatedSample, ...]:
    """Return the measurements of calibrations in a study's own storage, if it exists."""
    if not address.may_exist:
        return ()
    with reading(address, METADATA) as connection:
        return read_isolated(connection) if has_tables(connection) else ()


def _is_same(entry: HistoryEntry, storage: StorageAddress) -> bool:
    """Return whether an entry of `history:` is the database of a storage, however they are spelled."""
    return isinstance(entry, StorageAddress) and _key_of(entry) == _key_of(storage)


def _key_of(address: StorageAddress) -> tuple[object, ...]:
    """Return a key that is equal for two addresses of one database."""
    if address.file is not None:
        return ("file", address.file.resolve())
    try:
        parsed: URL = make_url(address.url)
    except ValueError:
        return (address.url,)
    host = parsed.host or parsed.query.get("host")
    return (
        parsed.get_backend_name(),
        "" if host in LOCAL_HOSTS else str(host).lower(),
        parsed.port or 5432,
        parsed.database or parsed.username,
    )
