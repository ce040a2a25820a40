"""Times of every segment of layers on every stage, with the least recomputation that makes it fit.

Once the layers, position and kind of a stage are known, only its recomputation is left to choose, and both parts of the
objective grow with its time. A stage therefore recomputes what frees enough memory in the least time. That is a small
knapsack problem, solved for all segments at once. The remaining decisions of the pipeline problem are the cuts and the
kinds.

Letters as in `stages`; w is the number of a segment's layers, less one.
"""

from __future__ import annotations

import itertools

import numpy as np

from hardware.arrays import FloatArray, IntArray
from tuner.planners.pipeline.stages import Pipeline

SLACK = 1e-9
"""Fraction of a capacity by which a stage may exceed it: below the rounding error of a sum of bytes."""


def segment_times_s(pipeline: Pipeline) -> FloatArray:
    """Compute the time of each segment by kind, stage, first layer and w [K, S, L, L - S + 1].

    The time is inf where the segment ends after the last layer, does not fit, or leaves too few layers for other
    stages.
    """
    num_layers, num_stages = pipeline.num_layers, pipeline.num_stages
    before = pipeline.layers_before()
    first = np.arange(num_layers)[:, None]
    end = first + np.arange(1, num_layers - num_stages + 2)
    counts = before[np.minimum(end, num_layers)] - before[first]
    times = np.full((pipeline.num_kinds, num_stages, *end.shape), np.inf)
    for stage in range(num_stages):
        # Every stage before and after needs at least one layer.
        leaves_enough = (first >= stage) & (end <= num_layers - (num_stages - 1 - stage))
        if stage == 0:
            leaves_enough &= first == 0
        if stage == num_stages - 1:
            leaves_enough &= end == num_layers
        for kind in range(pipeline.num_kinds):
            if pipeline.may_serve(kind, stage):
                own = counts[leaves_enough]
                recompute_s, _ = least_recompute(pipeline, kind, stage, own)
                times[kind, stage][leaves_enough] = (
                    pipeline.fixed_s(kind, stage) + own @ pipeline.layer_s[kind] + recompute_s
                )
    return times


def least_recompute(pipeline: Pipeline, kind: int, stage: int, counts: IntArray) -> tuple[FloatArray, IntArray]:
    """Find the cheapest sufficient recomputation of n stages.

    All numbers of layers of all types but one are tried. Of the last type, as many layers are recomputed as are still
    needed.

    Args:
        pipeline: Pipeline problem.
        kind: Kind of the stages' devices.
        stage: Number of the stage.
        counts: Layers of each type of n stages [n, T].

    Returns:
        Time of the recomputation [n], and the number of recomputed layers of each type [n, T]; inf and zeros where
            nothing suffices.
    """
    capacity = pipeline.capacity_bytes[kind]
    in_flight = pipeline.in_flight[stage]
    held = counts @ (pipeline.state_bytes + in_flight * pipeline.kept_bytes) + pipeline.fixed_bytes(stage)
    # Bytes that recomputation must free, and bytes that each recomputed layer of a type frees.
    excess = held - capacity * (1 + SLACK)
    saved = in_flight * (pipeline.kept_bytes - pipeline.recomputed_bytes)
    cost_s = np.where(excess <= 0, 0.0, np.inf)
    recomputed = np.zeros_like(counts)
    open_ = np.flatnonzero((excess > 0) & (counts @ saved >= excess))
    if not len(open_):
        return cost_s, recomputed
    most = counts[open_].max(axis=0)
    # The type with the most layers is solved for, which leaves the fewest combinations to try.
    last = int(np.argmax(np.where(saved > 0, most, -1)))
    tried = [range(most[kind_] + 1 if saved[kind_] > 0 and kind_ != last else 1) for kind_ in range(len(most))]
    for numbers in itertools.product(*tried):
        number = np.tile(np.array(numbers), (len(open_), 1))
        still = excess[open_] - number @ saved
        number[:, last] = np.maximum(np.ceil(still / saved[last]), 0)
        time_s = number @ pipeline.recompute_s[kind]
        # A combination is possible if no type recomputes more layers than it has.
        better = (number <= counts[open_]).all(axis=1) & (time_s < cost_s[open_])
        cost_s[open_[better]] = time_s[better]
        recomputed[open_[better]] = number[better]
    return cost_s, recomputed
