"""Parts of a problem that a study's storage decides: plans of a user's step, and whether layers may be unequal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tuner.study_file.meaning import first_difference
from tuner.study_file.request import StudyRequest
from tuner.subject.ability import Ability

if TYPE_CHECKING:  # Optuna takes a second to load
    from optuna import Study


def as_first_stored(request: StudyRequest, look: Callable[[], Study | None]) -> StudyRequest:
    """Return the request with equal layers if its stored counterpart is from before others were candidates unasked.

    Args:
        request: Study.
        look: Function that looks up the stored counterpart; it is called only if that may matter.
    """
    if not request.problem.options.gainful_layers:
        return request
    study = look()
    if study is None:
        return request
    from tuner.storage.record import MEANING  # noqa: PLC0415 # it loads Optuna

    meaning = study.user_attrs.get(MEANING)
    if meaning is None or "assignment" in meaning["space"]["opened"]:
        return request
    options = request.problem.options.with_equal_layers()
    space = request.meaning["space"] | {"opened": list(options.opened)}
    return replace(
        request, problem=replace(request.problem, options=options), meaning=request.meaning | {"space": space}
    )


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
