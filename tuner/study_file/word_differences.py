"""Differences between the words of a script and those that trials of its current configuration start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from costmodels.job.parallel_config import ParallelConfig
from trials.command.backend import CommandBackend
from trials.command.own_words import Segment, segments_of
from trials.command.placeholders import FLAGS, KNOBS, ON_HOST, VARIABLE, fill_all, names_in
from trials.command.training_folder import TRAINING
from tuner.imports import LaunchCommand

_BY_STUDY = "the study has another value than the script"
_BY_LAYOUT = "the framework needs it with this layout"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Words of a script that a trial changes.

    Attributes:
        script: Words of the script; empty if the trial adds some.
        trial: Words of the trial, with placeholders for what only its hosts know; empty if it leaves the script's out.
        why: Reason.
    """

    script: str
    trial: str
    why: str

    def __str__(self) -> str:
        changed = f"{self.script or '(nothing)'} -> {self.trial or '(nothing)'}"
        return f"{changed}: {self.why}"


def word_differences(command: LaunchCommand, backend: CommandBackend, current: ParallelConfig) -> list[Difference]:
    """Return the differences in words, in variables and in options of the job, each with its reason.

    Args:
        command: Command that was read from the script.
        backend: Backend of the study that was made of it.
        current: Current configuration.
    """
    plan = backend.plan(current, 0)
    unknown = {name for word in (*plan.arguments, *command.words) for name in _names(word)}
    values = {name: f"{{{name}}}" for name in (*ON_HOST, *unknown)} | dict(plan.values)
    values |= {name: f"{{{name}}}" for name in TRAINING}  # folders of a trial
    trial = fill_all(plan.arguments, values, {FLAGS: plan.flags, KNOBS: plan.knobs})
    script = fill_all(command.words, values, {})
    found = _of_words(segments_of(script), segments_of(trial), command.reasons)
    variables = {name: value for name, value in plan.environment if (name, value) not in command.environment}
    found += [
        Difference(script="", trial=f"unset {name}" if value is None else f"{name}={value}", why=_BY_LAYOUT)
        for name, value in variables.items()
    ]
    own = dict(command.environment)
    named = {segment.name for segment in segments_of(script)}
    found += [
        Difference(script=name, trial=f"{name}={own[name]}" if name in own else "", why=why)
        for name, why in command.reasons.items()
        if not name.startswith("-") and name not in named
    ]
    changes = command.slurm.changes if command.slurm else ()
    return [*found, *(Difference(script=before, trial=after, why=why) for before, after, why in changes)]


def _names(word: str) -> list[str]:
    return [name for name in names_in(word) if name.startswith(VARIABLE)]


def _of_words(script: Sequence[Segment], trial: Sequence[Segment], reasons: Mapping[str, str]) -> list[Difference]:
    """Return the flags whose values differ, with those that only one of the two has; their order says nothing."""
    found = []
    for name in dict.fromkeys(segment.name for segment in (*script, *trial)):
        pairs = zip_longest(*([one for one in words if one.name == name] for words in (script, trial)))
        for before, after in pairs:
            if before is None or after is None or before.values != after.values or not name:
                shown = [" ".join(one.words) if one else "" for one in (before, after)]
                if shown[0] != shown[1]:
                    found.append(Difference(script=shown[0], trial=shown[1], why=reasons.get(name, _BY_STUDY)))
    return found
