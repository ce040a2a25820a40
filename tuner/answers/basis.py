"""Basis of an answer: the trials of the study, or the cost model alone. Every command tells it in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.forecast.planned_candidates import prepare_stored
from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import OnProgress, ignore_progress
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.request import StudyRequest

if TYPE_CHECKING:  # Optuna and the surrogates take seconds to load
    from optuna import Study

    from tuner.answers.taught import Taught


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Basis:
    """What an answer rests on.

    Attributes:
        place: Place of the storage that was looked in.
        name: Name of the study.
        taught: What its trials taught; None without any.
        why_not: Clause on why they taught nothing; empty if they did.
    """

    place: str
    name: str
    taught: Taught | None = None
    why_not: str = ""

    @property
    def in_words(self) -> str:
        """Sentence that names the trials behind an answer, or the storage that was searched for some."""
        if self.taught is None:
            looked = f"trials of study {self.name} looked for in {self.place}: {self.why_not}"
            return f"Predicted by the cost model alone; {looked}."
        num_trials, differing = self.taught.num_trials, self.taught.in_words
        trials = f"{num_trials:,} trial{'s' * (num_trials != 1)} of study {self.name} in {self.place}"
        trials += f", {differing}" if differing else ""
        return f"By {trials}: what was measured, and of the rest the mean of the posterior."

    def in_words_but(self, untaught: str) -> str:
        """Return that sentence with a clause on what the trials say nothing of; the clause may be empty."""
        return f"{self.in_words.removesuffix('.')}; {untaught}." if untaught else self.in_words

    def as_json(self) -> dict[str, Any]:
        """Return the basis by the keys that all commands share."""
        return {"taught_by_trials": 0 if self.taught is None else self.taught.num_trials, "looked_in": self.place}


def basis_of(
    request: StudyRequest,
    stored: StoredStudies,
    prepared: Prepared | None = None,
    *,
    on_progress: OnProgress = ignore_progress,
) -> Basis:
    """Return what the answers of a study rest on.

    Args:
        request: Study.
        stored: Studies in its storage.
        prepared: Study with the plans of all its candidates, where the caller has it.
        on_progress: Function that is told what takes seconds.

    Raises:
        ConfigError: The storage or the history cannot be read.
    """
    study = stored.look(request.name)
    if study is None:
        found = "there is none" if request.storage.may_exist else "there is no such storage"
        return Basis(place=place_of(request), name=request.name, why_not=found)
    return basis_in(prepared or prepare_stored(request, study), study, on_progress=on_progress)


def basis_in(prepared: Prepared, study: Study | None, *, on_progress: OnProgress = ignore_progress) -> Basis:
    """Return what the answers of a prepared study rest on, whose stored counterpart the caller has looked up."""
    place, name = place_of(prepared.request), prepared.request.name
    if study is None:
        return Basis(place=place, name=name, why_not="there is none")
    from tuner.answers.taught import taught_by  # noqa: PLC0415 # it loads Optuna

    found = taught_by(prepared, study, on_progress=on_progress)
    if isinstance(found, str):
        return Basis(place=place, name=name, why_not=found)
    return Basis(place=place, name=name, taught=found)


def place_of(request: StudyRequest) -> str:
    """Return the place of a study's storage, as short as it can be said."""
    file = request.storage.file
    return str(request.storage) if file is None or not file.name else str(file)
