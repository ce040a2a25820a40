"""Subject of a study in the study's storage: a run keeps plans of a user's step, and every later command takes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tuner.study_file.config import StudyConfig
from tuner.study_file.meaning import first_difference
from tuner.study_file.storage_url import storage_file
from tuner.subject.contract import Ability

if TYPE_CHECKING:  # Optuna takes a second to load
    from optuna import Study


def restore_subject(config: StudyConfig, study: Study | None = None) -> None:
    """Let the subject of a study take over what its storage holds of it, if it holds anything.

    Args:
        config: Study.
        study: Its stored counterpart; looked up if it is not given.
    """
    if not config.subject.has(Ability.SHARDINGS):
        return  # the storage holds nothing of it
    file = storage_file(config.storage)
    if study is None and file is not None and not file.is_file():
        return
    from tuner.storage.opening import find_study  # noqa: PLC0415 # it loads Optuna
    from tuner.storage.record import MEANING, OWN_PLANS  # noqa: PLC0415 # it loads Optuna

    study = study or find_study(config.storage, config.name)
    attributes = {} if study is None else study.user_attrs
    meaning = attributes.get(MEANING)
    if meaning is None or first_difference(meaning, json.loads(json.dumps(config.meaning))):
        return
    config.subject.restore(attributes.get(OWN_PLANS, {}))
