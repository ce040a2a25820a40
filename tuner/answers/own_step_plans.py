"""Plans of a user's own step in its study's storage: a run keeps them, and every later command hands them out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tuner.study_file.config import StudyConfig
from tuner.study_file.meaning import first_difference

if TYPE_CHECKING:  # Optuna takes a second to load
    from optuna import Study


def restore_plans(config: StudyConfig, study: Study | None) -> StudyConfig:
    """Return the study of a user's own step after taking over the plans that its stored counterpart holds, if any."""
    if study is None:
        return config
    from tuner.storage.record import MEANING, OWN_PLANS  # noqa: PLC0415 # it loads Optuna

    assert config.own_step is not None, "the caller checked"
    attributes = study.user_attrs
    meaning = attributes.get(MEANING)
    if meaning is None or first_difference(meaning, json.loads(json.dumps(config.meaning))):
        return config
    config.own_step.restore(attributes.get(OWN_PLANS, {}))
    return config
