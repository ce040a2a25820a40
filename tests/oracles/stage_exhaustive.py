"""Exhaustive solver of the pipeline problem: the oracle of the tests, for a handful of layers.

It shares the meaning of a plan with the search (`plan_of`) and nothing else: no knapsack, no bound, no table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tuner.planners.pipeline.segments import SLACK
from tuner.planners.pipeline.stages import Pipeline, StagePlan, plan_of


def plan_stages_exhaustively(pipeline: Pipeline) -> StagePlan | None:
    """Return the best plan; None if no plan fits."""
    return min(_plans(pipeline), key=lambda plan: plan.step_s, default=None)


def _plans(pipeline: Pipeline) -> Iterator[StagePlan]:
    """Yield all plans that fit."""
    num_stages = pipeline.num_stages
    for kinds in itertools.product(range(pipeline.num_kinds), repeat=num_stages):
        too_many = np.bincount(kinds, minlength=pipeline.num_kinds) > pipeline.supply
        if too_many.any() or not all(pipeline.may_serve(kind, stage) for stage, kind in enumerate(kinds)):
            continue
        for cuts in itertools.combinations(range(1, pipeline.num_layers), num_stages - 1):
            bounds = (0, *cuts, pipeline.num_layers)
            num_layers = [end - first for first, end in itertools.pairwise(bounds)]
            for recomputed in itertools.product(
                *(_recomputations(pipeline, *ends) for ends in itertools.pairwise(bounds))
            ):
                plan = plan_of(pipeline, kinds, num_layers, recomputed)
                if all(
                    stage.memory_bytes <= pipeline.capacity_bytes[stage.kind] * (1 + SLACK) for stage in plan.stages
                ):
                    yield plan


def _recomputations(pipeline: Pipeline, first: int, end: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of recomputed layers of each type among the layers from `first` to `end`."""
    counts = np.bincount(pipeline.layer_type[first:end], minlength=pipeline.num_types)
    return itertools.product(*(range(count + 1) for count in counts))
