"""Private attributes of Optuna, which no other file reads.

Some have a public way that asks the database once more, and the others have none. A new version of Optuna may change
them, and then this file alone has to follow.
"""

from __future__ import annotations

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial

__all__ = ["FrozenStudy", "contains", "create_trial_in", "storage_of", "study_id_of", "trial_id_of"]


def study_id_of(study: Study | FrozenStudy) -> int:
    """Return the identifier of a study in its storage."""
    return study._study_id


def storage_of(study: Study) -> BaseStorage:
    """Return the storage of a study, through Optuna's cache."""
    return study._storage


def trial_id_of(trial: FrozenTrial) -> int:
    """Return the identifier of a trial in its storage."""
    return trial._trial_id


def create_trial_in(storage: BaseStorage, study: Study, trial: FrozenTrial) -> None:
    """Write a new trial with all that it holds, and give it its identifier; its number stays as it is."""
    trial._trial_id = storage.create_new_trial(study._study_id, trial)


def contains(distribution: BaseDistribution, value: float) -> bool:
    """Return whether a distribution holds a value, in the form that the storage keeps."""
    return distribution._contains(value)
