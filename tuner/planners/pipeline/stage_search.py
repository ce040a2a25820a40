"""The pipeline problem as branch and bound sees it: one stage after the other gets a kind and its layers.

Letters as in `stage_bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from tuner.planners.engine.branch_and_bound import AbstractProblem
from tuner.planners.engine.frontier import Merit
from tuner.planners.engine.outcome import Incumbent
from tuner.planners.pipeline.segments import least_recompute, segment_times_s
from tuner.planners.pipeline.stage_bounds import MOST_CAPS, Used, add, stage_bounds
from tuner.planners.pipeline.stages import Pipeline, StagePlan, plan_of


class StageNode(NamedTuple):
    """The first stages of a plan.

    Attributes:
        used: Stages of each kind among them [K].
        placed: Layers that they hold.
        slowest_s: The longest of their times.
        sum_s: Of their times and the hops between them.
        bound: On the step time of every plan that begins so.
        kinds: Of each.
        num_layers: Of each.
    """

    used: Used
    placed: int
    slowest_s: float
    sum_s: float
    bound: float
    kinds: tuple[int, ...] = ()
    num_layers: tuple[int, ...] = ()


class StagesProblem(AbstractProblem[StageNode, StagePlan]):
    """The pipeline problem.

    Args:
        pipeline: What is to be planned.
        most_caps: Tightness of the bounds, see `stage_bounds`.
    """

    def __init__(self, pipeline: Pipeline, *, most_caps: int = MOST_CAPS) -> None:
        self.pipeline = pipeline
        self._times_s = segment_times_s(pipeline)
        self._bounds = stage_bounds(pipeline, self._times_s, most_caps)

    def root(self) -> StageNode:
        """No stage placed; its bound is inf if there is no plan."""
        bounds, (of_slowest, of_sum) = self._bounds, self.pipeline.weights
        least = math.inf
        if bounds is not None:
            least = float((of_slowest * bounds.floor_s + of_sum * bounds.sum_s[0][0, 0, 0]).min())
        return StageNode(used=(0,) * self.pipeline.num_kinds, placed=0, slowest_s=0.0, sum_s=0.0, bound=least)

    def children(self, node: StageNode, cutoff: float) -> Iterable[StageNode]:
        """The next stage with every kind and every number of layers that may lead below `cutoff`."""
        bounds = self._bounds
        assert bounds is not None, "a pipeline without a plan has no node that is open"
        of_slowest, of_sum = self.pipeline.weights
        stage = len(node.kinds)
        for kind in range(self.pipeline.num_kinds):
            used = add(node.used, kind)
            row = bounds.used[stage + 1].get(used)
            if row is None or not self.pipeline.may_serve(kind, stage):
                continue
            own_s = self._times_s[kind, stage, node.placed, : self.pipeline.num_layers - node.placed]
            after = slice(node.placed + 1, node.placed + 1 + len(own_s))
            hop_s = float(self.pipeline.hop_s[node.kinds[-1], kind]) if node.kinds else 0.0
            slowest_s = np.maximum(node.slowest_s, own_s)
            sum_s = node.sum_s + hop_s + own_s
            # the slowest of all is in an interval that ends no earlier than the slowest so far
            at_least_s = np.maximum(slowest_s, bounds.slowest_s[stage + 1][row, kind, after])
            costs = of_sum * (sum_s[:, None] + bounds.sum_s[stage + 1][row, kind, after])
            if of_slowest > 0:  # a single micro-batch waits for all stages alike; 0 times inf is no bound
                costs += of_slowest * np.maximum(at_least_s[:, None], bounds.floor_s)
            costs[slowest_s[:, None] > bounds.cap_s] = np.inf
            bound = np.maximum(costs.min(axis=1), node.bound)
            for width in np.flatnonzero(bound < cutoff).tolist():
                yield StageNode(
                    used=used,
                    placed=node.placed + width + 1,
                    slowest_s=float(slowest_s[width]),
                    sum_s=float(sum_s[width]),
                    bound=float(bound[width]),
                    kinds=(*node.kinds, kind),
                    num_layers=(*node.num_layers, width + 1),
                )

    def lower_bound(self, node: StageNode) -> float:
        """From the tables: exact but for the width of the interval that the slowest stage lies in."""
        return node.bound

    def complete(self, node: StageNode) -> Incumbent[StagePlan] | None:
        """The plan, once all stages are placed."""
        if len(node.kinds) < self.pipeline.num_stages:
            return None
        before = self.pipeline.layers_before()
        ends = np.cumsum(node.num_layers)
        counts = before[ends] - before[ends - np.array(node.num_layers)]
        recomputed = [
            least_recompute(self.pipeline, kind, stage, counts[[stage]])[1][0].tolist()
            for stage, kind in enumerate(node.kinds)
        ]
        plan = plan_of(self.pipeline, node.kinds, node.num_layers, recomputed)
        return Incumbent(cost=plan.step_s, solution=plan)

    def greedy(self, node: StageNode) -> Incumbent[StagePlan] | None:
        """Takes the child with the least bound again and again."""
        while math.isfinite(node.bound) and len(node.kinds) < self.pipeline.num_stages:
            node = min(self.children(node, math.inf), key=attrgetter("bound"))
        return self.complete(node) if math.isfinite(node.bound) else None

    def merit(self, node: StageNode) -> Merit:
        """What follows depends on the layers placed, the kinds used and the last one; then maximum and sum decide."""
        return Merit((len(node.kinds), node.placed, node.used, node.kinds[-1:]), (node.slowest_s, node.sum_s))
