"""Knobs of a study and of the catalog of its framework, with their sources and the reasons for or against them."""

from __future__ import annotations

from typing import Any

from hardware.io.errors import ConfigError
from trials.knobs.knob import Knob
from tuner.knobs.known_knob import KnownKnob
from tuner.knobs.recommended import Verdict
from tuner.study_file.request import StudyRequest
from tuner.subject.ability import Ability


def knob_rows(request: StudyRequest) -> list[dict[str, Any]]:
    """Return the knobs that a study searches, and then the other known knobs of its framework, as JSON."""
    verdicts = _verdicts(request)
    known = {one.name: one for one in request.problem.known_knobs}
    rows = [
        _searched(knob) | (_known(known[knob.name], verdicts.get(knob.name)) if knob.name in known else {})
        for knob in request.problem.knobs
    ]
    searched = {knob.name for knob in request.problem.knobs}
    rows += [
        _unsearched(verdict.known) | _known(verdict.known, verdict)
        for name, verdict in verdicts.items()
        if name not in searched
    ]
    return rows


def _verdicts(request: StudyRequest) -> dict[str, Verdict]:
    """Return the verdicts on the known knobs of the study's framework, by name; none if the catalog has none of it."""
    if request.knob_catalog is None or not request.problem.subject.has(Ability.KNOBS):
        return {}
    try:
        return {verdict.known.name: verdict for verdict in request.knob_catalog.verdicts}
    except ConfigError:
        if request.problem.known_knobs:
            raise
        return {}


def _searched(knob: Knob) -> dict[str, Any]:
    place = knob.place
    goes = [*sorted(place.flag_names)] + [place.environment] * bool(place.environment)
    goes += [f"{place.file}: {place.key}"] * bool(place.file)
    return {
        "name": knob.name,
        "searched": True,
        "values": list(knob.values),
        "today": knob.today,
        "when": str(knob.when) or None,
        "goes_to": goes,
        "affects": list(knob.affects),
    }


def _unsearched(known: KnownKnob) -> dict[str, Any]:
    return {
        "name": known.name,
        "searched": False,
        "values": [value.value for value in known.values],
        "when": known.when or None,
        "affects": list(known.affects),
    }


def _known(known: KnownKnob, verdict: Verdict | None) -> dict[str, Any]:
    judged = {} if verdict is None else {"recommended": verdict.is_recommended, "reason": verdict.reason}
    return {
        "text": known.text,
        "source": known.source,
        "effect": known.basis,
        "alters_results": known.alters_results,
        "requires": known.requires or None,
        **judged,
    }
