"""Save what a driver remembers of its study where the file of its storage has been lost meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, create_trial

from hardware.io.errors import ConfigError
from trials.backend import Observation
from tuner.run.driver import DRIVER
from tuner.run.endings import StorageLostError
from tuner.run.ledger import Ledger
from tuner.run.tasks import Tasks
from tuner.search.constraints import MEMORY_ATTRIBUTE
from tuner.search.observations import OBSERVATION, STATUS
from tuner.search.optuna_inside import trial_id_of
from tuner.search.population import ENDED, P_STAR
from tuner.storage.history import make_tables
from tuner.storage.opening import UnusableStorageError, open_store, storage_errors
from tuner.storage.record import MEANING, TrialRecord
from tuner.storage.sql_store import SqlStore
from tuner.storage.store import AbstractStore
from tuner.study_file.storage_address import StorageAddress

MOST_NAMES = 100
"""Number of names that are tried for the rescued file: an earlier one is never overwritten."""


@contextmanager
def rescued(address: StorageAddress, file: str, ledger: Ledger) -> Iterator[None]:
    """Save the study if the file of its storage is lost in the block.

    A database server keeps what it has, and so does a file whose disk is full.

    Raises:
        StorageLostError: The file of the storage was lost. The advice is how the study goes on.
        ConfigError: The storage cannot be used, and has lost nothing.
    """
    try:
        with storage_errors(address):
            yield
    except UnusableStorageError as error:
        lost = address.file
        if error.is_sound or lost in (None, Path()):
            raise
        saved = _save(ledger, beside=lost)
        raise StorageLostError(
            f"{error.rule}; what was measured is kept in {saved}",
            key=error.key,
            value=error.value,
            nearest=f"to go on: meshtune run {file} --storage sqlite:///{saved}",
        ) from None


def _save(ledger: Ledger, *, beside: Path) -> Path:
    """Write a study to a new database, and return its path."""
    path, left = _free_path(beside), ledger.claim.store
    is_copied = isinstance(left, SqlStore) and left.copy_to(path)
    if not is_copied:
        path.unlink(missing_ok=True)
    with closing(open_store(StorageAddress.of_file(path))) as store:
        (_complete if is_copied else _write_remembered)(ledger, store)
    return path


def _complete(ledger: Ledger, store: AbstractStore) -> None:
    """Add the observations that were not written any more to the copy of a study, and give up the claim on it."""
    copied = optuna.load_study(study_name=ledger.study.study_name, storage=store.storage)
    observations = dict(ledger.ended)
    for trial in copied.get_trials(deepcopy=False):
        observation = observations.get(trial.number)
        if observation is not None and OBSERVATION not in trial.user_attrs:
            store.storage.set_trial_user_attr(trial_id_of(trial), STATUS, observation.status.value)
            store.storage.set_trial_user_attr(trial_id_of(trial), OBSERVATION, observation.as_json())
    copied.set_user_attr(DRIVER, None)


def _write_remembered(ledger: Ledger, store: AbstractStore) -> None:
    """Write a study from its driver's memory, which lacks operator times and populations."""
    name, attributes, tasks = ledger.study.study_name, ledger.study.user_attrs, ledger.tasks
    records = {record.number: record for record in ledger.trials.records}
    places = {number: (place, observation) for place, (number, observation) in enumerate(ledger.ended)}
    make_tables(store)
    minimized = attributes.get(MEANING, {}).get("objective", {}).get("values", [None])
    made = optuna.create_study(study_name=name, storage=store.storage, directions=["minimize"] * len(minimized))
    for trial in ledger.trials.all:
        place, observation = places.get(trial.number, (None, None))
        made.add_trial(_whole(trial, tasks, records.get(trial.number), place, observation))
    for number, (_, observation) in places.items():
        tasks.keep_run(store, name, number, tasks.task_of_record(records.get(number)), observation)
    for key, value in attributes.items():
        if key != DRIVER:
            made.set_user_attr(key, value)


def _whole(
    trial: FrozenTrial, tasks: Tasks, record: TrialRecord | None, place: int | None, observation: Observation | None
) -> FrozenTrial:
    """Return a trial with the attributes that memory does not keep.

    Args:
        trial: Trial as memory has it.
        tasks: Tasks that trials may have.
        record: Record of the trial; None if it never got a candidate.
        place: Place among the trials in the order of their ends; None if it has not been observed.
        observation: Observation of the trial.
    """
    user_attrs, system_attrs = dict(trial.user_attrs), dict(trial.system_attrs)
    if trial.state.is_finished():
        user_attrs = {} if place is None else {ENDED: place}
        task = tasks.task_of_record(record)
        if record is not None and task.position is not None:
            user_attrs |= tasks.describe(task) | {P_STAR: record.p_star}
            excess = tasks.memory_excess(task, observation)
            system_attrs |= {} if excess is None else {MEMORY_ATTRIBUTE: excess}
    if observation is not None:
        user_attrs |= {STATUS: observation.status.value, OBSERVATION: observation.as_json()}
    return create_trial(
        state=trial.state,
        values=trial.values,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs=user_attrs,
        system_attrs=system_attrs,
        intermediate_values=trial.intermediate_values,
    )


def _free_path(beside: Path) -> Path:
    """Return a path that no file has, beside the lost file if there is room, else where there is."""
    for folder in (beside.parent, Path(), Path(tempfile.gettempdir())):
        if os.access(folder, os.W_OK):
            for number in range(1, MOST_NAMES):
                path = folder / f"{beside.stem}.rescued{f'-{number}' if number > 1 else ''}.db"
                if not path.exists():
                    return path
    raise ConfigError("no folder can be written to; what was measured is lost", key="storage", value=str(beside))
