"""A candidate's dimensions as parameters of an Optuna trial.

They stand there under their own names, with their own values, but for the assignment: Optuna holds a text only among
choices that never change, and which assignments are worth trying changes with the space. Its parameter is a number
made of the text, 0 where work is even, and the text itself is an attribute of the trial.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial

from costmodels.job.parallel_config import DEGREES, DIMENSIONS, ConfigGrid

ASSIGNMENT = "assignment"
_LARGEST = 2**31 - 1


def distribution_of(name: str, candidates: ConfigGrid) -> BaseDistribution:
    """The Optuna distribution of one dimension, of the same form whatever the candidates' range.

    A study whose space was narrowed could not be resumed otherwise.
    """
    if name in DIMENSIONS and not DIMENSIONS[name].is_number:
        return CategoricalDistribution(DIMENSIONS[name].choices)
    if name == ASSIGNMENT:
        return IntDistribution(0, _LARGEST)
    values = getattr(candidates, name)
    return IntDistribution(int(values.min()), int(values.max()), log=name in DEGREES)


def params_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a candidate's dimensions."""
    return {name: _number_of(value) if name == ASSIGNMENT else value for name, value in values.items()}


def values_of(trial: FrozenTrial) -> dict[str, Any]:
    """The dimensions of the candidate that a trial's parameters name; of one just asked for, without its assignment."""
    return {
        name: trial.user_attrs.get(ASSIGNMENT, "") if name == ASSIGNMENT else value
        for name, value in trial.params.items()
    }


def _number_of(assignment: str | int) -> int:
    """The number that stands for an assignment's text."""
    if isinstance(assignment, int):
        return assignment
    return 1 + zlib.crc32(assignment.encode()) % _LARGEST if assignment else 0
