"""Pareto front of the trials of a study that minimizes two values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tuner.forecast.pareto import pareto_front
from tuner.storage.record import TrialRecord, fastest
from tuner.subject.problem import Problem


def measured_front(problem: Problem, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the first completed trial of each candidate that no other beats in both values, the fastest first.

    Empty for a study that minimizes one value.
    """
    if len(problem.objective) == 1:
        return []
    completed = fastest(records, len(records))
    if not completed:
        return []
    is_on = pareto_front(np.array([record.values for record in completed]))
    return [record for record, on_front in zip(completed, is_on, strict=True) if on_front]


def front_json(problem: Problem, front: Sequence[TrialRecord]) -> list[dict[str, Any]]:
    """Return the trials of a front as objects: number, configuration, and both values by their names."""
    return [
        {"trial": record.number, "config": record.params, **dict(zip(problem.objective, record.values, strict=True))}
        for record in front
    ]
