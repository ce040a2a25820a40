"""Pipeline problem for branch and bound: stage after stage is given a kind of device and its layers.

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
        placed: Number of layers that they hold.
        slowest_s: Longest time of one of them [s].
        sum_s: Sum of their times and of the hops between them [s].
        bound: Lower bound of the step time of every plan that begins so [s].
        kinds: Kind of each of them.
        num_layers: Number of layers of each of them.
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
        pipeline: Pipeline to plan.
        most_caps: Tightness of the bounds, see `stage_bounds`.
    """

    def __init__(self, pipeline: Pipeline, *, most_caps: int = MOST_CAPS) -> None:
        """Compute the times of all segments and the tables of bounds."""
        self.pipeline = pipeline
        self._times_s = segment_times_s(pipeline)
        self._bounds = stage_bounds(pipeline, self._times_s, most_caps)

    def root(self) -> StageNode:
        """Return the node without stages; its bound is inf if there is no plan."""
        bounds, (of_slowest, of_sum) = self._bounds, self.pipeline.weights
        least = math.inf
        if bounds is not None:
            least = float((of_slowest * bounds.floor_s + of_sum * bounds.sum_s[0][0, 0, 0]).min())
        return StageNode(used=(0,) * self.pipeline.num_kinds, placed=0, slowest_s=0.0, sum_s=0.0, bound=least)

    def children(self, node: StageNode, cutoff: float) -> Iterable[StageNode]:
        """Yield the next stage with every kind and every number of layers that may lead below `cutoff`."""
        bounds = self._bounds
        assert bounds is not None, "a pipeline without a plan has no node that is open"
        of_slowest, of_sum = self.pipeline.weights
        stage = len(node.kinds)
        for kind in range(self.pipeline.num_kinds):
            used = add(node.used, kind)
            row = bounds.used[stage + 1].get(used)
            if row is None or not self.pipeline.may_serve(kind, stage):
                continue
            # All numbers of layers of the next stage are tried at once: arrays below are by that number, and by
            # interval.
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
        """Return the bound from the tables, exact except for the width of the slowest stage's interval."""
        return node.bound

    def complete(self, node: StageNode) -> Incumbent[StagePlan] | None:
        """Return the plan once all stages are placed."""
        if len(node.kinds) < self.pipeline.num_stages:
            return None
        # Layers of each type on every stage are differences of the counts before its two boundaries.
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
        """Take the child with the least bound repeatedly."""
        while math.isfinite(node.bound) and len(node.kinds) < self.pipeline.num_stages:
            node = min(self.children(node, math.inf), key=attrgetter("bound"))
        return self.complete(node) if math.isfinite(node.bound) else None

    def merit(self, node: StageNode) -> Merit:
        """Compare nodes with the same layers placed, kinds used and last kind, by their slowest stage and their sum."""
        return Merit((len(node.kinds), node.placed, node.used, node.kinds[-1:]), (node.slowest_s, node.sum_s))
