"""Lower bounds of the remaining stages, for every state of the pipeline search, as tables computed backwards.

A state consists of the number of stages placed, the number of stages of each kind, the kind of the last one, and the
number of layers placed. For each state there is a table of the least possible slowest stage, and one of the least
possible sum of stages and hops.

The two minima come from different plans: the least sum crowds layers on the fast kinds, at the cost of the slowest
stage. There is therefore one table of sums for each of several caps: the least sum if no stage takes longer than the
cap. A plan whose slowest stage lies between two caps has at least the sum under the upper cap, and at least the lower
cap as its slowest stage. The best plan lies in one of the intervals.

Letters as in `stages`; U numbers the ways to use kinds, J caps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hardware.arrays import FloatArray
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.pipeline.stages import Pipeline

MOST_CAPS = 24
"""Number of caps; with more of them the tables take longer than the nodes that they save (measured)."""

Used = tuple[int, ...]
"""Number of stages in use of each kind [K]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageBounds:
    """Tables of lower bounds.

    Attributes:
        used: Row of every way to use kinds, for each number of stages placed.
        slowest_s: Least slowest stage to come, for each number of stages placed [U, K, L + 1].
        sum_s: Least sum to come under each cap, for each number of stages placed [U, K, L + 1, J].
        floor_s: Least time of the slowest stage in each interval [J].
        cap_s: Longest time of the slowest stage in each interval [J].
    """

    used: tuple[dict[Used, int], ...]
    slowest_s: tuple[FloatArray, ...]
    sum_s: tuple[FloatArray, ...]
    floor_s: FloatArray
    cap_s: FloatArray


def stage_bounds(pipeline: Pipeline, times_s: FloatArray, most_caps: int = MOST_CAPS) -> StageBounds | None:
    """Compute the tables of a pipeline; None if it has no plan.

    Args:
        pipeline: Pipeline problem.
        times_s: Time of every segment, from `segment_times_s`.
        most_caps: Most caps; more of them make tighter bounds and take longer.
    """
    used = _ways_to_use(pipeline)
    slowest = _to_go(times_s, used, np.maximum, np.zeros_like(pipeline.hop_s))
    least_slowest_s = _of_root(slowest)
    if np.isinf(least_slowest_s):
        return None

    def sums(cap_s: float) -> tuple[FloatArray, ...]:
        """Return the least sums to come if no stage takes longer than a cap."""
        return _to_go(np.where(times_s <= cap_s, times_s, np.inf), used, np.add, pipeline.hop_s)

    of_slowest, of_sum = pipeline.weights
    # the best of the plans with the least possible slowest stage bounds the slowest stage of all that are better
    cost_s = of_slowest * least_slowest_s + of_sum * _of_root(sums(least_slowest_s))
    longest_s = (cost_s - of_sum * _of_root(sums(np.inf))) / of_slowest if of_slowest > 0 else np.inf
    is_possible = (times_s >= least_slowest_s) & (times_s <= max(longest_s, least_slowest_s) * (1 + ROUNDING))
    # The slowest stage takes one of these times. Caps divide them into intervals of about equally many.
    values = np.unique(times_s[is_possible & np.isfinite(times_s)])
    edges = np.unique(np.linspace(0, len(values), min(most_caps, len(values)) + 1).round().astype(np.int64))
    cap_s = values[edges[1:] - 1]
    tables = [sums(float(cap)) for cap in cap_s]
    return StageBounds(
        used=used,
        slowest_s=slowest,
        sum_s=tuple(np.stack(of_caps, axis=-1) for of_caps in zip(*tables, strict=True)),
        floor_s=values[edges[:-1]],
        cap_s=cap_s,
    )


def _ways_to_use(pipeline: Pipeline) -> tuple[dict[Used, int], ...]:
    """Number the ways to use kinds, for each number of stages placed."""
    layers: list[set[Used]] = [{(0,) * pipeline.num_kinds}]
    for stage in range(pipeline.num_stages):
        layers.append(
            {
                add(used, kind)
                for used in layers[-1]
                for kind in range(pipeline.num_kinds)
                if used[kind] < pipeline.supply[kind] and pipeline.may_serve(kind, stage)
            }
        )
    return tuple({used: row for row, used in enumerate(sorted(layer))} for layer in layers)


def add(used: Used, kind: int) -> Used:
    """Add one stage of a kind."""
    return (*used[:kind], used[kind] + 1, *used[kind + 1 :])


def _to_go(
    times_s: FloatArray, used: tuple[dict[Used, int], ...], join: np.ufunc, hop_s: FloatArray
) -> tuple[FloatArray, ...]:
    """Compute the least of what is to come from every state; inf where nothing can come.

    Args:
        times_s: Time of every segment [K, S, L, w].
        used: Ways to use kinds, from `_ways_to_use`.
        join: Operation that joins a stage and the stages after it to one number: maximum or sum.
        hop_s: Time added between two stages [K, K].

    Returns:
        One table for each number of stages placed [U, K, L + 1].
    """
    num_kinds, num_stages, num_layers, _ = times_s.shape
    end = np.full((len(used[-1]), num_kinds, num_layers + 1), np.inf)
    end[:, :, num_layers] = 0.0
    tables = [end]
    for stage in reversed(range(num_stages)):
        table = np.full((len(used[stage]), num_kinds, num_layers + 1), np.inf)
        for kind in range(num_kinds):
            # Pair each way to use kinds with the way that follows once this stage has the kind.
            rows = [(row, used[stage + 1].get(add(way, kind))) for way, row in used[stage].items()]
            pairs = [(row, next_row) for row, next_row in rows if next_row is not None]
            own = times_s[kind, stage]
            width = int(np.isfinite(own).any(axis=0).nonzero()[0].max(initial=-1)) + 1
            if not pairs or not width:
                continue
            from_, to = map(list, zip(*pairs, strict=True))
            # Windows over the table of the next stage pair every number of layers of this stage with the layers after
            # it.
            after = np.pad(tables[-1][to, kind, 1:], ((0, 0), (0, width - 1)), constant_values=np.inf)
            joined = join(own[:, :width], sliding_window_view(after, width, axis=1)).min(axis=2)
            # The first stage has no predecessor, and hence no hop.
            hops = np.zeros(num_kinds) if stage == 0 else hop_s[:, kind]
            through = joined[:, None, :] + hops[:, None]
            table[from_, :, :num_layers] = np.minimum(table[from_, :, :num_layers], through)
        tables.append(table)
    return tuple(reversed(tables))


def _of_root(tables: tuple[FloatArray, ...]) -> float:
    return float(tables[0][0, 0, 0])
