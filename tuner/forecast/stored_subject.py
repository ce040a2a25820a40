"""Subject of a study in the study's storage: a run keeps plans of a user's step, and every later command takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from tuner.study_file.meaning import first_difference
from tuner.study_file.request import StudyRequest
from tuner.subject.ability import Ability

if TYPE_CHECKING:  # Optuna takes a second to load
    from optuna import Study


def restore_subject(request: StudyRequest, look: Callable[[], Study | None]) -> None:
    """Let the subject of a study take over what its stored counterpart holds of it, if anything.

    Args:
        request: Study.
        look: Function that looks up the stored counterpart; it is called only if the storage may hold something.
    """
    if not request.problem.subject.has(Ability.SHARDINGS):
        return
    study = look()
    if study is None:
        return
    from tuner.storage.record import MEANING, OWN_PLANS  # noqa: PLC0415 # it loads Optuna

    attributes = study.user_attrs
    meaning = attributes.get(MEANING)
    if meaning is None or first_difference(meaning, json.loads(json.dumps(request.meaning))):
        return
    request.problem.subject.restore(attributes.get(OWN_PLANS, {}))
