"""Dimensions of a candidate as parameters of an Optuna trial.

Parameters have the dimensions' own names and values, except uneven work. Optuna holds a text only among choices that
never change, and the assignments worth trying change with the space. So its parameter is a number made of the text, 0
where work is even, and the text itself is an attribute of the trial.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial

from costmodels.job.parallel_config import DEGREES, DIMENSIONS, HAND, ConfigGrid
from tuner.search.optuna_inside import contains

ASSIGNMENT = "assignment"
PLAN = "plan"
_LARGEST = 2**31 - 1


def distribution_of(name: str, candidates: ConfigGrid) -> BaseDistribution:
    """Return the Optuna distribution of one dimension, of the same form whatever the candidates' range.

    A study whose space was narrowed could not be resumed otherwise.
    """
    if name in DIMENSIONS and not DIMENSIONS[name].is_number:
        return CategoricalDistribution(DIMENSIONS[name].choices)
    if name == ASSIGNMENT:
        return IntDistribution(0, _LARGEST)
    values = getattr(candidates, name)
    return IntDistribution(int(values.min()), int(values.max()), log=name in DEGREES)


def params_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a candidate's dimensions."""
    return {name: _hash_assignment(value) if name == ASSIGNMENT else value for name, value in values.items()}


def parameter_of(name: str, value: Any, distribution: BaseDistribution) -> Any:
    """Return a candidate's value of one dimension as the distribution of a trial takes it.

    Args:
        name: Name of the dimension.
        value: Value of the candidate, as in `params_of`.
        distribution: Distribution that the trial suggests the dimension by.

    Raises:
        ValueError: The distribution does not hold the value.
    """
    if isinstance(distribution, CategoricalDistribution):
        is_held = value in distribution.choices
    else:
        is_held = not isinstance(value, str) and contains(distribution, float(value))
    if not is_held:
        raise ValueError(
            f"`{name}` must be suggested by a distribution that holds the values of all candidates, but {value!r} of "
            f"the next one is not in {distribution}; ThompsonSampler.search_space has a distribution that does."
        )
    return float(value) if isinstance(distribution, FloatDistribution) else value


def named_values(params: Mapping[str, Any], dimensions: Collection[str]) -> dict[str, Any] | None:
    """Return those parameters of a trial that are dimensions of a grid; None if it ran a plan that the grid lacks.

    A trial without the parameter, such as one from before there were others, ran the plan by hand.
    """
    plan = params.get(PLAN, HAND)
    if PLAN not in dimensions:
        return None if plan != HAND else {name: params[name] for name in dimensions if name in params}
    with_plan = {**params, PLAN: plan}
    return {name: with_plan[name] for name in dimensions if name in with_plan}


def values_of(trial: FrozenTrial) -> dict[str, Any]:
    """Return the dimensions of a trial's candidate; of a trial just asked for, without its uneven work."""
    return {
        name: trial.user_attrs.get(ASSIGNMENT, "") if name == ASSIGNMENT else value
        for name, value in trial.params.items()
    }


def _hash_assignment(assignment: str | int) -> int:
    """Return the number that stands for the text of uneven work."""
    if isinstance(assignment, int):
        return assignment
    return 1 + zlib.crc32(assignment.encode()) % _LARGEST if assignment else 0
