"""Search for damage of a study and for processes that dead drivers have left, with advice on each finding.

No study is changed, and no process is ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from optuna.trial import TrialState

from hardware.io.looking import NoRightsError
from trials.on_ray.leftovers import left_processes
from tuner.run.driver import DRIVER, is_held
from tuner.storage.integrity import trouble_of_storage
from tuner.storage.opening import find_study
from tuner.study_file.request import StudyRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Damage or leftover, with advice.

    Attributes:
        what: Kind of finding: `rights`, `storage`, `claim`, `trials` or `processes`.
        found: Sentence on the finding.
        advice: Sentence on what to do about it.
    """

    what: str
    found: str
    advice: str


def findings_of_study(request: StudyRequest) -> Iterator[Finding]:
    """Yield the findings on a study's storage, its claim and its trials.

    Raises:
        ConfigError: The storage cannot be opened although its file is sound.
    """
    try:
        trouble = trouble_of_storage(request.storage)
    except NoRightsError as error:
        yield Finding(what="rights", found=f"{request.storage}: {error}", advice=error.advice)
        return
    if trouble:
        yield Finding(
            what="storage",
            found=f"{request.storage}: {trouble}",
            advice="keep a copy of it as it is, and continue from a backup (`meshtune backup` makes them)",
        )
        return
    study = find_study(request.storage, request.name)
    if study is None:
        yield Finding(what="storage", found=f"it holds no study {request.name!r}", advice="`meshtune run` begins it")
        return
    held = study.user_attrs.get(DRIVER)
    if held and is_held(held):
        return
    if held:
        age_s = max(time.time() - held["renewed_s"], 0.0)
        yield Finding(
            what="claim",
            found=f"process {held['pid']} on {held['host']} claims the study, and has been silent for {age_s:.0f} s",
            advice="run the study again: it takes a dead driver's claim over",
        )
        # without a claim their driver has ended in order, and they wait for the next one
        running = [trial.number for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]
        if running:
            yield Finding(
                what="trials",
                found=f"{len(running)} trials are left running without a driver: {_some(running)}",
                advice="run the study again: it ends those that were measured, and starts the others under their "
                "numbers",
            )


def findings_of_machine() -> Iterator[Finding]:
    """Yield what dead drivers have left on this machine."""
    left = left_processes()
    for session in dict.fromkeys(process.session for process in left):
        own = [process.pid for process in left if process.session == session]
        yield Finding(
            what="processes",
            found=f"{len(own)} processes of {session} have outlived their driver",
            advice=f"end them: kill {' '.join(map(str, own))}",
        )


def _some(numbers: list[int], most: int = 10) -> str:
    """Return the first of some numbers in words."""
    return ", ".join(map(str, numbers[:most])) + (" ..." if len(numbers) > most else "")
