"""Storage that reads another storage and replaces one study's data by texts for people.

The dashboard shows a study's attributes, and notes and artifacts that it stores among Optuna's system attributes
(optuna_dashboard/_note.py and artifact/_backend.py of 0.21). `StudyView` answers with our texts in their places:

    user attributes of the study and its trials   figures for people, instead of the JSON from which studies resume
    dashboard:note_str:0                          the study's note
    dashboard:TRIAL_ID:note_str:0                 a trial's note
    dashboard:artifacts:TRIAL_ID:ID               a log of the trial
    artifacts:ID                                  the study's report
    dashboard:plot_data:losses:0                  the losses of the training inside of which the trials ran

All texts are composed when they are read. A user's notes are written to the storage itself and take precedence over
ours. If there are many trials, only the fastest and the latest have notes. Other studies of the storage are shown
unchanged.
"""

from __future__ import annotations

import copy
import heapq
import math
import re
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from optuna import Study
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from plotly.io import to_json

from tuner.dashboard.artifacts import OfferedFile, StudyFiles
from tuner.dashboard.snapshot import Key, Snapshot, snapshot_of, step_errors
from tuner.dashboard.study_note import study_facts, study_note
from tuner.dashboard.trial_note import trial_facts, trial_note
from tuner.report.sections.training import loss_figure, stretches
from tuner.run.driver import DRIVER
from tuner.run.studies import is_driven
from tuner.search.optuna_inside import FrozenStudy, study_id_of, trial_id_of
from tuner.storage.record import SPENT_S, TrialRecord
from tuner.study_file.request import StudyRequest

NOTES = "dashboard:"
"""Prefix of the system attributes under which the dashboard keeps notes."""

LOSSES = f"{NOTES}plot_data:losses:0"
"""System attribute with a figure of the study's own (optuna_dashboard/_custom_plot_data.py)."""

FRESH_S = 1.0
"""Largest age of composed texts [s]: one page requests them several times."""

MOST_NOTES = 400
"""Largest number of trials with notes: for each trial shown, the dashboard scans the notes of all."""

_NOTE_TEXT = re.compile(r"(dashboard:(?:\d+:)?)note_str:\d+")
_NOTE_VERSION = re.compile(r"dashboard:(?:\d+:)?note_ver")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPage:
    """Texts of one trial.

    Attributes:
        facts: Figures shown as the trial's attributes.
        note: Note of the trial; None if it has none.
    """

    facts: Mapping[str, Any]
    note: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """Texts of a study at one moment.

    Attributes:
        facts: Figures shown as the study's attributes.
        notes: Notes by the prefix of their attributes' names.
        files: Files offered by the pages, and their own figure, as system attributes.
        trials: Trials in the order of their numbers, with figures in place of their attributes.
    """

    facts: Mapping[str, Any]
    notes: Mapping[str, str]
    files: Mapping[str, str]
    trials: Sequence[FrozenTrial]

    def over(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Add notes and files to the study's system attributes, except if the user has written a note."""
        kept = _readable(stored)
        written = {match[1] for key, text in kept.items() if text and (match := _NOTE_TEXT.fullmatch(key)) is not None}
        found = {**kept, **self.files}
        for prefix, note in self.notes.items():
            if prefix not in written:
                found.setdefault(f"{prefix}note_ver", 0)
                found[f"{prefix}note_str:0"] = note
        return found


def _readable(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a study's system attributes without notes that the dashboard could not read: it would show no study."""
    parts: dict[str, set[str]] = {}
    for key, value in stored.items():
        prefix, note, part = key.partition("note_str:")
        if note and key.startswith(NOTES) and isinstance(value, str):
            parts.setdefault(prefix, set()).add(part)
    whole = {prefix for prefix, found in parts.items() if found == {str(part) for part in range(len(found))}}

    def is_readable(key: str, value: Any) -> bool:
        prefix, note, _ = key.partition("note_")
        if not key.startswith(NOTES) or not note:
            return True
        if _NOTE_TEXT.fullmatch(key):
            return isinstance(value, str) and prefix in whole
        return _NOTE_VERSION.fullmatch(key) is not None and type(value) is int

    return {key: value for key, value in stored.items() if is_readable(key, value)}


class StudyView(BaseStorage):
    """Storage as the dashboard's server sees it.

    Args:
        storage: Storage that holds the study.
        study: Stored study.
        request: Study as its file describes it.
        files: Files that the pages offer.
        clock: Function that returns a time [s].
    """

    def __init__(
        self,
        storage: BaseStorage,
        study: Study,
        request: StudyRequest,
        files: StudyFiles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage, self._study, self._request, self._files = storage, study, request, files
        self._study_id = storage.get_study_id_from_name(study.study_name)
        self._lock = threading.Lock()
        self._clock, self._read_s = clock, 0.0
        self._seen: object = None
        self._pages: Pages | None = None
        self._ended: dict[int, TrialPage] = {}
        self._errors: dict[Key, float] = {}

    @property
    def study_id(self) -> int:
        """Identifier of the study whose data are replaced."""
        return self._study_id

    def pages(self) -> Pages:
        """Return the current texts, at most a second old; they are composed anew if the study has changed."""
        with self._lock:
            if self._pages is None or self._clock() - self._read_s >= FRESH_S:
                self._pages = self._read()
                self._read_s = self._clock()
            return self._pages

    def _read(self) -> Pages:
        attributes, trials = self._storage.get_study_user_attrs(self._study_id), self._study.get_trials(deepcopy=False)
        running, logs = is_driven(attributes), self._files.logs()
        moves = [(trial.state, len(trial.user_attrs), len(trial.intermediate_values)) for trial in trials]
        # The driver's heartbeat and its spent time change all the time without changing any text.
        told = {key: value for key, value in attributes.items() if key not in {DRIVER, SPENT_S}}
        seen = (told, moves, running, {number: len(files) for number, files in logs.items()})
        if self._pages is not None and seen == self._seen:
            return self._pages
        made = self._compose(snapshot_of(self._request, self._study, attributes, is_running=running), trials, logs)
        self._seen = seen
        return made

    def _compose(
        self, snapshot: Snapshot, trials: Sequence[FrozenTrial], logs: Mapping[int, Sequence[OfferedFile]]
    ) -> Pages:
        noted = noted_trials(snapshot.records)
        told = self._compose_trials(snapshot, logs, noted)
        notes, shown = {NOTES: study_note(snapshot)}, []
        report = self._files.report()
        files = {f"artifacts:{report.identity}": report.entry}
        if found := stretches(snapshot.records):
            figure = loss_figure(found).update_layout(title="Loss of the training", template="plotly_white")
            files[LOSSES] = to_json(figure, engine="json")
        for trial in trials:
            page = told.get(trial.number)
            shown.append(trial if page is None else _replace_attributes(trial, page.facts))
            if page is not None and page.note is not None:
                notes[f"{NOTES}{trial_id_of(trial)}:"] = page.note
            for file in logs.get(trial.number, ()):
                files[f"dashboard:artifacts:{trial_id_of(trial)}:{file.identity}"] = file.entry
        return Pages(facts=study_facts(snapshot), notes=notes, files=files, trials=shown)

    def _compose_trials(
        self, snapshot: Snapshot, logs: Mapping[int, Sequence[OfferedFile]], noted: Container[int]
    ) -> Mapping[int, TrialPage]:
        """Compose each trial's texts by its number; those of ended trials are kept, since they no longer change."""
        missing = {
            tuple(record.params.values()): record.params
            for record in snapshot.records
            if record.number in noted and record.prediction and tuple(record.params.values()) not in self._errors
        }
        self._errors |= step_errors(self._request.problem, list(missing.values()))
        found = {}
        for record in snapshot.records:
            page, has_note = self._ended.get(record.number), record.number in noted
            if page is None or (page.note is not None) != has_note:
                note = self._note(snapshot, record, logs.get(record.number, ())) if has_note else None
                facts = trial_facts(record, snapshot.reference) if page is None else page.facts
                page = TrialPage(facts=facts, note=note)
            if record.finished:
                self._ended[record.number] = page
            found[record.number] = page
        return found

    def _note(self, snapshot: Snapshot, record: TrialRecord, logs: Sequence[OfferedFile]) -> str:
        error = self._errors.get(tuple(record.params.values()))
        return trial_note(self._request, record, snapshot.reference, error, [file.name for file in logs])

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return all studies, with our texts in the selected one."""
        studies = sorted(self._storage.get_all_studies(), key=study_id_of)
        return [self._describe(study) for study in studies]

    def _describe(self, study: FrozenStudy) -> FrozenStudy:
        if study_id_of(study) != self._study_id:
            return study
        pages, told = self.pages(), copy.copy(study)
        told.user_attrs, told.system_attrs = dict(pages.facts), pages.over(study.system_attrs)
        return told

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return figures for people in place of the study's user attributes."""
        if study_id == self._study_id:
            return dict(self.pages().facts)
        return self._storage.get_study_user_attrs(study_id)

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the study's system attributes, with notes and files added."""
        stored = self._storage.get_study_system_attrs(study_id)
        return self.pages().over(stored) if study_id == self._study_id else stored

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials, with figures in place of their attributes."""
        if study_id != self._study_id:
            return self._storage.get_all_trials(study_id, deepcopy=deepcopy, states=states)
        found = [trial for trial in self.pages().trials if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return one trial, with figures in place of its attributes."""
        ours = (trial for trial in self.pages().trials if trial_id_of(trial) == trial_id)
        return next(ours, None) or self._storage.get_trial(trial_id)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """Store a note; other attributes must not be written."""
        if not key.startswith(NOTES):
            self._refuse()
        self._storage.set_study_system_attr(study_id, key, value)

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the stored identifier."""
        return self._storage.get_study_id_from_name(study_name)

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the stored name."""
        return self._storage.get_study_name_from_id(study_id)

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return the stored directions."""
        return self._storage.get_study_directions(study_id)

    def remove_session(self) -> None:
        """Remove the storage's session of this thread."""
        self._storage.remove_session()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the server refuses requests that would write anything but a note")

    create_new_study = delete_study = set_study_user_attr = create_new_trial = set_trial_param = _refuse
    set_trial_state_values = set_trial_intermediate_value = set_trial_user_attr = set_trial_system_attr = _refuse


def noted_trials(records: Sequence[TrialRecord]) -> Container[int]:
    """Select the trials that have notes: if there are more than MOST_NOTES, the fastest and the latest."""
    if len(records) <= MOST_NOTES:
        return {record.number for record in records}
    half = MOST_NOTES // 2
    fastest = heapq.nsmallest(half, (record for record in records if record.step_time_s), key=_step_s)
    return {record.number for record in (*fastest, *records[-half:])}


def _step_s(record: TrialRecord) -> float:
    return record.step_time_s or math.inf


def _replace_attributes(trial: FrozenTrial, attributes: Mapping[str, Any]) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.user_attrs = dict(attributes)
    return shown
