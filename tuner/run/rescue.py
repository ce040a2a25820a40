"""Save what a driver remembers of its study where the file of its storage has been lost meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, create_trial

from hardware.io.errors import ConfigError
from trials.backend import Observation
from tuner.run.driver import DRIVER
from tuner.run.endings import StorageLostError
from tuner.search.observations import OBSERVATION, STATUS
from tuner.storage.history import make_tables
from tuner.storage.opening import UnusableStorageError, open_store, storage_errors
from tuner.storage.record import MEANING
from tuner.storage.sql_store import SqlStore
from tuner.storage.store import AbstractStore
from tuner.study_file.storage_address import StorageAddress

MOST_NAMES = 100
"""Number of names that are tried for the rescued file: an earlier one is never overwritten."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Remembered:
    """Study as its driver remembers it.

    Attributes:
        store: Store that was lost.
        name: Name of the study.
        attributes: Attributes of the study.
        trials: Its trials by number; ended ones without their attributes.
        observations: Observation of each trial that has one, by number, in the order of their ends.
        describe: Function that returns the other attributes of an ended trial: those of users, and of the system.
        keep_run: Function that keeps a trial's run in a store for later studies.
    """

    store: AbstractStore
    name: str
    attributes: Mapping[str, Any]
    trials: Sequence[FrozenTrial]
    observations: Mapping[int, Observation]
    describe: Callable[[FrozenTrial], tuple[Mapping[str, Any], Mapping[str, Any]]]
    keep_run: Callable[[AbstractStore, int, Observation], None]


@contextmanager
def rescued(address: StorageAddress, file: str, remember: Callable[[], Remembered]) -> Iterator[None]:
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
        saved = _save(remember(), beside=lost)
        raise StorageLostError(
            f"{error.rule}; what was measured is kept in {saved}",
            key=error.key,
            value=error.value,
            nearest=f"to go on: meshtune run {file} --storage sqlite:///{saved}",
        ) from None


def _save(study: Remembered, *, beside: Path) -> Path:
    """Write a study to a new database, and return its path."""
    path = _free_path(beside)
    is_copied = isinstance(study.store, SqlStore) and study.store.copy_to(path)
    if not is_copied:
        path.unlink(missing_ok=True)
    with closing(open_store(StorageAddress.of_file(path))) as store:
        (_complete if is_copied else _write_remembered)(study, store)
    return path


def _complete(study: Remembered, store: AbstractStore) -> None:
    """Add the observations that were not written any more to the copy of a study, and give up the claim on it."""
    copied = optuna.load_study(study_name=study.name, storage=store.storage)
    for trial in copied.get_trials(deepcopy=False):
        observation = study.observations.get(trial.number)
        if observation is not None and OBSERVATION not in trial.user_attrs:
            store.storage.set_trial_user_attr(trial._trial_id, STATUS, observation.status.value)
            store.storage.set_trial_user_attr(trial._trial_id, OBSERVATION, observation.as_json())
    copied.set_user_attr(DRIVER, None)


def _write_remembered(study: Remembered, store: AbstractStore) -> None:
    """Write a study from its driver's memory, which lacks operator times and populations."""
    make_tables(store)
    minimized = study.attributes.get(MEANING, {}).get("objective", {}).get("values", [None])
    made = optuna.create_study(study_name=study.name, storage=store.storage, directions=["minimize"] * len(minimized))
    for trial in study.trials:
        made.add_trial(_whole(trial, study))
    for number, observation in study.observations.items():
        study.keep_run(store, number, observation)
    for key, value in study.attributes.items():
        if key != DRIVER:
            made.set_user_attr(key, value)


def _whole(trial: FrozenTrial, study: Remembered) -> FrozenTrial:
    """Return a trial with the attributes that memory does not keep."""
    observation = study.observations.get(trial.number)
    seen = {} if observation is None else {STATUS: observation.status.value, OBSERVATION: observation.as_json()}
    known, system = study.describe(trial) if trial.state.is_finished() else (trial.user_attrs, {})
    return create_trial(
        state=trial.state,
        values=trial.values,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs={**known, **seen},
        system_attrs={**trial.system_attrs, **system},
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
